"""Attacks by what is named as input, and by what only looks like a file (attacks.md, A47 to A54)."""

from __future__ import annotations

import base64
import json
import os
import struct
import time
from pathlib import Path

import pytest
import zstandard
from support.craft import bounded, edited_record, patch, prefix_blob, refused, reseal, zstd_blob
from support.files import container, pack_bytes, safetensors_bytes, unpack_bytes, verify_bytes

from tpde.cli.inspect import render
from tpde.codec import reference
from tpde.errors import Corrupt, InvalidInput, TpdeError
from tpde.files.documents import read_document
from tpde.files.inspection import inspect
from tpde.files.operations import pack
from tpde.files.reader import PackedFile
from tpde.files.shards import read_index
from tpde.format.container import TensorSpec


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a47_pipes_and_devices(kind: str, tmp_path: Path) -> None:
    """A reader would wait for the pipe for ever, and for the end of the device."""

    def make(name: str) -> Path:
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        return path

    with bounded(1):
        for name in ("x.safetensors", "x.pt", "x.bin"):
            path = make(name)
            if kind == "folder":
                continue  # of which models are read
            with pytest.raises(InvalidInput, match="not a regular file"):
                pack(path, tmp_path / "out")
            with pytest.raises(InvalidInput, match="not a regular file"):
                PackedFile(path)
        with pytest.raises(InvalidInput, match="not a regular file"):
            read_index(make("model.safetensors.index.json"))
        with pytest.raises(InvalidInput, match="not a regular file"):
            read_document(make("config.json"))


def test_a48_shapes_that_overflow_beside_a_zero(tmp_path: Path) -> None:
    for shape in ([1 << 63, 0], [0, 1 << 64], [1 << 40, 1 << 40, 0], [0] + [1 << 20] * 8):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        with pytest.raises(Corrupt, match="`x`") as caught:
            PackedFile(container({"x": entry}, b""))
        assert caught.value.tensor == "x"
    header = reference.parse_header(prefix_blob())
    header.codec, header.planes, header.tables, header.tables_bytes = 3, (), 0, 0
    header.words, header.segment_words, header.chunks, header.max_chunk_bytes = 0, 1, 0, 0
    header.max_stream_bytes, header.shape = 0, (1 << 63, 0)
    header.blob_bytes = header.tables_at
    blob = header.serialize()
    refused(reseal(blob, len(blob)), match="cannot have the shape")


def _packed() -> tuple[dict[str, object], bytes, dict[str, str]]:
    spec = TensorSpec("U8", (600,))
    whole = pack_bytes(safetensors_bytes({"a": (spec, bytes(600)), "b": (TensorSpec("U8", (3,)), b"abc")}))
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    return header, whole[8 + size :], header["__metadata__"]


def test_a49_bytes_behind_the_frame_of_the_source_header() -> None:
    header, data, metadata = _packed()
    frame = base64.b64decode(metadata["tpde.source"])
    for more in (b"\0", b"x" * 100, frame, zstandard.compress(b"")):
        text = base64.b64encode(frame + more).decode()
        with pytest.raises(Corrupt, match="source's header"):
            PackedFile(container(header | {"__metadata__": metadata | {"tpde.source": text}}, data))


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\v", "\u00a0"])
def test_a50_white_space_in_the_list_of_hashes(space: str) -> None:
    header, data, metadata = _packed()
    digits = metadata["tpde.plain"]
    for text in (digits + space, space + digits, digits[:2] + space + digits[2:], digits + 2 * space):
        with pytest.raises(Corrupt, match=r"tpde\.plain"):
            PackedFile(container(header | {"__metadata__": metadata | {"tpde.plain": text}}, data))
    del header["__metadata__"]["tpde.plain"]  # type: ignore[attr-defined]
    with pytest.raises(Corrupt, match=r"tpde\.plain"):
        PackedFile(container(header, data))


def test_a51_bytes_that_mean_nothing_and_are_not_zero() -> None:
    blob = prefix_blob()
    header = reference.parse_header(blob)
    planes_end = reference.HEADER.size + 8 * len(header.shape) + 4 * header.word_bytes
    index_end = header.index_at + reference.RECORD.size * header.chunks
    assert planes_end < header.tables_at
    assert index_end < header.chunks_at
    for at in (planes_end, header.tables_at - 1, index_end, header.chunks_at - 1):
        refused(reseal(patch(blob, at, b"\1"), header.chunks_at), match="padding")
    refused(edited_record(zstd_blob(), 0, table=1), match="table", chunk=0)
    refused(edited_record(blob, 1, modes=0, table=1), match="table", chunk=1)


def test_a52_names_that_are_long_or_steer_a_terminal(tmp_path: Path) -> None:
    for name in (";" * 80_000, "a: " * 30_000, "\x1b[2J\nerror: fine\r" * 5000, "\u202e" * 80_000):
        entry = {"dtype": "BF16", "shape": [3], "data_offsets": [0, 5]}
        start = time.process_time()
        with pytest.raises(Corrupt) as caught:
            PackedFile(container({name: entry}, bytes(5)))
        assert time.process_time() - start < 1
        assert caught.value.tensor == name
        assert len(str(caught.value)) < 3000
        assert str(caught.value).isprintable()
        again = caught.value.prefixed(name)
        assert len(again.message) <= 2000
        assert again.message.isprintable()
    names = {f"{'n' * 800_000}{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(2)}
    names |= {f"{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(2000)}
    (tmp_path / "x").write_bytes(container(names, b""))
    report = inspect(tmp_path / "x")
    with bounded(8):
        text = render(report)
    assert len(text) < 1 << 20
    assert text.count("…") == 2


def test_a53_hundreds_of_thousands_of_tensors(tmp_path: Path) -> None:
    """Here 40,000: two seconds of processor time to pack, once 18, most of them for the header."""
    count = 40_000
    entries = {
        f"model.layers.{i % 100}.mlp.experts.{i // 100}.weight": {
            "dtype": "BF16", "shape": [0, 4], "data_offsets": [0, 0],
        }
        for i in range(count)
    }  # fmt: skip
    source, packed = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    source.write_bytes(container(entries, b""))
    start = time.process_time()
    pack(source, packed, threads=2)
    assert time.process_time() - start < 7
    assert unpack_bytes(packed.read_bytes()) == source.read_bytes()


def test_a54_entries_in_other_forms_than_usual() -> None:
    """A key more, another order: what the stock library takes is restored byte for byte."""
    text = (
        b'{"b":{"data_offsets":[0,3],"shape":[3],"dtype":"U8"},'
        b'"a":{"dtype":"U8","shape":[600],"data_offsets":[3,603],"x":{"y":[null]}}}'
    )
    source = container(text, bytes(603))
    packed = pack_bytes(source)
    assert unpack_bytes(packed) == source
    assert verify_bytes(packed) == []
    for value in (b'{"dtype":"U8","shape":[8],"data_offsets":[0,8]}', b'"U8"', b"[8]", b"null"):
        for header in (value, b'{"x":{"dtype":"U8","shape":[8],"data_offsets":' + value + b"}}"):
            with pytest.raises(TpdeError):
                PackedFile(container(header, bytes(8)))
