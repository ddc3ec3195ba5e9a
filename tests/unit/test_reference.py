"""The slow codec of docs/format.md refuses at the document's limits, and takes what lies at them."""

from __future__ import annotations

import numpy as np
import pytest
from support.craft import DATA, SPEC, constant_blob, edited, reseal

from tpde.codec import reference
from tpde.codec.reference import Table
from tpde.errors import Corrupt, Truncated, UnsupportedVersion


@pytest.mark.parametrize(
    ("kind", "longest", "raw", "escape", "good"),
    [
        (1, 1, 7, 1, True),
        (1, 1, 8, 1, False),
        (1, 11, 1, 11, True),
        (1, 11, 2, 11, False),
        (1, 12, 0, 12, True),
        (1, 12, 1, 12, False),
        (2, 11, 1, 11, False),
        (3, 11, 1, 11, False),
        (3, 12, 0, 12, True),
        (0, 1, 0, 1, False),
        (4, 1, 0, 1, False),
        (1, 13, 0, 13, False),
    ],
)
def test_shapes_of_tables(kind: int, longest: int, raw: int, escape: int, good: bool) -> None:
    """Codes of a word of each length, and an escape of the longest."""
    arguments = kind, longest, raw, escape, [1] * longest, list(range(longest))
    if raw > 4:
        arguments = kind, longest, raw, escape, [1] * longest, [0]
    if good:
        assert Table(*arguments).escape == "1" * longest
    else:
        with pytest.raises(Corrupt):
            Table(*arguments)


def test_codes_are_complete_and_values_their_own() -> None:
    Table(1, 2, 0, 2, [1, 1], [3, 4])
    for escape, counts, values in (
        (0, [1, 1], [3, 4]),
        (1, [1, 1], [3, 4]),
        (3, [1, 1], [3, 4]),
        (2, [1, 2], [3, 4, 5]),
        (2, [1, 1], [3]),
        (2, [1, 1], [3, 3]),
        (2, [1, 1], [3, 256]),
        (2, [1, 1], [-1, 3]),
    ):
        with pytest.raises(Corrupt):
            Table(1, 2, 0, escape, counts, values)
    Table(1, 2, 1, 2, [1, 1], [3, 127])
    with pytest.raises(Corrupt):
        Table(1, 2, 1, 2, [1, 1], [3, 128])


@pytest.mark.parametrize(
    ("codec", "chunk_words", "good"),
    [
        ("prefix", 256, False),
        ("prefix", 512, True),
        ("prefix", 768, False),
        ("prefix", 32768, True),
        ("prefix", 65536, False),
        ("zstd", 65536, True),
        ("zstd", 131072, False),
    ],
)
def test_sizes_of_chunks(codec: str, chunk_words: int, good: bool) -> None:
    if good:
        blob = reference.encode_blob(DATA, SPEC.dtype, SPEC.shape, codec=codec, chunk_words=chunk_words)
        assert reference.decode_blob(blob) == DATA
        return
    with pytest.raises(Corrupt, match="chunk_words"):
        reference.encode_blob(DATA, SPEC.dtype, SPEC.shape, codec=codec, chunk_words=chunk_words)


@pytest.mark.parametrize(("segment", "good"), [(0, False), (1500, True), (1501, False), (500, True)])
def test_sizes_of_segments(segment: int, good: bool) -> None:
    def encoded() -> bytes:
        return reference.encode_blob(
            DATA, SPEC.dtype, SPEC.shape, codec="zstd", segment_words=segment, chunk_words=512
        )

    if good:
        assert reference.decode_blob(encoded()) == DATA
        return
    with pytest.raises(Corrupt, match="segment_words"):
        encoded()


def test_dimensions_that_are_not_zero_give_less_than_an_exbibyte() -> None:
    header = reference.parse_header(constant_blob())
    header.dtype, header.word_bytes, header.rotate = reference.DTYPES["U8"][:3]
    header.words, header.segment_words, header.constant = 0, 1, bytes(8)
    for shape, good in (((0, (1 << 60) - 1), True), ((0, 1 << 60), False), ((0, 1 << 30, 1 << 30), False)):
        header.shape = shape
        header.blob_bytes = header.tables_at
        blob = reseal(header.serialize(), header.tables_at)
        if good:
            assert reference.parse_header(blob).shape == shape
            continue
        with pytest.raises(Corrupt, match="dimensions that are not 0"):
            reference.parse_header(blob)


def test_bytes_behind_a_frame_are_no_plane() -> None:
    plane = np.arange(600, dtype=np.uint16).view(np.uint8).tobytes()
    stream = reference.encode_zstd(plane)
    assert reference.decode_zstd(stream, 0, len(stream), 1200) == (plane, len(stream))
    size = int.from_bytes(stream[:4], "little")
    longer = (size + 4).to_bytes(4, "little") + stream[4 : 4 + size] + bytes(8)
    for wrong, n in ((longer, 1200), (stream, 1199), (stream, 1201)):
        with pytest.raises(Corrupt):
            reference.decode_zstd(wrong, 0, len(wrong), n)
    with pytest.raises(Corrupt, match="its chunk at"):
        reference.decode_zstd(stream, 0, len(stream) - 4, 1200)
    with pytest.raises(Corrupt, match="coded plane's size"):
        reference.decode_zstd(stream, 0, 3, 1200)


def test_a_version_is_told_as_soon_as_it_is_there() -> None:
    other = edited(constant_blob(), version=2)
    for end in (10, 11, 127, len(other)):
        with pytest.raises(UnsupportedVersion):
            reference.parse_header(other[:end])
    for end in (0, 8, 9):
        with pytest.raises(Truncated):
            reference.parse_header(other[:end])
