"""The C core refuses what Python's readers would have refused before: chunks, index maps, sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.core_layouts import coded_layout, layout_of, section_of
from support.craft import DATA, TABLE, file_of, prefix_blob

from tpde.codec import core_chunks, native, prefix_codes, reference
from tpde.errors import Corrupt, NativeError
from tpde.loading.checkpoint_files import Checkpoint

HEADER = reference.parse_header(prefix_blob())
BLOB = np.frombuffer(prefix_blob(), np.uint8)
RECORDS = np.dtype(
    [("offset", "<u4"), ("checksum", "<u4"), ("modes", "<u2"), ("table", "u1"), ("fill", "u1")]
)


def _index() -> np.ndarray:
    size = reference.RECORD.size * HEADER.chunks
    return BLOB[HEADER.index_at : HEADER.index_at + size].copy()


def _check(index: np.ndarray, largest: int = 1 << 16) -> None:
    core_chunks.index_check(coded_layout(), index, HEADER.chunks_at, HEADER.blob_bytes, largest)


def _decode(index: np.ndarray, *, data: np.ndarray = BLOB, end: int = 0, out: int = len(DATA)) -> np.ndarray:
    words = np.empty(out, np.uint8)
    codec = prefix_codes.PrefixCodec(coded_layout(), section_of(TABLE.serialize()))
    codec.decode(index, 0, data, 0, end or HEADER.blob_bytes, words)
    return words


def test_a_coded_plane_without_a_table_is_refused() -> None:
    blob = prefix_blob()
    header = reference.parse_header(blob)
    codec = prefix_codes.PrefixCodec(
        layout_of(), section_of(TABLE.serialize())
    )  # no plane of this layout has a table
    index = np.frombuffer(blob, np.uint8, reference.RECORD.size * header.chunks, header.index_at)
    out = np.empty(len(DATA), np.uint8)
    with pytest.raises(Corrupt, match="a coded plane without a table"):
        codec.decode(index, 0, np.frombuffer(blob, np.uint8), 0, header.blob_bytes, out)


# ---- index maps ----


@pytest.mark.parametrize(
    ("chunk", "field", "value", "says"),
    [
        (0, "offset", -1, "does not follow the index map"),
        (0, "offset", 1, "does not follow the index map"),
        (2, "offset", -1000, "ends before it starts"),
        (2, "offset", 1 << 20, "outside the blob"),
        (1, "modes", 1 << 4, "unknown mode of a plane"),
        (1, "modes", 3, "unknown mode of a plane"),
        (1, "fill", 1, "a fill value without a plane"),
        (1, "table", 1, "a table without a plane that it codes"),
    ],
)
def test_index_maps_that_cannot_be_are_refused(chunk: int, field: str, value: int, says: str) -> None:
    index = _index()
    _check(index)
    record = index.view(RECORDS)[chunk : chunk + 1]
    found = int(record[field][0])
    if field == "table":
        record["modes"] = 0
    record[field] = max(found + value, 0) if field == "offset" else found | value
    with pytest.raises(Corrupt, match=says):
        _check(index)


def test_chunks_as_large_as_the_header_allows_are_taken() -> None:
    offsets = [*_index().view(RECORDS)["offset"].astype(int) << HEADER.unit_log2, HEADER.blob_bytes]
    largest = int(np.diff(offsets).max())
    _check(_index(), largest)
    with pytest.raises(Corrupt, match="larger than the header allows"):
        _check(_index(), largest - 1)


def test_a_table_where_there_are_none_is_refused() -> None:
    index = _index()
    index.view(RECORDS)["table"][2] = 1
    _check(index)
    with pytest.raises(Corrupt, match="a table without a plane that it codes") as caught:
        core_chunks.index_check(layout_of(0), index, HEADER.chunks_at, HEADER.blob_bytes, 1 << 16)
    assert caught.value.chunk == 2


# ---- chunks ----


def test_only_the_bytes_at_hand_are_read() -> None:
    assert _decode(_index()).tobytes() == DATA
    with pytest.raises(Corrupt, match="outside the bytes at hand"):
        _decode(_index(), data=BLOB[:-16])
    codec, first = prefix_codes.PrefixCodec(coded_layout(), section_of(TABLE.serialize())), HEADER.chunks_at
    words = np.empty(len(DATA), np.uint8)
    codec.decode(_index(), 0, BLOB[first:], first, HEADER.blob_bytes, words)
    with pytest.raises(Corrupt, match="outside the bytes at hand") as caught:
        codec.decode(_index(), 0, BLOB[first + 16 :], first + 16, HEADER.blob_bytes, words)
    assert caught.value.chunk == 0


def test_a_chunk_that_ends_before_it_begins_is_not_decoded() -> None:
    index = _index()
    index.view(RECORDS)["offset"][1] = index.view(RECORDS)["offset"][0] - 1
    with pytest.raises(Corrupt, match="outside the bytes at hand") as caught:
        _decode(index)
    assert caught.value.chunk == 0


def test_modes_that_are_not_known_are_not_decoded() -> None:
    for modes in (0b1000 | 3, 0b1100):
        index = _index()
        index.view(RECORDS)["modes"][1] = modes
        with pytest.raises(Corrupt, match="unknown mode of a plane") as caught:
            _decode(index)
        assert caught.value.chunk == 1


def test_a_coded_plane_has_a_whole_header() -> None:
    """Of 36 bytes; a chunk that ends within it says so, and not what the rest of the header would."""
    last = int(_index().view(RECORDS)["offset"][2]) << HEADER.unit_log2
    raw = reference.align(1500 - 2 * 512, 16)
    for left in (0, 16, 32):
        with pytest.raises(Corrupt, match="inside a coded plane") as caught:
            _decode(_index(), end=last + raw + left)
        assert (caught.value.found, caught.value.needed) == (left, 36)


@pytest.mark.parametrize("blocks", [1, 30])
def test_a_plane_ends_with_its_chunk(blocks: int) -> None:
    """Though the bytes behind are at hand, and are even the right ones."""
    index = _index()
    records = index.view(RECORDS)
    first = int(records["offset"][0])
    records["offset"][1] = first + blocks if blocks < 32 else first
    with pytest.raises(Corrupt, match=r"the chunk ends inside a (raw|coded) plane"):
        _decode(index)
    # The last one's end is the caller's.
    last = int(_index().view(RECORDS)["offset"][2]) << HEADER.unit_log2
    with pytest.raises(Corrupt, match=r"the chunk ends inside a (raw|coded) plane"):
        _decode(_index(), end=last + 16 * blocks)


def test_a_coded_plane_ends_with_its_chunk() -> None:
    """Cut by one block of 16, which holds nothing but the end of its lanes."""
    offsets = _index().view(RECORDS)["offset"].astype(int)
    index = _index()
    index.view(RECORDS)["offset"][1] = offsets[1] - 2
    with pytest.raises(Corrupt, match="the chunk ends inside a coded plane"):
        _decode(index)


@pytest.mark.usefixtures("simd_restored")
@pytest.mark.parametrize("simd", native.simd_available())
def test_lanes_that_read_their_neighbours_bits_are_named(simd: str) -> None:
    """One lane has a bit fewer than its codewords, the last one a bit more: all together have as many."""
    native.simd_select(simd)
    at = (int(_index().view(RECORDS)["offset"][0]) << HEADER.unit_log2) + 512
    damaged = BLOB.copy()
    lengths = damaged[at + 4 : at + 36]
    lane = int(lengths[:31].argmax())
    lengths[lane] -= 1
    lengths[31] += 1
    with pytest.raises(Corrupt, match="a lane's codewords run past its bits"):
        _decode(_index(), data=damaged)
    damaged = BLOB.copy()
    damaged[at] -= 1  # every lane has a bit fewer
    with pytest.raises(Corrupt, match="a lane's codewords run past its bits"):
        _decode(_index(), data=damaged)


def test_a_lanes_header_has_no_fourth_byte() -> None:
    at = (int(_index().view(RECORDS)["offset"][0]) << HEADER.unit_log2) + 512
    for place, value in ((2, 9), (3, 1)):
        damaged = BLOB.copy()
        damaged[at + place] = value
        with pytest.raises(Corrupt, match="a coded plane's header is not valid"):
            _decode(_index(), data=damaged)


# ---- sizes, and files ----


def test_offsets_beyond_32_bits_are_refused() -> None:
    layout = layout_of()
    layout.first_table[1], layout.table_count[1] = 0, 1
    codec = prefix_codes.PrefixCodec(layout, section_of(TABLE.serialize()), encode=True)
    words = np.frombuffer(DATA, np.uint8)
    out = np.empty(codec.bound(len(DATA) // 2, 3), np.uint8)
    last = ((1 << 32) - 1) << 4
    record = codec.encode(words[:1024], 0, 1, last - 1024, out).records  # of 1024 bytes at most
    assert int.from_bytes(record[:4].tobytes(), "little") == (1 << 32) - 1 - 64
    with pytest.raises(NativeError, match="outgrows its 32-bit offsets"):
        codec.encode(words, 0, 3, last - 1024, out)
    with pytest.raises(NativeError):
        codec.encode(words, 0, 3, last + 16, out)


@pytest.mark.parametrize("more", [-2, 2, 4096])
def test_an_output_of_another_size_is_refused(more: int) -> None:
    with pytest.raises(NativeError, match="the output's size does not fit"):
        _decode(_index(), out=len(DATA) + more)


def test_an_output_that_is_too_small_is_not_written() -> None:
    codec = prefix_codes.PrefixCodec(coded_layout(), section_of(TABLE.serialize()), encode=True)
    words = np.frombuffer(DATA, np.uint8)
    bound = codec.bound(words.size // 2, HEADER.chunks)
    codec.encode(words, 0, HEADER.chunks, 1 << 12, np.empty(bound, np.uint8))
    with pytest.raises(NativeError, match="the output buffer is too small"):
        codec.encode(words, 0, HEADER.chunks, 1 << 12, np.empty(bound - 1, np.uint8))


def test_samples_that_cannot_be_are_refused() -> None:
    words = np.frombuffer(DATA, np.uint8)
    layout = coded_layout()
    prefix_codes.plan(layout, words)
    layout.words = words.size // 2 - 1
    layout.segment_words = layout.words
    with pytest.raises(NativeError, match="no valid layout, sample"):
        prefix_codes.plan(layout, words)


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
