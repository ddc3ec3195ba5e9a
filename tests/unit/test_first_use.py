"""What waits for what, and what is given back, at the first use of a unit, on errors, and after Ctrl-C."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.ring import SIZES, Fixture, filled  # noqa: E402

from tpde.errors import Corrupt  # noqa: E402
from tpde.host.ranges import GAP_BYTES  # noqa: E402
from tpde.streaming import ring  # noqa: E402
from tpde.streaming.pieces import TensorPart, cut  # noqa: E402
from tpde.streaming.prefetch import PrefetchOrder  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def damage(made: Fixture, number: int, chunk: int = 5) -> None:
    extent, offsets = made.tensors[number].extent, made.tensors[number].offsets
    made.feed.whole(extent)[extent.offset + int(offsets[chunk]) + 40] ^= 1


def test_a_first_use_waits_for_its_decoding(tmp_path: Path) -> None:
    """Else damage would be told at the second use, and the first one computes with it."""
    with Fixture(tmp_path, SIZES, blocking=False) as made:
        damage(made, 2)
        (unit, expected) = made.units((2,))[0]
        gate = threading.Event()
        made.device.compute.put(lambda: gate.wait(60) and None)
        threading.Timer(0.05, gate.set).start()
        with pytest.raises(Corrupt, match=r"`t2`, chunk 5: .*is damaged"):
            unit(torch.empty(len(expected), dtype=torch.uint8))
        assert not unit.verified


def test_what_was_damaged_at_first_is_not_verified(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((2,))[0]
        damage(made, 2)
        for _ in range(2):
            with pytest.raises(Corrupt, match="is damaged"):
                filled(unit, len(expected))
            assert not unit.verified
        damage(made, 2)  # and back again
        assert filled(unit, len(expected)) == expected
        assert unit.verified


def test_a_check_that_fails_asks_again_for_what_it_has_not_told(tmp_path: Path) -> None:
    """One unit's report is of two launches: the second is told by the next check."""
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]
        filled(unit, len(expected))
        found, asked = [Corrupt("one"), Corrupt("two")], list[int]()

        def report() -> None:
            asked.append(1)
            if found:
                raise found.pop(0)

        unit.report = report  # type: ignore[method-assign]
        for what in ("one", "two"):
            with pytest.raises(Corrupt, match=what):
                made.streamer.check()
        for _ in range(2):
            made.streamer.check()
            assert len(asked) == 3, "what has told all is asked no more"


def test_checking_waits_for_another_threads_fill(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]
        probe = made.probe
        copy, checked, seen = made.device.copy, [], list[bool]()

        def check() -> None:
            made.streamer.check()
            checked.append(1)
            probe.asked.set()  # had it not asked

        other = threading.Thread(target=check)

        def slow(*args: Any) -> Any:
            if not seen:
                other.start()
                assert probe.asked.wait(60)
            seen.append(bool(checked))
            return copy(*args)

        made.device.copy = slow  # type: ignore[method-assign]
        made.streamer.ring.prefetch = False
        assert filled(unit, len(expected)) == expected
        other.join()
        assert not any(seen)
        assert checked


def test_filling_waits_for_another_threads_fill(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected), (other_unit, needed) = made.units((0,), (1,))
        probe = made.probe
        copy, seen, results = made.device.copy, list[bool](), list[bytes]()

        def fill() -> None:
            results.append(filled(other_unit, len(needed)))
            probe.asked.set()

        other = threading.Thread(target=fill)

        def slow(*args: Any) -> Any:
            if not seen:
                seen.append(False)
                other.start()
                assert probe.asked.wait(60)
            seen.append(bool(results) and len(seen) < len(unit.pieces))
            return copy(*args)

        made.device.copy = slow  # type: ignore[method-assign]
        made.streamer.ring.prefetch = False
        assert filled(unit, len(expected)) == expected
        other.join()
        assert results == [needed]
        assert not any(seen)


def test_after_an_error_places_are_free_when_the_device_is_done(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, blocking=False) as made:
        (unit, expected) = made.units((0, 1))[0]
        gate, decode, calls = threading.Event(), made.device.decode, []

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                made.device.compute.put(lambda: gate.wait(60) and None)
                threading.Timer(0.05, gate.set).start()
                raise KeyboardInterrupt
            return decode(*args)

        made.device.decode = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            filled(unit, len(expected))
        assert gate.is_set(), "it was waited for"
        before, held, hold = len(made.device.copied), list[int](), made.device.hold

        def holding(event: Any) -> None:
            held.append(len(made.device.copied) - before)
            hold(event)

        made.device.hold = holding  # type: ignore[method-assign]
        assert filled(unit, len(expected)) == expected
        assert held[0] == 4, "nothing holds what goes to the first places"


def test_ctrl_c_between_asking_and_noting_gives_the_ticket_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ring, "_Step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                filled(unit, len(expected))
        assert len(made.feed.requested) == made.feed.cancelled == 1
        assert filled(unit, len(expected)) == expected


def test_feeds_are_told_of_every_copy(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        told: list[tuple[str, Any]] = []
        made.feed.copied = lambda extent, event: told.append((extent.name, event))  # type: ignore[method-assign]
        for unit, expected in made.units((0,), (1,), (2,)):
            assert filled(unit, len(expected)) == expected
        assert [name for name, _ in told] == made.device.copied
        assert all(hasattr(event, "wait") for _, event in told)


def test_what_lies_far_between_two_tensors_is_not_copied(tmp_path: Path) -> None:
    with Fixture(tmp_path, [3000, 3000]) as made:
        first, second = made.tensors
        far = second.extent._replace(offset=first.extent.offset + first.extent.size + GAP_BYTES + 256)
        parts = [TensorPart(first, 0, 0, 0), TensorPart(second, 0, 0, 0)]
        assert len(cut(parts, 64 << 20)) == 1
        second.extent = far
        assert len(cut(parts, 64 << 20)) == 2


def test_what_was_made_first_follows_what_was_made_last() -> None:
    order: PrefetchOrder[str] = PrefetchOrder()
    for name in "abc":
        order.expect(name)
    assert [order.after(name) for name in "abc"] == ["b", "c", "a"]
    order.saw("c")
    order.saw("b")
    assert order.after("c") == "b"
