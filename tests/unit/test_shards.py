"""Indexes of shards from strangers: what they say, or `InvalidInput` that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpde.errors import InvalidInput, TpdeError
from tpde.files import documents
from tpde.files.inputs import shards
from tpde.files.shards import is_index, parse_index, read_index

PATH = Path("model.safetensors.index.json")
DEEP = "[" * 100_000 + "]" * 100_000


def text_of(weights: Any, **more: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": weights, **more})


def test_what_an_index_says() -> None:
    text = text_of({"b": "2.safetensors", "a": "1.safetensors", "c": "sub/1.safetensors"}, x=[1])
    index = parse_index(text, Path("folder") / PATH)
    assert index.text == text
    assert index.names() == ["1.safetensors", "2.safetensors", "sub/1.safetensors"]
    assert index.files()[2] == Path("folder/sub/1.safetensors")
    renamed = json.loads(index.renamed(lambda name, file: f"{name} of {file}"))
    assert list(renamed) == ["metadata", "weight_map", "x"]
    assert next(iter(renamed["weight_map"].items())) == ("b of 2.safetensors", "2.safetensors")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors.index.json", True),
        ("sub/diffusion_pytorch_model.safetensors.index.fp16.json", True),
        ("model.safetensors.json", False),
        ("index.json", False),
        (".safetensors.index.json", False),
        ("pytorch_model.bin.index.json", False),
    ],
)
def test_names_of_indexes(name: str, expected: bool) -> None:
    assert is_index(name) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '"weight_map"',
        DEEP,
        '{"weight_map": ' + DEEP + "}",
        '{"metadata": ' + "9" * 5000 + ', "weight_map": {"a": "b"}}',
        '{"weight_map": {"a": "b", "a": "c"}}',
        '{"weight_map": {"a": "b"}, "weight_map": {"a": "c"}}',
        *(text_of(it) for it in (None, 5, True, "a", [], ["a"], {})),
        *(text_of({"a": it}) for it in (None, 5, True, 1.5, [], ["a"], {}, {"a": "b"})),
        *(text_of({"a": "1.safetensors"}, metadata=it) for it in (None, 5, "a", [])),
        text_of({"\ud800": "1.safetensors"}),
    ],
)
def test_what_is_no_index(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"model\.safetensors\.index\.json"):
        parse_index(text, PATH)


@pytest.mark.parametrize(
    "file",
    [
        *("", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a/../x", "./x", "a//x", "a/"),
        *(
            "a\0b",
            "\ud800",
            "C:\\x",
            "C:x",
            "a\\b",
            "\\\\host\\x",
            "x" * 256,
            "\u00e9" * 128,
            "a/" * 5000 + "x",
        ),
    ],
)
def test_files_that_are_not_below_the_index(file: str) -> None:
    with pytest.raises(InvalidInput, match="which is no file below it") as caught:
        parse_index(text_of({"w": file}), PATH)
    assert str(caught.value).isascii()
    assert "\0" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=JSON
    | st.fixed_dictionaries(
        {"weight_map": JSON | st.dictionaries(st.text(), JSON)}, optional={"metadata": JSON}
    )
)
def test_any_json_is_an_index_or_refused(value: Any) -> None:
    try:
        index = parse_index(json.dumps(value), PATH)
    except InvalidInput:
        return
    assert all(Path(os.path.abspath(it)).is_relative_to(Path.cwd()) for it in index.files())
    assert index.renamed(lambda name, _: name).encode()


@given(data=st.binary(max_size=200) | st.text('{}[]",:\\u0d8weightmap ', max_size=200).map(str.encode))
def test_any_bytes_are_an_index_or_refused(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "x.safetensors.index.json"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"x\.safetensors\.index\.json"):
        read_index(path)


def test_bounds_before_anything_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / PATH
    path.touch()
    os.truncate(path, 1 << 40)  # a hole: reading it all takes a TiB of memory
    with pytest.raises(InvalidInput, match=f"has {1 << 40} bytes"):
        read_index(path)
    path.write_text(
        '{"weight_map":[' + "[]," * documents.MAX_JSON_VALUES
    )  # and no end, as parsing would find
    with pytest.raises(InvalidInput, match=r"more than \d+ values"):
        read_index(path)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _of_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("make", [_pipe, Path.mkdir, _of_nothing])
def test_what_is_no_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Nobody writes to the pipe, so that a reader would wait for ever."""
    make(tmp_path / PATH)
    with pytest.raises(InvalidInput, match=r"not a regular file|does not exist"):
        read_index(tmp_path / PATH)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TpdeError, match="not a regular file"):
        shards(tmp_path)


def test_all_readers_refuse_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    pytest.importorskip("diffusers", reason="needs diffusers")
    from tpde.integrations.diffusers import load_model as of_diffusers
    from tpde.integrations.transformers import folder as of_transformers

    names = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")
    for text in (DEEP, "[]", '{"weight_map": 5}', '{"weight_map": [1]}', text_of({"w": "../x.safetensors"})):
        for name in names:
            (tmp_path / name).write_text(text)
        for read in (
            shards,
            of_transformers.weight_files,
            lambda folder: of_diffusers.weight_files(folder, None),
        ):
            with pytest.raises(InvalidInput, match=r"index\.json"):
                read(tmp_path)


def test_a_whole_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    from tpde.integrations.transformers.folder import weight_files

    (tmp_path / PATH).write_text(text_of({"w": "x.safetensors"}, metadata={}))
    assert weight_files(tmp_path) == [tmp_path / "x.safetensors"]
    (tmp_path / "model.safetensors").mkdir()
    assert weight_files(tmp_path) == [tmp_path / "x.safetensors"]
    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
