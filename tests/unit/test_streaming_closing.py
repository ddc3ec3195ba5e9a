"""Streaming that is interrupted, fails or is closed gives back what it had, once and in order."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulated import SimulatedDevice

torch = pytest.importorskip("torch", reason="needs torch")

from support.ring import ROOM, SIZES, Fixture, Rows, filled, replace_shape  # noqa: E402

from tpde.errors import ReadError  # noqa: E402
from tpde.io.sources import Extent  # noqa: E402
from tpde.weights.rows import RowReader  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def test_closing_waits_for_rows_that_are_being_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is launched after closing would read memory that was given back."""
    with Fixture(tmp_path, [50_000]) as made:
        tensor = made.tensors[0]
        monkeypatch.setattr(tensor, "header", replace_shape(tensor.header, (1000, 50)))
        probe, launched = made.probe, list[int]()

        def close() -> None:
            made.streamer.close()
            probe.asked.set()  # had it not waited

        other = threading.Thread(target=close)

        def launch(*args: object, **options: object) -> None:
            other.start()
            assert probe.asked.wait(60)
            launched.append(made.feed.closed)

        reader = Rows(tensor)
        monkeypatch.setattr(reader, "_launch", launch)
        reader(torch.zeros(3, dtype=torch.int64))
        other.join()
        assert launched == [0]
        assert made.feed.closed == 1
        made.streamer.ring.device = SimulatedDevice(ROOM)


def test_an_interrupted_fill_leaves_the_ring_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fixture(tmp_path, SIZES, places=4) as made:
        (unit, expected), _ = made.units((0, 1), (2,))
        decode, calls = made.device.decode, []

        def interrupted(*args: object) -> object:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(made.device, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            filled(unit, len(expected))
        assert len(made.streamer.ring._free) == 4
        assert filled(unit, len(expected)) == expected


@pytest.mark.parametrize("where", ["copy", "hold"])
def test_a_failed_copy_gives_its_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A feed with few buffers would have none left otherwise."""
    with Fixture(tmp_path, SIZES, places=2) as made:
        (unit, expected), _ = made.units((0, 1), (2,))
        filled(unit, len(expected))
        taken: list[object] = []
        real = made.feed.copied

        def copied(ticket: Extent, event: threading.Event) -> None:
            taken.append(ticket)
            real(ticket, event)

        def fail(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(made.feed, "copied", copied)
        made.streamer.ring.forget()
        made.feed.requested.clear()
        made.feed.cancelled = 0
        with monkeypatch.context() as patch:
            patch.setattr(made.device, where, fail)
            with pytest.raises(KeyboardInterrupt):
                filled(unit, len(expected))
        assert len(made.feed.requested) == len(taken) + made.feed.cancelled
        assert filled(unit, len(expected)) == expected


def test_what_ctrl_c_leaves_requested_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fixture(tmp_path, SIZES, places=2) as made:
        (unit, expected), _ = made.units((0, 1), (2,))
        made.feed.late, made.feed.ahead = True, 1 << 20
        filled(unit, len(expected))
        assert made.streamer.ring._planned
        before, cancelled, real = len(made.streamer.ring._planned), [], made.feed.cancel

        def cancel(ticket: Extent) -> None:
            if not cancelled:
                cancelled.append(None)
                raise KeyboardInterrupt
            cancelled.append(ticket)
            real(ticket)

        monkeypatch.setattr(made.feed, "cancel", cancel)
        with pytest.raises(KeyboardInterrupt):
            made.streamer.ring._plan(unit, 0)
        made.streamer.ring.forget()
        assert len(cancelled) - 1 == before
        assert filled(unit, len(expected)) == expected


@pytest.mark.parametrize("owner", ["device", "ring"])
def test_interrupted_again_while_waiting_for_the_device(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places are neither lost nor taken for those of other pieces."""
    with Fixture(tmp_path, SIZES, places=4) as made:
        (first, size), (unit, expected) = made.units((1,), (2,))
        filled(unit, len(expected))  # verified: nobody waits for checksums from now on
        filled(first, len(size))
        made.streamer.ring.forget()
        where, name = {"device": (made.device, "decode"), "ring": (made.streamer.ring, "_next")}[owner]
        real, calls = getattr(where, name), list[None]()

        def interrupted(*args: object) -> None:
            real(*args)
            calls.append(None)
            if len(calls) % 3 == 0:
                raise KeyboardInterrupt

        def waiting() -> None:
            raise KeyboardInterrupt

        def several() -> None:
            for _ in range(3):
                filled(first, len(size))

        for _ in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, interrupted)
                patch.setattr(made.device, "wait", waiting)
                with pytest.raises(KeyboardInterrupt):
                    several()
        assert filled(unit, len(expected)) == expected
        made.streamer.check()


def test_closing_gives_all_back_when_the_device_has_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Fixture(tmp_path, SIZES)

    def crashed() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(made.device, "wait", crashed)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            made.streamer.close()
    assert made.feed.closed == 1
    assert not made.streamer.owned


def test_closing_gives_everything_back_once(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        made.streamer.close()
        made.streamer.ring.device = SimulatedDevice(ROOM)
        assert made.feed.closed == 1
        assert not made.device.copies._thread.is_alive()


def test_what_it_owns_is_closed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken over last first, and the device, which reads from it, before memory is given back."""
    with Fixture(tmp_path, [5000]) as made:
        closed: list[str] = []

        def closing(name: str) -> Any:
            return SimpleNamespace(close=lambda: closed.append(name))

        wait = made.device.wait
        monkeypatch.setattr(made.device, "wait", lambda: (closed.append("wait"), wait()))
        monkeypatch.setattr(made.feed, "close", lambda: closed.append("feed"))
        made.streamer.own(closing("a"))
        made.streamer.own(closing("b"), closing("c"))
        made.streamer.close()
        assert closed == ["wait", "b", "c", "a", "feed"]
        assert not made.device.copies._thread.is_alive()
        made.streamer.ring.device = SimulatedDevice(ROOM)


def test_what_was_closed_is_not_read(tmp_path: Path) -> None:
    """Kernels would read rows from memory that was given back."""
    with Fixture(tmp_path, [5000]) as made:
        (unit, expected) = made.units((0,))[0]
        made.streamer.close()
        with pytest.raises(ReadError, match="was closed"):
            filled(unit, len(expected))
        reader = RowReader.__new__(RowReader)
        reader.packed = made.tensors[0]
        with pytest.raises(ReadError, match="load it again"):
            reader(torch.zeros(1, dtype=torch.int64))
        made.streamer.ring.device = SimulatedDevice(ROOM)
