"""What a file of tensors says of itself: which are packed, in which order, and what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contents import fill, rng, spec_of
from support.craft import DATA, prefix_blob
from support.files import (
    container,
    pack_bytes,
    safetensors_bytes,
    saved_again,
    unpack_bytes,
    verify_bytes,
)

from tpde.errors import Corrupt, TpdeError
from tpde.files.reader import PackedFile
from tpde.format.constants import MAGIC
from tpde.format.container import TensorSpec
from tpde.io.sources import BytesSource

BLOB = prefix_blob()
SPEC = spec_of("BF16", 3000)
TENSORS = {
    "z.weight": (SPEC, fill("normal", SPEC)),
    "few": (TensorSpec("U8", (5,)), b"12345"),
    "a.weight": (SPEC, fill("exponents", SPEC)),
    "b": (TensorSpec("F32", ()), b"\0\1\2\3"),
}
SOURCE = safetensors_bytes(TENSORS, {"format": "pt"})
PACKED = pack_bytes(SOURCE)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "data", "packed"),
    [
        ("x_tpde", "U8", [len(BLOB)], BLOB, "x"),
        ("_tpde", "U8", [len(BLOB)], BLOB, ""),
        ("x_tpde_tpde", "U8", [len(BLOB)], BLOB, "x_tpde"),
        ("x", "U8", [len(BLOB)], BLOB, None),
        ("x_tpdes", "U8", [len(BLOB)], BLOB, None),
        ("x_tpde", "I8", [len(BLOB)], BLOB, None),
        ("x_tpde", "U8", [len(BLOB), 1], BLOB, None),
        ("x_tpde", "U8", [len(BLOB)], BLOB[:7] + b"\0" + BLOB[8:], None),
        ("x_tpde", "U8", [len(BLOB)], b"\0" + BLOB[1:], None),
        ("x_tpde", "U8", [7], MAGIC[:7], None),
        ("x_tpde", "U8", [0], b"", None),
    ],
)
def test_what_is_a_blob_in_a_file_that_was_saved_again(
    name: str, dtype: str, shape: list[int], data: bytes, packed: str | None
) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    with PackedFile(container({name: entry}, data)) as file:
        assert file.packed_names() == ([] if packed is None else [packed])
        assert file.is_packed is (packed is not None)
        assert file.original is None
        wanted = name if packed is None else packed
        assert list(file.specs) == [wanted]
        assert file.read(wanted).tobytes() == (data if packed is None else DATA)


def test_a_blob_that_is_nothing_but_its_magic_is_refused() -> None:
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    with pytest.raises(TpdeError, match="`x`"):
        PackedFile(container({"x_tpde": entry}, MAGIC))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "array", "source", "path", "text"])
def test_a_file_may_be_a_path_or_bytes_or_a_source(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(PACKED)
    made: dict[Any, Any] = {
        "array": np.frombuffer(PACKED, np.uint8),
        "source": BytesSource(PACKED),
        "path": path,
        "text": str(path),
    }
    with PackedFile(made[kind] if kind in made else kind(PACKED)) as file:
        assert file.read("a.weight").tobytes() == TENSORS["a.weight"][1]


def test_a_packed_file_gives_what_its_source_had() -> None:
    with PackedFile(PACKED) as file:
        assert file.is_packed
        assert set(file.packed_names()) == {"a.weight", "z.weight"}
        assert file.offset_names() == list(TENSORS)
        assert file.metadata() == {"format": "pt"}
        assert file.specs == {name: spec for name, (spec, _) in TENSORS.items()}
        assert len(file.source_header()).to_bytes(8, "little") + file.source_header() in SOURCE
        for name, (_, data) in TENSORS.items():
            assert file.read(name).tobytes() == data
        with pytest.raises(KeyError, match=r"no tensor `a\.weight_tpde`"):
            file.tensor("a.weight_tpde")


def test_a_file_that_was_saved_again_gives_what_it_has() -> None:
    again = saved_again(PACKED)
    with PackedFile(again) as file:
        assert file.is_packed
        assert file.original is None
        assert file.offset_names() == ["a.weight", "b", "few", "z.weight"]
        assert list(file.specs) == sorted(TENSORS)
        assert file.metadata() == {"by": "another"}
        assert file.specs == {name: spec for name, (spec, _) in TENSORS.items()}
        for name, (_, data) in TENSORS.items():
            assert file.read(name).tobytes() == data
        with pytest.raises(KeyError, match="no tensor `x`"):
            file.tensor("x")
    assert verify_bytes(again) == []
    with PackedFile(unpack_bytes(again)) as file:
        assert not file.is_packed
        assert file.metadata() == {"by": "another"}
        assert {name: file.read(name).tobytes() for name in file.specs} == {
            name: data for name, (_, data) in TENSORS.items()
        }


def test_a_packed_file_of_plain_tensors_is_packed_all_the_same() -> None:
    source = safetensors_bytes({"few": TENSORS["few"], "b": TENSORS["b"]})
    packed = pack_bytes(source)
    with PackedFile(packed) as file:
        assert file.is_packed
        assert file.packed_names() == []
    assert unpack_bytes(packed) == source


PIECE = 8 << 20


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 50])
def test_plain_tensors_are_read_in_pieces(size: int) -> None:
    data = rng(size).bytes(size)
    source = safetensors_bytes({"before": TENSORS["few"], "x": (TensorSpec("U8", (size,)), data)})
    with PackedFile(source) as file:
        tensor = file.tensor("x")
        pieces = list(tensor.pieces())
        assert pieces == [(at, min(at + PIECE, size)) for at in range(0, size, PIECE)]
        out = np.zeros(size, np.uint8)
        for begin, end in pieces:
            tensor.read(begin, end, out[begin:end])
        assert out.tobytes() == data
        tensor.read(size // 2, size, out[size // 2 :])
        assert out.tobytes() == data


def test_hashes_of_plain_tensors_are_in_the_order_of_their_names() -> None:
    """As texts compare by code points, which is the order of their UTF-8 bytes, and not that of UTF-16."""
    spec = TensorSpec("U8", (3,))
    names = ["z", "\U0001f600", "\uffff", "é", "Z", "a10", "a9"]
    packed = pack_bytes(safetensors_bytes({name: (spec, rng(name).bytes(3)) for name in names}))
    assert verify_bytes(packed) == []
    at = packed.index(b'"tpde.plain":"') + len(b'"tpde.plain":"')
    first, second = packed[at : at + 32], packed[at + 32 : at + 64]
    changed = packed[:at] + second + first + packed[at + 64 :]
    assert [it.tensor for it in verify_bytes(changed)] == ["Z", "a10"]
    with pytest.raises(Corrupt, match="hash to"):
        unpack_bytes(changed)


@pytest.mark.parametrize("kept", ["tpde.source", "tpde.source_hash", "tpde.plain"])
def test_what_a_version_belongs_to_is_not_there_alone(kept: str) -> None:
    """format.md 1.3. A file that another tool saved has none of them."""
    data = safetensors_bytes({"a": (TensorSpec("F32", (3,)), b"x" * 12)}, {kept: "x", "tpde2": "1"})
    with pytest.raises(Corrupt, match=rf"has `{kept}`, but no `tpde`"):
        PackedFile(data)
