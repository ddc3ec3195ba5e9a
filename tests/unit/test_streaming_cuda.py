"""The ring on a CUDA device whose streams run as late as they may: order, places, traces, and what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from support.cuda import DECODE_NS, HOST_BYTES, Cuda  # noqa: E402
from support.ring import ROOM, SIZES, Fixture  # noqa: E402

from tpde.errors import Corrupt  # noqa: E402
from tpde.host.page_lock import STEP  # noqa: E402
from tpde.streaming.cuda_device import CudaDevice, Reports  # noqa: E402
from tpde.streaming.streamer import StreamedUnit  # noqa: E402
from tpde.streaming.trace import Trace, start_trace  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


SMALL = 16 << 10  # of a step


def fixture(cuda: Cuda, folder: Path, *, step: int = STEP, **options: Any) -> Fixture:
    made = Fixture(folder, SIZES, kind=lambda ring: CudaDevice(cuda, ring, step=step), **options)
    cuda.tensors += made.tensors
    return made


def wrong(out: Any, expected: bytes) -> bool:
    """Whether a buffer differs, but for the gaps between tensors."""
    found, good = out.numpy()[: len(expected)], np.frombuffer(expected, np.uint8)
    return not ((found == good) | (good == 0xA5)).all()


@pytest.mark.parametrize("eager", ["copies", "computes", "any"])
@pytest.mark.parametrize("keep", [0, 500_000])
def test_the_bytes_are_right_in_whatever_order_streams_run(
    eager: str, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    """Nothing is done before all is queued: only events keep places from being overwritten, or read early."""
    cuda = Cuda(monkeypatch, launch_on, eager)
    with fixture(cuda, tmp_path, step=SMALL, places=3, keep=keep, offset=8, apart=8) as made:
        units = made.units((0, 1), (2,), (4, 5))
        for unit, _ in units:
            unit.verified = True  # the first use would wait for everything
        out = torch.empty(max(len(expected) for _, expected in units), dtype=torch.uint8)
        found: list[int] = []
        cuda.current, compiled = 1, cuda.compiled  # the caller is at another device
        assert compiled
        for turn in range(9):
            unit, expected = units[turn * turn % 3]
            unit(out)
            # Behind the decodes, as a forward pass is.
            job = lambda turn=turn, expected=expected: found.append(turn) if wrong(out, expected) else None  # noqa: E731
            cuda.streams[0].put(job)
        assert cuda.current == 1
        assert cuda.compiled == compiled, "none is compiled while a model runs"
        made.streamer.check()
        assert not found
        assert {it["CHECK"] for it in cuda.launches} == {1}
        assert {it["stream"] for it in cuda.launches} == {70}


def test_places_are_not_written_before_what_used_their_memory_is_done(
    monkeypatch: pytest.MonkeyPatch,
    launch_on: Any,
) -> None:
    cuda = Cuda(monkeypatch, launch_on, "copies")
    done: list[str] = []
    cuda.current = 1
    cuda.streams[0].put(lambda: done.append("before"))
    device = CudaDevice(cuda, 1024)
    cuda.streams[1].put(lambda: done.append("copy"))
    cuda.run()
    assert done == ["before", "copy"]
    assert device.memory is not None


def one(made: Fixture) -> StreamedUnit:
    return made.units((2,))[0][0]


def test_copies_are_cut_where_memory_was_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    cuda = Cuda(monkeypatch, launch_on)
    with fixture(cuda, tmp_path, step=SMALL) as made:
        piece = one(made).pieces[1]
        address = made.feed.wait(piece.extent)
        event: Any = made.device.copy(ROOM, address, piece)
        assert sum(size for *_, size in cuda.copied) == piece.extent.size
        assert len(cuda.copied) > 1
        base = made.device.memory.data_ptr() + ROOM
        for to, begin, size in cuda.copied:
            assert to - base == begin - address
            assert begin // SMALL == (begin + size - 1) // SMALL
        assert not event.query()
        event.synchronize()
        whole = made.device.memory.numpy()[ROOM:][: piece.extent.size]
        assert whole.tobytes() == bytes(made.feed.whole(piece.extent)[piece.extent.offset :][: len(whole)])


def test_a_copy_that_the_driver_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    cuda = Cuda(monkeypatch, launch_on)
    with fixture(cuda, tmp_path) as made:
        unit = one(made)
        cuda.code = cuda.driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        with pytest.raises(RuntimeError, match=r"copying \d+ bytes of `t2` to .*ILLEGAL_ADDRESS"):
            unit(torch.empty(600_000, dtype=torch.uint8))


def test_damage_is_told_of_the_piece_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    cuda = Cuda(monkeypatch, launch_on)
    with fixture(cuda, tmp_path) as made:
        units = made.units((0,), (2,))
        out = torch.empty(600_000, dtype=torch.uint8)
        extent, offsets = made.tensors[2].extent, made.tensors[2].offsets
        made.feed.whole(extent)[extent.offset + int(offsets[20]) + 40] ^= 1
        (locked,) = cuda.locked
        for unit, _ in units:
            there = unit.handle.launch._reports.untyped_storage().data_ptr()  # type: ignore[attr-defined]
            assert there == locked.data_ptr(), "whoever asks for them waits for nothing"
        units[0][0](out)
        assert units[0][0].verified
        with pytest.raises(Corrupt, match=r"`t2`, chunk 20: .*is damaged"):
            units[1][0](out)
        made.streamer.check()


def test_waiting_for_decoding_waits_for_no_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    cuda = Cuda(monkeypatch, launch_on, "computes")
    with fixture(cuda, tmp_path) as made:
        done: list[str] = []
        cuda.streams[0].put(lambda: done.append("computed"))
        cuda.streams[1].put(lambda: done.append("copied"))
        made.device.decoded()
        assert done == ["computed"]
        made.device.wait()
        assert done == ["computed", "copied"]


def test_closing_waits_and_frees_the_places(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    cuda, done = Cuda(monkeypatch, launch_on), list[int]()
    device = CudaDevice(cuda, 1024)
    cuda.streams[1].put(lambda: done.append(1))
    device.close()
    assert done == [1]
    assert device.memory is None
    device.close()


def test_closing_frees_the_places_of_a_device_that_has_crashed(
    monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    device = CudaDevice(Cuda(monkeypatch, launch_on), 1024)

    def crashed(_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", crashed)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.close()
    assert device.memory is None


def test_a_graph_that_is_being_recorded(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    cuda = Cuda(monkeypatch, launch_on)
    device = CudaDevice(cuda, 1024)
    assert not device.recording()
    cuda.recording = True
    assert device.recording()


def test_reports_are_of_one_piece_each(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    cuda = Cuda(monkeypatch, launch_on)
    reports = Reports(8)
    taken = [reports.take(count) for count in (3, 5, 1, 20, 7, 1)]
    assert [tuple(it.shape) for it in taken] == [(count, 4) for count in (3, 5, 1, 20, 7, 1)]
    for i, it in enumerate(taken):
        it.fill_(i + 1)
    assert [it.unique().tolist() for it in taken] == [[i + 1] for i in range(6)]
    assert [len(it) for it in cuda.locked] == [8, 8, 20, 8]


# ---- traces ----


def test_a_trace_starts_with_the_device_idle(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    cuda, done = Cuda(monkeypatch, launch_on, "computes"), list[int]()
    CudaDevice(cuda, 1024)
    cuda.streams[1].put(lambda: done.append(1))
    trace = start_trace(cuda, 7)
    assert done == [1], "copies too"
    assert trace._limit == 7
    assert trace._anchor.elapsed_time(trace._anchor) == 0  # type: ignore[attr-defined]
    assert str(cuda) in trace.device


def test_a_trace_tells_what_was_copied_decoded_and_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    cuda = Cuda(monkeypatch, launch_on, "computes")
    with fixture(cuda, tmp_path, places=8) as made:
        units = made.units((2,), (0, 4), (5,))
        for unit, _ in units:
            unit.verified = True
        made.streamer.ring.prefetch = False
        out = torch.empty(800_000, dtype=torch.uint8)
        trace: Trace = start_trace(cuda)
        made.streamer.record(trace)
        for i, (unit, _) in enumerate(units):
            unit(out)
            cuda.streams[0].put(lambda i=i: setattr(cuda, "clock", cuda.clock + (i + 1) * 10**6))
        units[0][0](out)
        made.streamer.record(None)
        units[1][0](out)
        spans = trace.spans()
    pieces = [piece for i in (0, 1, 2, 0) for piece in units[i][0].pieces]
    copies, decodes, computes = (
        [it for it in spans if it.track == kind] for kind in ("copy", "decode", "compute")
    )
    assert [(it.name, it.nbytes) for it in copies] == [(it.extent.name, it.extent.size) for it in pieces]
    assert [it.end - it.start for it in copies] == [it.extent.size // HOST_BYTES for it in pieces]
    assert [(it.name, it.nbytes) for it in decodes] == [(it.extent.name, it.extent.size) for it in pieces]
    assert {it.end - it.start for it in decodes} == {DECODE_NS}
    assert [(it.name, it.end - it.start) for it in computes] == [
        ("t2", 10**6),
        ("t0", 2 * 10**6),
        ("t5", 3 * 10**6),
    ]
    assert {it.name for it in copies} == {"t0", "t2", "t4", "t5"}


def test_what_was_not_decoded_to_its_end_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    cuda = Cuda(monkeypatch, launch_on)
    with fixture(cuda, tmp_path) as made:
        (large, _), (small, _) = made.units((2,), (3,))
        out = torch.empty(600_000, dtype=torch.uint8)
        trace = start_trace(cuda)
        made.device.trace = trace
        for unit in (large, small, small):
            piece = unit.pieces[0]
            copied = made.device.copy(0, made.feed.wait(piece.extent), piece)
            made.device.decode(unit.handle, 0, 0, out, copied)
        assert [it.name for it in trace.spans() if it.track == "compute"] == ["t3"]


def test_two_devices_beside_each_other_note_what_is_computed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    """The experts' weights follow those of their block: what that has computed ends there."""
    cuda = Cuda(monkeypatch, launch_on)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with fixture(cuda, folders[0]) as first:
        beside = Fixture(folders[1], SIZES, kind=lambda ring: CudaDevice(cuda, ring, beside=first.device))
        cuda.tensors += beside.tensors
        with beside:
            assert first.device._copies is not beside.device._copies
            trace, out = start_trace(cuda), torch.empty(600_000, dtype=torch.uint8)
            for it in (first, beside):
                it.streamer.record(trace)
                it.units((3,))[0][0](out)
            assert [it.name for it in trace.spans() if it.track == "compute"] == ["t3"]
