"""What is copied ahead, in which order and how much, and what was copied in vain; on a simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import MemoryFeed

pytest.importorskip("torch", reason="needs torch")

from support.ring import SIZES, Fixture, filled, sized

from tpde.io.sources import Extent
from tpde.streaming import ring
from tpde.streaming.pieces import Piece
from tpde.streaming.prefetch import PrefetchOrder

pytestmark = pytest.mark.usefixtures("bounded")


def test_copies_run_ahead_in_the_order_of_the_last_time(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, places=8) as made:
        units = made.units((0,), (1,), (2,), (4,))
        order = [2, 0, 3, 1]
        for _ in range(3):
            for i in order:
                assert filled(units[i][0], len(units[i][1])) == units[i][1]
        dropped = made.streamer.dropped_pieces
        for _ in range(3):
            for i in order:
                filled(*sized(units[i]))
                assert made.streamer.ring._flying or made.streamer.ring._planned
        assert made.streamer.dropped_pieces == dropped, "the order is known by now"


def test_without_prefetch_nothing_runs_ahead(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, places=8) as made:
        units = made.units((0,), (1,))
        made.streamer.ring.prefetch = False
        assert filled(*sized(units[0])) == units[0][1]
        assert set(made.device.copied) == {"t0"}
        assert not made.streamer.ring._flying


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_number_of_bytes_that_are_read_ahead_is_kept(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is wanted, wherever it fails, and though only some come from a feed that wants to know."""
    with Fixture(
        tmp_path_factory.mktemp("ahead"), SIZES, places=data.draw(st.sampled_from([2, 3, 8]))
    ) as made:
        disk = MemoryFeed(ahead=data.draw(st.integers(1, 1 << 20)), late=data.draw(st.booleans()))
        made.streamer.own(disk)
        for i in data.draw(st.sets(st.integers(0, len(SIZES) - 1))):
            made.tensors[i].bind(made.streamer, disk)
        units = made.units((0,), (1, 2), (3, 4), (5,))
        copy = made.device.copy

        def fails(*args: object) -> object:
            raise KeyboardInterrupt

        for i, fail in data.draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20)):
            made.device.copy = fails if fail else copy  # type: ignore[method-assign]
            unit, expected = units[i]
            try:
                assert filled(unit, len(expected)) == expected
            except KeyboardInterrupt:
                assert not made.streamer.ring._planned
            planned = [step.unit.pieces[step.number] for step in made.streamer.ring._planned]
            assert made.streamer.ring._reading == sum(it.extent.size for it in planned if it.feed is disk)


def test_what_was_copied_and_what_of_it_in_vain(tmp_path: Path) -> None:
    """Pieces of the unit that was expected are in the ring, and another one is wanted."""
    with Fixture(tmp_path, SIZES, places=8) as made:
        (one, size), (expected, _), (other, _) = made.units((1,), (2,), (5,))
        given, copy = list[Piece](), made.device.copy

        def noted(place: int, address: int, piece: Piece) -> Any:
            given.append(piece)
            return copy(place, address, piece)

        made.device.copy = noted  # type: ignore[method-assign]
        assert made.streamer.stats() == {"copied_bytes": 0, "copied_pieces": 0, "dropped_pieces": 0}
        filled(one, len(size))
        ahead, vain = len(made.streamer.ring._flying), len(expected.pieces)
        assert made.streamer.stats() == {
            "copied_bytes": sum(it.extent.size for it in given),
            "copied_pieces": len(given),
            "dropped_pieces": 0,
        }
        assert len(given) == len(one.pieces) + ahead
        filled(other, 600_000)
        assert made.streamer.dropped_pieces == vain > 1
        made.streamer.ring.forget()
        before = made.streamer.ring.copied_pieces
        made.streamer.ring.prefetch = False
        filled(one, len(size))
        assert made.streamer.ring.copied_pieces - before == len(one.pieces)
        assert made.streamer.dropped_pieces == vain


def test_looking_ahead_ends_where_too_few_pieces_come_from_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than the disk wants to know of, though the model is read round and round."""
    monkeypatch.setattr(ring, "_MOST_PLANNED", 40)
    with Fixture(tmp_path, SIZES, places=2) as made:
        disk, requests = MemoryFeed(ahead=1 << 40, late=True), list[Extent]()
        for feed in (disk, made.feed):
            real = feed.request

            def request(extent: Extent, real: Any = real) -> Any:
                requests.append(extent)
                assert len(requests) < 200, "it ends nowhere"
                return real(extent)

            feed.request = request  # type: ignore[method-assign]
        made.tensors[3].bind(made.streamer, disk)
        for unit, expected in made.units((3,), (1,)):
            assert filled(unit, len(expected)) == expected
        assert len(made.streamer.ring._planned) == 40


def test_before_the_first_use_the_order_is_that_in_which_units_are_made(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        units = [made.units((0,))[0][0], made.streamer.chunks(made.tensors[1], 0, 1, 0)]
        units.append(made.units((2,))[0][0])
        order = made.streamer.ring._order
        assert [order.after(it) for it in units] == [*units[1:], units[0]]


def test_units_that_are_made_later_change_no_order(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, places=2) as made:
        units = made.units((2,), (5,))
        for _ in range(2):
            for unit, expected in units:
                assert filled(unit, len(expected)) == expected
        (late, _) = made.units((0,))[0]
        chunks = made.streamer.chunks(made.tensors[4], 0, 1, 0)
        order = made.streamer.ring._order
        assert order.after(units[1][0]) is units[0][0]
        assert order.after(late) is order.after(chunks) is None


def test_what_follows_what() -> None:
    order: PrefetchOrder[str] = PrefetchOrder()
    assert order.after("a") is None
    for name in "abc":
        order.expect(name)
    assert [order.after(it) for it in "abc"] == ["b", "c", "a"]
    for name in "acb":
        order.saw(name)
    assert [order.after(it) for it in "abc"] == ["c", "c", "b"]
