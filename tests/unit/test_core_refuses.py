"""The C core refuses what Python's readers would have refused before, and what they leave to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.craft import DATA, SPEC, TABLE, edited_section, file_of, prefix_blob, refused

from tpde.codec import native, reference
from tpde.codec.plan import base_header, core_layout
from tpde.errors import Corrupt, NativeError
from tpde.format.constants import CODEC_PREFIX
from tpde.integrations.checkpoint import Checkpoint


def _layout(tables: int = 1) -> native.CoreLayout:
    layout = core_layout(base_header(SPEC, CODEC_PREFIX, 512))
    layout.tables = tables
    return layout


def _section(*tables: bytes) -> bytes:
    data = b"".join(tables)
    return data.ljust(reference.align(len(data), 16), b"\0")


def test_a_coded_plane_without_a_table_is_refused() -> None:
    blob = prefix_blob()
    header = reference.parse_header(blob)
    codec = native.Codec(_layout(), _section(TABLE.serialize()))  # no plane of this layout has a table
    index = np.frombuffer(blob, np.uint8, reference.RECORD.size * header.chunks, header.index_at)
    out = np.empty(len(DATA), np.uint8)
    with pytest.raises(Corrupt, match="a coded plane without a table"):
        codec.decode(index, 0, np.frombuffer(blob, np.uint8), 0, header.blob_bytes, out)


@pytest.mark.parametrize(("longest", "raw"), [(12, 1), (11, 2), (6, 7)])
def test_an_index_above_twelve_bits_is_refused(longest: int, raw: int) -> None:
    counts = bytes(2 * (longest - 1)) + (1 << longest).to_bytes(2, "little")
    table = bytes([1, longest, raw, 0]) + counts + bytes(1 << longest)
    with pytest.raises(Corrupt, match="raw bits out of range"):
        native.Codec(_layout(), _section(table))


def test_bytes_after_a_table_are_refused() -> None:
    table = TABLE.serialize()
    native.Codec(_layout(), _section(table))
    with pytest.raises(Corrupt, match="does not fit its tables"):
        native.Codec(_layout(), _section(table) + bytes(16))
    padded = reference.align(len(table), 16)
    blob = prefix_blob()
    for at in (len(table) - 1, padded - 1):  # of the table, and of the section
        refused(edited_section(blob, at, b"\1"), match="padding")


def test_a_seventeenth_table_is_refused() -> None:
    table = TABLE.serialize()
    assert len(native.Codec(_layout(16), _section(*[table] * 16)).tables()) == 16
    with pytest.raises(NativeError, match="layout is not valid"):
        native.Codec(_layout(17), _section(*[table] * 17))


def test_offsets_beyond_32_bits_are_refused() -> None:
    layout = _layout()
    layout.first_table[1], layout.table_count[1] = 0, 1
    codec = native.Codec(layout, _section(TABLE.serialize()), encode=True)
    words = np.frombuffer(DATA, np.uint8)
    out = np.empty(codec.bound(len(DATA) // 2, 3), np.uint8)
    last = ((1 << 32) - 1) << 4
    record = codec.encode(words[:1024], 0, 1, last - 1024, out).records  # of 1024 bytes at most
    assert int.from_bytes(record[:4].tobytes(), "little") == (1 << 32) - 1 - 64
    with pytest.raises(NativeError, match="outgrows its 32-bit offsets"):
        codec.encode(words, 0, 3, last - 1024, out)
    with pytest.raises(NativeError):
        codec.encode(words, 0, 3, last + 16, out)


def test_a_plain_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    from support.files import safetensors_bytes

    from tpde.format.container import TensorSpec

    (tmp_path / "packed").write_bytes(file_of(prefix_blob()))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(safetensors_bytes({"bias": (TensorSpec("U8", (3,)), b"abc")}))
    files = [tmp_path / "packed", tmp_path / "a"]
    with Checkpoint(files) as found:
        assert (list(found.packed), list(found.plain)) == (["x"], ["bias"])
    with pytest.raises(Corrupt, match="`bias` is in another file too"):
        Checkpoint([*files, tmp_path / "b"])
