"""What is cut into pieces, joined to ranges, and kept: each boundary."""

from __future__ import annotations

import errno
import os
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpde.errors import InvalidInput, Truncated
from tpde.host import arena as arenas
from tpde.host.ranges import GAP_BYTES, PAGE, Range, merge, read_error, require
from tpde.io.sources import BytesSource, Extent, FileSource
from tpde.streaming.pieces import Piece, TensorPart, cut
from tpde.streaming.retained import Retained, Stay

FILE, OTHER = (BytesSource(bytes(4096), "file") for _ in range(2))
FEED: Any = "feed"


def tensor(name: str, at: int, *chunks: int, source: Any = FILE, feed: Any = FEED) -> Any:
    """A blob whose chunks have these sizes, and begin with it."""
    offsets = np.array([*accumulate(chunks, initial=0)], np.int64)
    extent = Extent(source, at, sum(chunks), name)
    return SimpleNamespace(name=name, offsets=offsets, extent=extent, feed=feed)


def whole(*tensors: Any) -> list[TensorPart]:
    return [TensorPart(it, 0, 0, len(it.offsets) - 2) for it in tensors]


def held(pieces: list[Piece]) -> list[list[tuple[str, int, int]]]:
    """The chunks in each piece."""
    return [[(it.tensor.name, it.chunks.first, it.chunks.last) for it in piece.spans] for piece in pieces]


def test_a_piece_ends_where_the_next_chunk_would_not_fit() -> None:
    it = tensor("t", 160, 64, 32, 48, 16)
    assert held(cut(whole(it), 160)) == [[("t", 0, 3)]]
    assert held(cut(whole(it), 159)) == [[("t", 0, 2)], [("t", 3, 3)]]
    assert held(cut(whole(it), 96)) == [[("t", 0, 1)], [("t", 2, 3)]]
    assert held(cut(whole(it), 64)) == [[("t", 0, 0)], [("t", 1, 1)], [("t", 2, 3)]]
    with pytest.raises(InvalidInput, match="chunk 0 of `t` has 64 bytes, a piece 63"):
        cut(whole(it), 63)
    with pytest.raises(InvalidInput, match="chunk 2 of `t` has 48 bytes, a piece 47"):
        cut([TensorPart(it, 0, 1, 2)], 47)


def test_a_piece_says_where_its_bytes_and_its_tensors_are() -> None:
    one, two = tensor("one", 160, 64, 32), tensor("two", 272, 48, 16)
    first, second = cut([TensorPart(one, 1000, 1, 1), TensorPart(two, 2000, 0, 1)], 144)[:1] * 2
    assert (first.extent, first.feed) == (Extent(FILE, 224, 112, "one"), FEED)
    assert [it.at for it in second.spans] == [160 - 224, 272 - 224]
    assert [it.out for it in first.spans] == [1000, 2000]
    assert [tuple(it.chunks) for it in first.spans] == [(1, 1, 64, 96), (0, 1, 0, 64)]


def test_the_next_tensor_joins_if_its_first_chunk_fits() -> None:
    one, two = tensor("one", 0, 64), tensor("two", 64, 32, 32)
    assert held(cut(whole(one, two), 96)) == [[("one", 0, 0), ("two", 0, 0)], [("two", 1, 1)]]
    assert held(cut(whole(one, two), 95)) == [[("one", 0, 0)], [("two", 0, 1)]]


@pytest.mark.parametrize(
    ("second", "joins"),
    [
        (tensor("b", 64 + 48, 32), True),
        (tensor("b", 64 + 64, 32), False),
        (tensor("b", 64 + 8, 32), False),
        (tensor("b", 64, 32, source=OTHER), False),
        (tensor("b", 64, 32, feed="another"), False),
    ],
    ids=["near", "far", "not at a multiple of 16 from it", "of a file of the same name", "of another feed"],
)
def test_which_tensors_join(second: Any, joins: bool) -> None:
    pieces = cut(whole(tensor("a", 0, 64), second), 4096, gap=48)
    assert len(pieces) == (1 if joins else 2)
    assert [it.feed for it in pieces][-1] == second.feed
    assert pieces[-1].extent.source is second.extent.source


def test_a_chunk_that_is_wanted_twice_is_copied_twice() -> None:
    it = tensor("t", 0, 64, 32)
    assert held(cut([TensorPart(it, 0, 0, 1), TensorPart(it, 1000, 0, 1)], 4096)) == [
        [("t", 0, 1)],
        [("t", 0, 1)],
    ]


def test_pieces_are_in_the_order_of_files_and_offsets() -> None:
    far, near = tensor("far", 4096, 16, 16), tensor("near", 0, 16)
    early = tensor("early", 8192, 16, source=BytesSource(b"", "a file"))
    parts = [TensorPart(far, 0, 1, 1), *whole(near, early), TensorPart(far, 0, 0, 0)]
    assert held(cut(parts, 64, gap=0)) == [
        [("early", 0, 0)],
        [("near", 0, 0)],
        [("far", 0, 0), ("far", 1, 1)],
    ]


# ---- ranges ----


