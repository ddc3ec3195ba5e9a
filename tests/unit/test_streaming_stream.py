"""Pieces, the order they are wanted in, and the ring, on a simulated device."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import MemoryFeed, SimulatedDevice

torch = pytest.importorskip("torch", reason="needs torch")

from support.ring import CPU, ROOM, SIZES, Fixture, filled  # noqa: E402

from tpde.errors import Corrupt, InvalidInput, PackedWeight, ReadError, UnsupportedDevice  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.io.sources import Extent, FileSource  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.streaming import ring  # noqa: E402
from tpde.streaming.pieces import Piece, TensorPart, cut  # noqa: E402
from tpde.streaming.prefetch import PrefetchOrder  # noqa: E402
from tpde.streaming.retained import Retained  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.streaming.streamer import StreamedUnit, Streamer  # noqa: E402
from tpde.weights.launch import Launch  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402
from tpde.weights.rows import RowReader  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def replace_shape(header: Any, shape: tuple[int, ...]) -> Any:
    return dataclasses.replace(header, spec=TensorSpec(header.spec.dtype, shape))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(3000, 120_000), min_size=1, max_size=5),
    st.integers(40_000, 200_000),
    st.sampled_from([0, 8, 16]),
)
def test_pieces_hold_every_chunk_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, apart: int
) -> None:
    with Fixture(tmp_path_factory.mktemp("cut"), sizes, apart=apart) as made:
        parts = [TensorPart(it, 0, 0, it.header.chunks - 1) for it in made.tensors]
        pieces = cut(parts, limit)
        seen: list[tuple[str, int]] = []
        for piece in pieces:
            assert piece.extent.size <= limit
            for span in piece.spans:
                blob = span.tensor.extent.offset
                seen += [(span.tensor.name, i) for i in range(span.chunks.first, span.chunks.last + 1)]
                assert span.at == blob - piece.extent.offset
                assert span.at % 16 == 0
                assert piece.extent.offset <= blob + span.chunks.low
                assert blob + span.chunks.high <= piece.extent.offset + piece.extent.size
        assert seen == [(it.name, i) for it in made.tensors for i in range(it.header.chunks)]


@pytest.mark.parametrize("apart", [0, 8, 16])
@pytest.mark.parametrize("offset", [0, 8])
def test_blobs_at_odd_offsets_are_put_at_even_places(offset: int, apart: int, tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, offset=offset, apart=apart) as made:
        (unit, expected) = made.units((0, 1, 2))[0]
        assert all(span.at % 16 == 0 for piece in unit.pieces for span in piece.spans)
        assert filled(unit, len(expected)) == expected


def test_a_piece_that_cannot_hold_a_chunk(tmp_path: Path) -> None:
    with Fixture(tmp_path, [50_000]) as made, pytest.raises(InvalidInput, match=r"chunk 0 of `t0` has \d+"):
        cut([TensorPart(made.tensors[0], 0, 0, 1)], 4096)


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
                filled(*_sized(units[i]))
                assert made.streamer.ring._flying or made.streamer.ring._planned
        assert made.streamer.dropped_pieces == dropped, "the order is known by now"


def _sized(unit: tuple[StreamedUnit, bytes]) -> tuple[StreamedUnit, int]:
    return unit[0], len(unit[1])


def test_without_prefetch_nothing_runs_ahead(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, places=8) as made:
        units = made.units((0,), (1,))
        made.streamer.ring.prefetch = False
        assert filled(*_sized(units[0])) == units[0][1]
        assert set(made.device.copied) == {"t0"}
        assert not made.streamer.ring._flying


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=20),
    st.sampled_from([2, 3, 8]),
    st.booleans(),
    st.integers(0, 900_000),
    st.sampled_from([1, 2, 5]),
)
def test_any_order_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[tuple[int, int]],
    places: int,
    late: bool,
    keep: int,
    more: int,
) -> None:
    with Fixture(tmp_path_factory.mktemp("order"), SIZES, places=places, keep=keep) as made:
        made.streamer.ring.retained = Retained(places * ROOM, keep, more * made.source.size)
        made.feed.late, made.feed.ahead = late, 512 << 10
        units = made.units((0, 1), (2,), (3, 4), (5,))
        for unit, expected in (units[i] for i, times in order for _ in range(times)):
            assert filled(unit, len(expected)) == expected


def test_chunks_of_a_tensor(tmp_path: Path) -> None:
    with Fixture(tmp_path, [100_000]) as made:
        tensor, data = made.tensors[0], made.data[0]
        for first, last in ((0, 0), (3, 7), (tensor.header.chunks - 1, tensor.header.chunks - 1)):
            begin, end = (2 * it for it in tensor.header.chunk_range(first, last))
            unit = made.streamer.chunks(tensor, first, last, 512)
            assert filled(unit, 512 + end - begin)[512:] == data[begin:end]
            assert made.streamer.chunks(tensor, first, last, 512) is unit


def stress(folder: Path, rounds: int, without: str = "", seed: int = 0, keep: int = 0) -> int:
    """Fill units again and again, checked behind the decodes in their own stream; how many were wrong."""
    late: dict[str, Any] = {"delay": 2e-4, "seed": seed, "without": without, "blocking": False}
    with Fixture(folder, SIZES, places=3, keep=keep, **late) as made:
        units = made.units((0, 1), (2,), (4, 5))
        for unit, _ in units:
            unit.verified = True  # the first use would wait for everything
        wrong: list[int] = []
        out = torch.empty(max(len(expected) for _, expected in units), dtype=torch.uint8)
        for turn in range(rounds):
            unit, expected = units[turn % 3]
            try:
                unit(out)
            except Corrupt:
                wrong.append(turn)
                continue

            def check(turn: int = turn, expected: bytes = expected) -> None:
                # The gaps between tensors are not written.
                found = out.numpy()[: len(expected)]
                good = np.frombuffer(expected, np.uint8)
                if not ((found == good) | (good == 0xA5)).all():
                    wrong.append(turn)

            made.device.compute.put(check)
        made.device.wait()
        return len(wrong)


@pytest.mark.parametrize("keep", [0, 500_000])
def test_delays_change_nothing(tmp_path: Path, keep: int) -> None:
    assert stress(tmp_path, 1000, keep=keep) == 0


@pytest.mark.parametrize("event", ["hold", "copied"])
def test_without_an_event_the_bytes_are_wrong(tmp_path: Path, event: str) -> None:
    """The stress test would notice if either wait were missing."""
    assert sum(stress(tmp_path, 60, without=event, seed=seed) for seed in range(3)) > 0


def test_damage_is_named_at_first_use_and_later(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (one, expected), (other, _) = made.units((0,), (2,))
        whole = made.feed.whole(made.tensors[2].extent)
        at = made.tensors[2].extent.offset + int(made.tensors[2].offsets[5]) + 40
        whole[at] ^= 1
        assert filled(one, len(expected)) == expected
        with pytest.raises(Corrupt, match=r"`t2`, chunk 5: .*model\.bin` is damaged; fetch") as caught:
            filled(other, 600_000)
        assert (caught.value.tensor, caught.value.chunk) == ("t2", 5)
        whole[at] ^= 1
        assert filled(other, 600_000)[:600_000] == made.data[2]
        made.device.wait()  # copies ahead of the next use
        whole[at] ^= 1
        for _ in range(2):  # what is in the ring by now is sound, and damage is told at the next use
            filled(other, 600_000)
        with pytest.raises(Corrupt, match="was damaged since it was first read"):
            filled(other, 600_000)


def test_first_use_waits_for_no_copies_ahead(tmp_path: Path) -> None:
    """Only for its own decoding: the copies of what comes next go on meanwhile."""
    with Fixture(tmp_path, SIZES) as made:
        (one, expected), (other, _) = made.units((0,), (2,))
        gate, copied, copy = threading.Event(), threading.Event(), made.device.copy

        def late(place: int, address: int, piece: Piece) -> threading.Event:
            if piece in other.pieces:
                made.device.copies.put(lambda: gate.wait(60) and copied.set())
            return copy(place, address, piece)

        made.device.copy = late  # type: ignore[method-assign]
        assert filled(one, len(expected)) == expected
        assert one.verified
        assert "t2" in made.device.copied
        assert not copied.is_set()
        gate.set()


def damaged_later(made: Fixture) -> StreamedUnit:
    """A unit that was right, and whose last use was of damaged bytes."""
    (unit, expected) = made.units((2,))[0]
    assert filled(unit, len(expected)) == expected
    made.streamer.ring.forget()  # or what was copied ahead would be used
    whole = made.feed.whole(made.tensors[2].extent)
    whole[made.tensors[2].extent.offset + int(made.tensors[2].offsets[5]) + 40] ^= 1
    filled(unit, len(expected))
    return unit


def test_checking_tells_of_damage_at_once(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        made.streamer.check()  # nothing was used
        (other, expected) = made.units((0,))[0]
        filled(other, len(expected))
        made.streamer.check()
        damaged_later(made)
        filled(other, len(expected))
        with pytest.raises(Corrupt, match="was damaged since it was first read") as caught:
            made.streamer.check()
        assert (caught.value.tensor, caught.value.chunk) == ("t2", 5)
        made.streamer.check()  # it was told


def test_checking_waits_for_what_was_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is at its last decode as long as nobody waits for it, and finds the damage later."""
    with Fixture(tmp_path, SIZES, blocking=False) as made:
        go, (other, size) = threading.Event(), _sized(made.units((0,))[0])
        filled(other, size)
        unit = damaged_later(made)
        made.device.wait()
        with pytest.raises(Corrupt):
            made.streamer.check()
        for name in ("wait", "decoded"):
            waits = getattr(made.device, name)
            monkeypatch.setattr(made.device, name, lambda waits=waits: (go.set(), waits()))
        made.device.compute.put(lambda: go.wait(60) and None)
        filled(unit, 600_000)
        assert not go.is_set()
        with pytest.raises(Corrupt):
            made.streamer.check()


