"""Pieces that stay on the device once they were copied, on a simulated one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.simulated import MemoryFeed

torch = pytest.importorskip("torch", reason="needs torch")

from support.ring import ROOM, SIZES, Fixture, filled  # noqa: E402

from tpde.errors import Corrupt  # noqa: E402
from tpde.streaming.pieces import Piece  # noqa: E402
from tpde.streaming.retained import Retained  # noqa: E402
from tpde.streaming.streamer import StreamedUnit  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def passes(made: Fixture, units: list[tuple[StreamedUnit, bytes]], count: int) -> list[int]:
    """Bytes that each of so many passes over all units copies, every one of them right."""
    found = []
    for _ in range(count):
        before = made.streamer.ring.copied_bytes
        for unit, expected in units:
            assert filled(unit, len(expected)) == expected
        found.append(made.streamer.ring.copied_bytes - before)
    return found


def test_what_is_kept_is_copied_once(tmp_path: Path) -> None:
    room, groups = 600_000, ((0, 1), (2,), (4, 5))
    with Fixture(tmp_path, SIZES) as without:
        total = passes(without, without.units(*groups), 4)[-1]
    with Fixture(tmp_path, SIZES, keep=room) as made:
        units = made.units(*groups)
        pieces = [(unit, i, it) for unit, _ in units for i, it in enumerate(unit.pieces)]

        def kept() -> list[tuple[int, Piece]]:
            return [
                (n, it) for n, (unit, i, it) in enumerate(pieces) if made.streamer.ring.retained.find(unit, i)
            ]

        passes(made, units, 1)
        between = [b - a for (a, _), (b, _) in itertools.pairwise(kept())]
        assert max(between) <= -(-total // room) + 1, "evenly spread"
        assert kept()[-1][0] >= len(pieces) - 4
        later = passes(made, units, 5)[-1]
        assert later == total - sum(it.extent.size for _, it in kept())
        assert room - ROOM < sum(it.extent.size for _, it in kept()) <= room
        assert not made.streamer.dropped_pieces
    with Fixture(tmp_path, SIZES, keep=10 * total) as made:
        assert passes(made, made.units(*groups), 3)[1:] == [0, 0]


def test_small_models_are_read_ahead_more_than_once(tmp_path: Path) -> None:
    """What was requested twice before it came to stay is given back."""
    with Fixture(tmp_path, [30_000, 40_000, 150_000], keep=4_000_000) as made:
        made.feed.ahead, made.feed.late = 4 << 20, True
        assert passes(made, made.units((0,), (1,), (2,)), 3)[1:] == [0, 0]
        assert made.feed.cancelled


def test_a_piece_comes_to_stay_while_it_is_in_flight(tmp_path: Path) -> None:
    """A unit that follows itself is copied to the ring for its next use, and once more, to stay."""
    with Fixture(tmp_path, [300_000, 150_000], places=6, keep=346_614) as made:
        made.streamer.ring.retained = Retained(
            6 * ROOM, 346_614, 5_000_000
        )  # other units have not been used yet
        large, small = made.units((0,), (1,))
        for unit, expected in (small, small, large, large, large, large):
            assert filled(unit, len(expected)) == expected


def test_only_one_feeds_pieces_are_kept(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, keep=4_000_000) as made:
        other = MemoryFeed()
        for tensor in made.tensors[2:]:
            tensor.bind(made.streamer, other)
        made.streamer.ring.retained = Retained(4 * ROOM, 4_000_000, 1, other)
        units = made.units((0,), (2,), (4,))
        steady = passes(made, units, 3)[-1]
        assert steady == sum(it.extent.size for it in units[0][0].pieces)


def test_after_a_failure_nothing_is_kept(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, keep=4_000_000) as made:
        units = made.units((0,), (2,))
        passes(made, units, 2)
        copy, made.device.copy = made.device.copy, broken  # type: ignore[method-assign]
        (more, expected) = made.units((4,))[0]
        with pytest.raises(RuntimeError, match="broken"):
            filled(more, len(expected))
        made.device.copy = copy  # type: ignore[method-assign]
        every = [*units, (more, expected)]
        again, later = passes(made, every, 2)
        assert again == sum(it.extent.size for unit, _ in every for it in unit.pieces)
        assert later == 0


def test_what_was_damaged_is_not_kept(tmp_path: Path) -> None:
    """Once the bytes are right again, they are copied again."""
    with Fixture(tmp_path, SIZES, keep=4_000_000) as made:
        ((unit, expected),) = made.units((2,))
        tensor = made.tensors[2]
        data, at = made.feed.whole(tensor.extent), tensor.extent.offset + int(tensor.offsets[5]) + 40
        data[at] ^= 1
        with pytest.raises(Corrupt):
            filled(unit, len(expected))
        data[at] ^= 1
        assert filled(unit, len(expected)) == expected


def broken(*_: Any) -> Any:
    raise RuntimeError("broken")