def test_extents_with_a_small_gap_are_of_one_range() -> None:
    def merged(*places: tuple[int, int]) -> list[tuple[int, int]]:
        return [(it.first, it.last) for it in merge([Extent(FILE, at, size, "x") for at, size in places])]

    assert merged((0, 10), (10 + GAP_BYTES, 5)) == [(0, 15 + GAP_BYTES)]
    assert merged((0, 10), (11 + GAP_BYTES, 5)) == [(0, 10), (11 + GAP_BYTES, 16 + GAP_BYTES)]
    assert merged((11 + GAP_BYTES, 5), (0, 10)) == [(0, 10), (11 + GAP_BYTES, 16 + GAP_BYTES)]
    inside = [(0, 10 + GAP_BYTES), (5, 1), (11 + 2 * GAP_BYTES, 5)]
    assert merged(*inside) == [(0, 10 + GAP_BYTES), (11 + 2 * GAP_BYTES, 16 + 2 * GAP_BYTES)]
    assert merged(*inside[:2], (10 + 2 * GAP_BYTES, 5)) == [(0, 15 + 2 * GAP_BYTES)]


def test_a_range_has_whole_pages() -> None:
    for first, last, begin, end in ((0, 1, 0, 1), (PAGE - 1, PAGE, 0, 1), (PAGE, 2 * PAGE + 1, 1, 3)):
        it = Range(FILE, first, last)
        assert (it.begin, it.end, it.size) == (begin * PAGE, end * PAGE, (end - begin) * PAGE)


def test_what_of_a_range_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than its bytes, though it has whole pages."""
    monkeypatch.setattr(arenas, "PIECE_BYTES", 3 * PAGE)
    it = Range(FILE, PAGE + 100, 9 * PAGE + 50)
    base = 20 * PAGE - it.begin

    def cuts(begin: int, size: int) -> list[tuple[int, int]]:
        found = arenas.parts(it, 20 * PAGE, begin, size)
        assert all(part.of is it and part.to == base + part.offset for part in found)
        return [(part.offset, part.size) for part in found]

    first = PAGE + 100
    assert cuts(0, it.size) == [
        (first, 3 * PAGE),
        (first + 3 * PAGE, 3 * PAGE),
        (first + 6 * PAGE, 2 * PAGE - 50),
    ]
    assert cuts(0, PAGE) == [(first, PAGE - 100)]
    assert cuts(4 * PAGE, 3 * PAGE) == [(5 * PAGE, 3 * PAGE)]
    assert cuts(8 * PAGE, PAGE) == [(9 * PAGE, 50)]


def test_extents_may_end_with_their_file_as_it_is_now(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    source = FileSource(tmp_path / "file")
    os.truncate(tmp_path / "file", 90)
    for of, size in ((source, 90), (FILE, 4096)):
        require([Extent(of, 0, 5, "a"), Extent(of, size - 10, 10, "b")])
        with pytest.raises(Truncated, match=rf"has {size} bytes, but `c` ends at {size + 1}") as caught:
            require([Extent(of, 0, 5, "a"), Extent(of, size - 10, 11, "c")])
        assert (caught.value.found, caught.value.needed) == (size, size + 1)
        assert caught.value.where == of.name
    source.close()


@pytest.mark.parametrize(
    ("code", "says", "hint"),
    [
        *((it, ": the disk failed", "copy the file to another") for it in ("EIO", "ENXIO", "ETIMEDOUT")),
        *((it, ": the file has gone", "from where it is now") for it in ("ESTALE", "EBADF", "ENOENT")),
        *((it, "", "once that is mended") for it in ("EACCES", "ENOMEM")),
    ],
)
def test_what_a_failed_read_means(code: str, says: str, hint: str) -> None:
    number = getattr(errno, code)
    error = read_error("file", 100, 20, OSError(number, "x"))
    assert str(error).startswith(f"bytes 100 to 120 of `file` cannot be read: {os.strerror(number)}{says};")
    assert (error.hint or "").endswith(hint)
    assert error.where == "file"


# ---- what is kept ----


def piece(size: int, feed: Any = None) -> Piece:
    return Piece(Extent(FILE, 0, size, "t"), feed, ())


def test_as_many_pieces_stay_as_fit_evenly_spread() -> None:
    kept: Retained[str] = Retained(4096, 1024, 2048)
    assert [kept.take(piece(512)) for _ in range(6)] == [None, 4096, None, 4608, None, None]
    kept = Retained(0, 2047, 1)
    assert [kept.take(piece(1)) for _ in range(4)] == [0, 512, 1024, None], "at multiples of 512"
    kept.clear()
    assert kept.take(piece(513)) == 0
    assert kept.take(piece(1)) == 1024


def test_what_was_copied_before_all_was_forgotten_does_not_count() -> None:
    kept: Retained[str] = Retained(0, 1024, 2048)
    assert kept.take(piece(512)) is None
    kept.clear()
    assert kept.take(piece(512)) is None
    assert kept.take(piece(512)) == 0


def test_pieces_of_other_feeds_neither_stay_nor_count() -> None:
    kept: Retained[str] = Retained(0, 1024, 2048, FEED)
    assert [kept.take(piece(512, "another")) for _ in range(4)] == [None] * 4
    assert [kept.take(piece(512, FEED)) for _ in range(2)] == [None, 0]


def test_which_pieces_of_a_unit_do_not_stay() -> None:
    kept: Retained[str] = Retained(0, 1024, 2048)
    event: Any = object()
    assert kept.missing("a", 3) == 0
    assert kept.find("a", 0) is None
    for number in (0, 2):
        kept.put("a", number, 512 * number, event)
    assert kept.find("a", 2) == Stay(1024, event)
    assert kept.find("a", 1) is kept.find("b", 0) is None
    assert [kept.missing("a", 3, first) for first in range(4)] == [1, 1, None, None]
    assert kept.missing("b", 3, 1) == 1
    kept.clear()
    assert kept.find("a", 2) is None
