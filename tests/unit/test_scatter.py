"""Chunk maps are checked before a device sees them."""

from __future__ import annotations

import numpy as np
import pytest

from tpde.cuda.scatter import RECORD, Chunk, ChunkMap


def test_records_hold_64_bits() -> None:
    far = 1 << 40
    chunks = [Chunk(0, 16, 0, 4), Chunk(far, far + 16, far, 3)]
    made = ChunkMap(chunks, word_bytes=4, words=far + 10, data_bytes=far + 28, device=0)
    assert RECORD.itemsize == 32
    found = made.descriptors.view(RECORD)
    assert [tuple(int(x) for x in record) for record in found] == [(*c, 0) for c in chunks]


@pytest.mark.parametrize(
    ("chunk", "match"),
    [
        (Chunk(2, 16, 0, 4), "chunk 1: positions and words are not aligned"),
        (Chunk(0, 18, 0, 4), "chunk 1: positions and words are not aligned"),
        (Chunk(88, 16, 0, 4), "chunk 1 ends at byte 104 of 100"),
        (Chunk(0, 88, 0, 4), "chunk 1 ends at byte 104 of 100"),
        (Chunk(-4, 16, 0, 4), "chunk 1 ends at"),
        (Chunk(0, 16, 51, 4), "chunk 1: 4 changes from word 51 of 50"),
    ],
)
def test_chunks_outside_are_refused(chunk: Chunk, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ChunkMap([Chunk(0, 16, 0, 4), chunk], word_bytes=4, words=50, data_bytes=100, device=0)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="words of 3 bytes"):
        ChunkMap([], word_bytes=3, words=50, data_bytes=100, device=0)


def test_nothing_to_do_launches_nothing() -> None:
    for chunks in ([], [Chunk(0, 0, 0, 0)] * 3):
        made = ChunkMap(chunks, word_bytes=2, words=50, data_bytes=0, device=0)
        made.launch(0, 0, 0, 0, 0)  # without a device, anything else would fail
        assert made.descriptors.dtype == np.uint8
        with pytest.raises(ValueError, match="chunks 1 to"):
            made.launch(0, 0, 0, 0, 0, first=1, count=len(chunks))
