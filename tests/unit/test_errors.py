"""Errors carry what they say as fields: through pickles, copies and new names, and in the source."""

from __future__ import annotations

import ast
import copy
import inspect
import multiprocessing
import pickle
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.files import safetensors_bytes

import tpde
from tpde import errors
from tpde.errors import Corrupt, InvalidInput, OutOfMemory, TpdeError, Truncated
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch
from tpde.io.sources import FileSource

SOURCE = Path(tpde.__file__).parent
CLASSES = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TpdeError)
}
FIELDS: dict[str, Any] = {"hint": "do it", "where": "f", "found": 3, "needed": [4, "x"]}

# Being rewritten: each goes from here with the last remedy in a message of it.
EXEMPT: tuple[str, ...] = ()


def fields(error: TpdeError) -> dict[str, object]:
    return {"kind": type(error), "message": error.message, "text": str(error), **vars(error)}


def samples() -> list[TpdeError]:
    return [
        *(kind("`x` is bad", **FIELDS) for kind in CLASSES.values()),
        Corrupt("`x` is bad", tensor="x", chunk=0, **FIELDS),
        OutOfMemory("too small", least=5, budget="ram", **FIELDS),
    ]


# ---- fields


def test_what_is_said_is_there_as_fields_and_as_text() -> None:
    error = Truncated("`f` ends at 3; 8 are needed", hint="fetch the rest", where="f", found=3, needed=8)
    assert str(error) == "`f` ends at 3; 8 are needed; fetch the rest"
    assert (error.message, error.hint) == ("`f` ends at 3; 8 are needed", "fetch the rest")
    assert (error.where, error.found, error.needed) == ("f", 3, 8)
    assert "Truncated: `f` ends at 3; 8 are needed; fetch the rest" in traceback.format_exception(error)[-1]


@pytest.mark.parametrize("kind", CLASSES.values())
def test_what_is_not_said_is_none(kind: type[TpdeError]) -> None:
    error = kind("`f` is bad")
    assert str(error) == error.message == "`f` is bad"
    assert error.hint is error.where is error.found is error.needed is None


# ---- pickles and copies


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_keep_everything(protocol: int) -> None:
    for error in samples():
        assert fields(pickle.loads(pickle.dumps(error, protocol))) == fields(error)


def test_copies_keep_everything() -> None:
    for error in samples():
        for made in (copy.copy(error), copy.deepcopy(error)):
            assert made is not error
            assert fields(made) == fields(error)


def test_another_process_raises_it_with_everything(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        error = pool.submit(FileSource, gone).exception()
    assert isinstance(error, InvalidInput)
    assert (error.message, error.hint, error.where) == (f"`{gone}` does not exist", "check the path", gone)


# ---- the same error under a name


def test_a_prefix_keeps_the_rest() -> None:
    for error in samples():
        made = error.prefixed("`g`", where="g")
        assert made is not error
        assert fields(made) == fields(error) | {
            "message": "`g`: " + error.message,
            "text": f"`g`: {error.message}; do it",
        }
        assert error.message in ("`x` is bad", "too small")
    assert Truncated("short").prefixed("`g`", where="g").where == "g"
    assert Truncated("short").prefixed("`g`").where is None


def test_of_a_tensor() -> None:
    short = Truncated("is short", hint="fetch it", found=1).of_tensor("x")
    assert (str(short), short.where, short.found) == ("tensor `x`: is short; fetch it", "x", 1)
    bad = Corrupt("is bad", chunk=3, hint="fetch it", where="f").of_tensor("x")
    assert str(bad) == "tensor `x`, chunk 3: is bad; fetch it"
    assert (bad.message, bad.hint) == ("tensor `x`, chunk 3: is bad", "fetch it")
    assert (bad.tensor, bad.chunk, bad.where) == ("x", 3, "f")
    assert Corrupt("is bad").of_tensor("x").message == "tensor `x`: is bad"


def test_a_new_error_brings_no_frames_of_the_old_one() -> None:
    with pytest.raises(Corrupt) as old:
        raise Corrupt("is bad", **FIELDS)
    assert old.value.__traceback__ is not None
    made = old.value.prefixed("`g`")
    assert made.__traceback__ is made.__cause__ is made.__context__ is None
    with pytest.raises(Corrupt) as caught:
        raise made from ValueError("why")
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.hint == "do it"


# ---- the source


def _raises(text: str) -> Iterator[tuple[int, ast.Call]]:
    """Calls of error classes, by line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in CLASSES:
                yield node.lineno, node


def _literal(node: ast.expr) -> str:
    """The literal text in an expression, with `?` for what is put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "?" for part in node.values)
    return "".join(_literal(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))


def hidden(text: str) -> list[int]:
    """Lines of errors whose message goes on after a semicolon, and that have no hint."""
    return [
        line
        for line, call in _raises(text)
        if call.args
        and "; " in "".join(_literal(call.args[0]).split("`")[::2])
        and not any(keyword.arg in ("hint", None) for keyword in call.keywords)
    ]


def test_what_hides_a_remedy() -> None:
    assert hidden('raise Corrupt("is bad; fetch it")') == [1]
    assert hidden('raise errors.Corrupt(f"{x} is bad; " + rest, tensor=x)') == [1]
    assert hidden('raise Corrupt("is bad %s" % x + "; fetch it")') == [1]
    assert hidden('raise Corrupt("is bad; very", hint="fetch it")') == []
    assert hidden('raise Corrupt(f"`a; {x}; b` is bad", chunk=1)') == []
    assert hidden('raise ValueError("is bad; fetch it")') == []


def test_no_remedy_hides_in_a_message() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(EXEMPT):
            found += [f"{name}:{line}" for line in hidden(path.read_text("utf-8"))]
    assert not found, f"pass what to do as `hint=`: {', '.join(found)}"


def test_hints_for_dtypes_say_what_helps(tmp_path: Path) -> None:
    """Another version of tpde would not."""
    pytest.importorskip("torch", reason="needs torch")
    data = np.zeros(6, np.uint8)
    with pytest.raises(errors.UnsupportedDtype, match="odd") as caught:
        to_torch(data, TensorSpec("F4", (4, 3)))
    assert "tpde unpack" in str(caught.value.hint)
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"a": (TensorSpec("F4", (4, 3)), data.tobytes())}))
    tpde.pack(path, tmp_path / "packed.safetensors")
    with (
        tpde.safe_open(tmp_path / "packed.safetensors") as file,
        pytest.raises(errors.UnsupportedDtype, match="inside a byte") as caught,
    ):
        file.get_slice("a")[1]
    assert "whole rows" in str(caught.value.hint)


def test_what_is_missing_is_caught_as_an_import_that_fails() -> None:
    with pytest.raises(ImportError) as caught:
        raise errors.MissingDependency("no `x`", hint="install it")
    assert str(caught.value) == "no `x`; install it"
