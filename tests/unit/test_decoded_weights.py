"""Packed tensors that stay plain in a model of transformers: which they are, and what is told of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from support.contents import fill  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402

from tpde.errors import InvalidInput  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.transformers.folder import stored_dtype, weight_files  # noqa: E402
from tpde.integrations.transformers.unpacked import LOUD_BYTES, load_plain, report_decoded, some  # noqa: E402
from tpde.integrations.transformers.weight_map import WeightMap, WeightSource  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402

BF16 = torch.bfloat16
SPEC = TensorSpec("BF16", (64, 128))
PACKED, PLAIN = (SPEC, fill("normal", SPEC)), (TensorSpec("U8", (3,)), b"abc")


def write(path: Path, **tensors: Any) -> Path:
    path.write_bytes(pack_bytes(safetensors_bytes(tensors)))
    return path


def test_what_is_only_partly_packed(tmp_path: Path) -> None:
    with Checkpoint([write(tmp_path / "x", a=PACKED, b=PACKED, c=PLAIN)]) as checkpoint:
        sources = [
            WeightSource("one", None, {"p": ["a"], "q": ["b"]}),
            WeightSource("two", None, {"p": ["a"], "q": ["c"]}),
            WeightSource("three", None, {"p": ["b", "c"]}),
        ]
        assert [it.stored(checkpoint) for it in sources] == [["a", "b"], ["a"], ["b"]]
        assert WeightMap({}, [(it, "") for it in sources], [], []).halves(checkpoint) == ["two", "three"]


@pytest.mark.parametrize(("more", "level"), [(-1, logging.INFO), (0, logging.WARNING)])
def test_only_what_is_large_is_worth_a_warning(
    more: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    packed = {"a": SimpleNamespace(nbytes=LOUD_BYTES - 5), "b": SimpleNamespace(nbytes=5 + more)}
    checkpoint: Any = SimpleNamespace(packed=packed, is_packed=True)
    decoded = [(WeightSource(it, None, {"": [it, "plain"]}), "is odd") for it in packed]
    with caplog.at_level(logging.INFO, "tpde"):
        assert report_decoded(WeightMap({}, decoded, [], []), checkpoint) == 2
        assert report_decoded(WeightMap({}, [], [], []), checkpoint) == 0
    (record,) = caplog.records
    assert record.levelno == level
    said = f"2 of 2 packed tensors ({LOUD_BYTES + more} bytes) are decoded and stay plain in memory, because"
    assert record.getMessage() == f"{said} each is odd: `a`, `b`"


def test_a_few_names_are_told() -> None:
    assert some(["a", "b", "c", "d"]) == "`a`, `b`, `c`, `d`"
    assert some(["a", "b", "c", "d", "e", "f"]) == "`a`, `b`, `c`, `d` and 2 more"
    assert "\x1b" not in some(["\x1b[2J"])


def test_tensors_that_do_not_go_together(tmp_path: Path) -> None:
    """What transformers says of them is told; our own errors, and a GPU's, are left as they are."""

    def convert(*_: Any) -> Any:
        raise error

    with Checkpoint([write(tmp_path / "x", a=PACKED, c=PLAIN)]) as checkpoint:
        source = type("Odd", (WeightSource,), {"convert": convert})("w", None, {"p": ["a"], "q": ["c"]})
        args = torch.nn.Module(), source, checkpoint, torch.device("cpu"), BF16
        error: Exception = RuntimeError("sizes differ")
        with pytest.raises(InvalidInput, match=r"`a`, `c` cannot become `w` .*RuntimeError: sizes differ"):
            load_plain(*args)
        for error in (InvalidInput("ours"), torch.cuda.OutOfMemoryError("full")):
            with pytest.raises(type(error)) as caught:
                load_plain(*args)
            assert caught.value is error


def test_the_first_floating_point_tensor_tells_a_models_dtype(tmp_path: Path) -> None:
    half = TensorSpec("F16", (2,)), bytes(4)
    for tensors, found in (
        ({"b": PACKED, "c": half, "a": PLAIN}, BF16),
        ({"b": PACKED, "a": half}, torch.float16),
        ({"a": (TensorSpec("F8_E4M3", (2,)), bytes(2)), "b": half}, torch.float16),
        ({"a": PLAIN}, torch.get_default_dtype()),
    ):
        write(tmp_path / "model.safetensors", **tensors)
        assert stored_dtype(tmp_path) is found
    names = {"z": "1.safetensors", "a": "2.safetensors"}
    (tmp_path / "model.safetensors").unlink()  # which would come first
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    write(tmp_path / "1.safetensors", z=PACKED)
    assert stored_dtype(tmp_path) is BF16, "of the first file; the others are not there"


def test_an_index_that_transformers_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    path.write_text('{"weight_map": {"a": "1.safetensors"}}')
    with pytest.raises(InvalidInput, match="it has no `metadata`"):
        weight_files(tmp_path)
    path.write_text('{"metadata": {}, "weight_map": {"a": "1.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors"]


def test_all_that_is_decoded_is_cast(tmp_path: Path) -> None:
    """Plain tensors, too, that become one weight with packed ones."""
    given: dict[str, Any] = {}

    def convert(self: Any, model: Any, take: Any) -> dict[str, Any]:
        given.update({name: take(name) for name in ("a", "b")})
        return {"weight": given["a"] + given["b"]}

    plain = (TensorSpec("BF16", (64, 128)), bytes(2 * 64 * 128))
    (tmp_path / "y").write_bytes(safetensors_bytes({"b": plain}))
    with Checkpoint([write(tmp_path / "x", a=PACKED), tmp_path / "y"]) as checkpoint:
        source = type("Sum", (WeightSource,), {"convert": convert})("weight", None, {"p": ["a"], "q": ["b"]})
        model = torch.nn.Linear(128, 64, bias=False)
        assert load_plain(model, source, checkpoint, torch.device("cpu"), torch.float64) == ["weight"]
    assert {name: it.dtype for name, it in given.items()} == dict.fromkeys("ab", torch.float64)
    words = torch.frombuffer(bytearray(PACKED[1]), dtype=BF16).reshape(64, 128)
    assert torch.equal(model.weight.detach(), words.double())