def test_checking_tells_of_all_damage_one_after_the_other(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        units = made.units((2,), (5,))
        for unit, expected in units:
            assert filled(unit, len(expected)) == expected
        made.streamer.ring.forget()
        whole = made.feed.whole(made.tensors[0].extent)
        for tensor in (2, 5):
            extent, offsets = made.tensors[tensor].extent, made.tensors[tensor].offsets
            whole[extent.offset + int(offsets[3]) + 40] ^= 1
        for unit, expected in units:
            filled(unit, len(expected))
        found = []
        for _ in range(2):
            with pytest.raises(Corrupt) as caught:
                made.streamer.check()
            found.append(caught.value.tensor)
        assert found == ["t2", "t5"]
        made.streamer.check()


class Rows(RowReader):
    """One whose kernel says that chunk 7 is damaged, if it is to look, and the device has come so far."""

    def __init__(self, packed: Streamed) -> None:
        super().__init__(packed)
        self._verified, self.checked = True, list[bool]()
        self._reports = torch.zeros(1, 4, dtype=torch.int32)
        nothing = SimpleNamespace(descriptors=np.zeros(0, np.uint8), launch=None)
        self._rows = Launch([nothing], CPU, self._reports)

    def _launch(self, ids: torch.Tensor, out: torch.Tensor, check: bool) -> None:
        self.checked.append(check)

    def find(self) -> None:
        self._reports[0] = torch.tensor([1, 0, 7, 0], dtype=torch.int32)


def test_rows_that_a_device_reads_on_the_host_are_checked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fixture(tmp_path, [50_000]) as made:
        tensor = made.tensors[0]
        monkeypatch.setattr(tensor, "header", replace_shape(tensor.header, (1000, 50)))
        reader, ids = Rows(tensor), torch.zeros(3, dtype=torch.int64)
        for _ in range(2):
            reader(ids)
        assert reader.checked == [True, True]
        made.streamer.check()
        reader(ids)
        reader.find()
        with pytest.raises(Corrupt, match="`t0`, chunk 7"):
            made.streamer.check()
        reader.find()
        with pytest.raises(Corrupt, match="`t0`, chunk 7"):
            reader(ids)


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


def test_recording_begins_between_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread is in the middle of one, for which it has noted no start."""
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]
        probe = made.probe
        copy, seen, trace = made.device.copy, [], object()

        def record() -> None:
            made.streamer.record(trace)
            probe.asked.set()  # had it not asked

        other = threading.Thread(target=record)

        def slow(*args: object) -> object:
            if not seen:
                other.start()
                assert probe.asked.wait(60)
            seen.append(made.device.trace)
            return copy(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(made.device, "copy", slow)
        made.streamer.ring.prefetch = False
        assert filled(unit, len(expected)) == expected
        other.join()
        assert set(seen) == {None}
        assert made.device.trace is trace


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


def test_threads_take_turns(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        units = made.units((0, 1), (2,), (4, 5))
        wrong: list[int] = []

        def work(number: int) -> None:
            for turn in range(20):
                unit, expected = units[(turn * number + number) % 3]
                if filled(unit, len(expected)) != expected:
                    wrong.append(turn)

        threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_graph_cannot_hold_streamed_weights(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        (unit, expected) = made.units((0,))[0]
        made.device.graph = True
        with pytest.raises(UnsupportedDevice, match="CUDA graph"):
            filled(unit, len(expected))


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


def test_a_ring_without_places_streams_rows_only(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        streamer = Streamer(made.device, 0, 0)
        with pytest.raises(PackedWeight, match="`t0` stays on the host"):
            streamer.unit([(made.tensors[0], 0)])
        made.tensors[0].travels = False
        rest = streamer.unit([(made.tensors[0], 512)])
        assert filled(rest, 512 + 10_000)[512:] == made.data[0]
        assert not made.device.copied


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


def test_a_streamed_tensor_stays_where_it_is(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        tensor = made.tensors[0]
        tensor.apply(lambda it: it.to("cpu"))
        with pytest.raises(PackedWeight, match=r"`t0` is streamed .* without `vram=` to move it"):
            tensor.apply(lambda it: it.to("meta"))
        weight = PackedTensor(tensor)
        with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
            pickle.dumps(weight)
        with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
            copy.deepcopy(weight)
        with pytest.raises(PackedWeight, match="to load a state dict"):
            weight.load(PackedTensor(tensor))
        with pytest.raises(PackedWeight, match="to save or copy it"):
            tensor.blob  # noqa: B018
        with pytest.raises(PackedWeight, match="which plain weights would break"):
            tensor.require_restorable()
        for refused in (tensor.stored, tensor.clone):
            with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
                refused()
        with pytest.raises(PackedWeight, match="to load a state dict into it"):
            tensor.check_load(tensor)


def test_a_damaged_index_is_refused_on_opening(tmp_path: Path) -> None:
    with Fixture(tmp_path, [50_000]) as made:
        data = bytearray(made.path.read_bytes())
        data[made.tensors[0].header.index_at + 3] ^= 1
        broken = tmp_path / "broken.bin"
        broken.write_bytes(data)
        source = FileSource(broken)
        with pytest.raises(Corrupt, match="`t0`: header, tables or index map are damaged"):
            Streamed(Extent(source, 0, source.size, "t0"), made.streamer, CPU, made.feed)
        source.close()


def test_what_follows_what() -> None:
    order: PrefetchOrder[str] = PrefetchOrder()
    assert order.after("a") is None
    for name in "abc":
        order.expect(name)
    assert [order.after(it) for it in "abc"] == ["b", "c", "a"]
    for name in "acb":
        order.saw(name)
    assert [order.after(it) for it in "abc"] == ["c", "c", "b"]


def test_tables_and_index_maps_are_put_on_the_device_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one copy for all that are not there, and never again."""
    from tpde.cuda.items import lookup_tables
    from tpde.streaming import streamed_source as tensors

    golden = Path(__file__).parent.parent / "golden" / "prefix_16.tpde.safetensors"
    uploads: list[int] = []
    empty = torch.empty

    def counted(size: int, **options: Any) -> torch.Tensor:
        uploads.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", counted)
    with Checkpoint([golden]) as checkpoint:
        stored = list(checkpoint.packed.values())
        found: list[Any] = [Streamed(it.extent, None, torch.device("cpu"), None) for it in stored]
    coded = [it for it in found if lookup_tables(it.header, it._section) is not None]
    assert len(coded) > 1
    tensors.put_on_device(coded[:1])
    tensors.put_on_device(found)
    tensors.put_on_device(found)
    assert len(uploads) == 2
    for it in coded:
        tables, image = it.device_tables()
        assert np.array_equal(image.numpy(), tables.image)
        assert np.array_equal(it._device_index.numpy(), it.host_reader().index)
        assert it._device_index.data_ptr() % 16 == 0
    assert len(uploads) == 2
