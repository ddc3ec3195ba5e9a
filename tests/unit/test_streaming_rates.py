"""Measuring a machine, with a driver, a clock and files that are made up."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from support.backends import MadeBackend  # noqa: E402
from support.cuda import HOST_BYTES, Cuda  # noqa: E402

from tpde.errors import InvalidInput, ReadError, UnsupportedDevice  # noqa: E402
from tpde.planning.units import Rates  # noqa: E402
from tpde.streaming import rates  # noqa: E402
from tpde.streaming.rates import DiskSample, Meters, copy_rates  # noqa: E402

CPU = torch.device("cpu")

DEVICE_BYTES = 800  # that a device copies within its memory in a nanosecond


class Measured(Cuda):
    """A device that copies at known rates, but for the first time, and once later.

    Attributes
    ----------
    there : dict
        What is allocated: how much, by its address.
    asked : list of str
        Calls that allocate or copy.
    fails : str
        The call that does.
    """

    def __init__(self, patch: pytest.MonkeyPatch, launch_on: Any) -> None:
        super().__init__(patch, launch_on)
        self.there: dict[int, int] = {}
        self.asked: list[str] = []
        self.fails = ""
        self._addresses, self._turns = itertools.count(1 << 20, 1 << 20), itertools.count()
        for name in ("cuMemAlloc", "cuMemHostAlloc"):
            patch.setattr(self.driver, name, partial(self._allocate, name))
        for name in ("cuMemFree", "cuMemFreeHost"):
            patch.setattr(self.driver, name, self._free)
        for name, rate in (("cuMemcpyHtoDAsync", HOST_BYTES), ("cuMemcpyDtoDAsync", DEVICE_BYTES)):
            patch.setattr(self.driver, name, partial(self._move, name, rate))

    def _said(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.asked.append(name)
        result = self.driver.CUresult
        return (result.CUDA_ERROR_OUT_OF_MEMORY if name == self.fails else result.CUDA_SUCCESS, *values)

    def _allocate(self, name: str, size: int, flags: int = 0) -> tuple[Any, ...]:
        assert self.current == self.index
        said = self._said(name, next(self._addresses))
        if name != self.fails:
            self.there[said[1]] = size
        return said

    def _free(self, address: int) -> tuple[Any, ...]:
        del self.there[address]
        return (self.driver.CUresult.CUDA_SUCCESS,)

    def _move(self, name: str, rate: int, to: int, of: int, size: int, stream: int) -> tuple[Any, ...]:
        assert self.there[to] == self.there[of] == size
        assert to != of
        assert stream == self.streams[0].cuda_stream
        turn = sum(it == name for it in self.asked)
        took = size // rate * (100 if not turn else 7 if turn == 2 else 1)
        self.streams[0].put(lambda: setattr(self, "clock", self.clock + took))
        return self._said(name)


def test_a_device_copies_and_reads_and_writes(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    cuda = Measured(monkeypatch, launch_on)
    cuda.current = 1
    copy, memory = copy_rates(cuda)
    assert copy == pytest.approx(HOST_BYTES * 1e9)
    assert memory == pytest.approx(2 * DEVICE_BYTES * 1e9), "each byte is read, and written"
    assert not cuda.there
    assert cuda.current == 1
    assert cuda.asked.count("cuMemcpyHtoDAsync") == rates.REPEATS + 1


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync"])
def test_what_a_driver_refuses_to_measure(call: str, monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    cuda = Measured(monkeypatch, launch_on)
    cuda.fails = call
    with pytest.raises(UnsupportedDevice, match=r"refused what measuring needs \(CUDA_ERROR_OUT_OF_MEMORY\)"):
        copy_rates(cuda)
    assert not cuda.there, "what was allocated before is given back"


METERS = Meters(
    copy=lambda device: (50e9, 4e12), launch=lambda device: 3e-5, disk={("file",): 6e9}.__getitem__
)


def test_all_rates_of_a_machine(launch_on: Any) -> None:
    there = launch_on(MadeBackend())
    found = rates.measure_rates(torch.device("cuda", 1), ("file",), METERS)
    assert found == Rates(
        copy=50e9, disk=6e9, memory=4e12, decode=0.48 * 4e12, launch=3e-5, windows=1.02 * 4e12
    )
    assert rates.measure_rates(torch.device("cuda"), meters=METERS).disk == float("inf")
    assert there.asked == [1, 0]


def test_rates_of_a_machine_that_is_not_here() -> None:
    assert rates.given_rates(50e9, 4e12, 6e9) == Rates(50e9, 6e9, 4e12, 0.48 * 4e12, 42e-6, 1.02 * 4e12)
    assert rates.given_rates(50e9, 4e12).disk == float("inf")


def test_a_device_that_cannot_decode_is_not_measured(launch_on: Any) -> None:
    launch_on(MadeBackend(facts=UnsupportedDevice("too old")))
    meters = METERS._replace(launch=lambda device: pytest.fail("it is measured"))
    with pytest.raises(UnsupportedDevice, match="too old"):
        rates.measure_rates(torch.device("cuda", 0), (), meters)


def clock(*took: float) -> Callable[[], float]:
    """By which intervals that are measured take so long, in turn, and then as long as the last."""
    now = [0.0]
    steps = itertools.chain(took, itertools.repeat(took[-1]))
    begins = itertools.cycle([True, False])

    def perf_counter() -> float:
        now[0] += 0.0 if next(begins) else next(steps)
        return now[0]

    return perf_counter


def test_a_call_is_a_share_of_the_median_pass() -> None:
    """The first passes do not count, nor does one that was held up."""
    steps = clock(*[9.0] * 5, 2e-3, 1e-3, 5.0, 1e-3, 1e-3)
    calls = rates.LAYERS * 13
    assert rates.launch_seconds(CPU, 5.005, clock=steps) == pytest.approx(1.15 * 1e-3 / calls)


def test_at_least_one_pass_counts() -> None:
    steps = clock(*[9.0] * 5, 2e-3, 1e-3)
    calls = rates.LAYERS * 13
    assert rates.launch_seconds(CPU, 0.0, clock=steps) == pytest.approx(1.15 * 2e-3 / calls)


def test_a_gpu_is_waited_for_at_both_ends_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there is nothing to wait for."""
    log: list[Any] = []

    def time() -> float:
        log.append("time")
        return float(len(log))

    to, zeros, device = torch.nn.Module.to, torch.zeros, torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", log.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device, dtype: to(self, CPU, dtype))
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **more: zeros(*args, device=CPU, **more))
    for where, needed in ((CPU, ["time"]), (device, [device, "time"])):
        log.clear()
        rates.launch_seconds(where, 0.0, clock=time)
        assert log == needed * 2 * (rates.REPEATS + 1)


# ---- disks ----


def test_a_disks_rate_is_its_bytes_by_the_time_they_took(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(bytes(300_000))
    assert rates.disk_rate([tmp_path / "file"], clock=clock(0.5)) == 600_000


@pytest.mark.parametrize(
    ("seconds", "read"), [(0.4, 4), (2.0, 2)], ids=["until time is over", "at least so many"]
)
def test_a_disk_is_read_until_there_is_enough_and_time_is_over(
    seconds: float, read: int, tmp_path: Path
) -> None:
    """Each look at the clock takes so long: a second, and two pieces, are needed."""
    piece, now = 64 << 10, itertools.count()
    sample = DiskSample(least=2 * piece, buffers=1, piece=piece)
    (tmp_path / "file").write_bytes(bytes(100 * piece))
    looks = {4: 1 + 3 + 1, 2: 1 + 1 + 1}[read]  # at the start, from the second piece on, at the end
    found = rates.disk_rate([tmp_path / "file"], sample, clock=lambda: next(now) * seconds)
    assert found == pytest.approx(read * piece / ((looks - 1) * seconds))


def test_no_more_of_files_is_read_than_is_asked_for(tmp_path: Path) -> None:
    """All of the first ones, in pieces, and a part of the last."""
    files = [tmp_path / str(size) for size in (400, 0, 500, 700)]
    for file in files:
        file.write_bytes(bytes(int(file.name)))
    for most in (300, 1000, 1600, 2000):
        sample = DiskSample(most=most, piece=300)
        assert rates.disk_rate(files, sample, clock=clock(1.0)) == min(most, 1600)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open files here")
def test_files_are_closed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though somebody holds the error, and with it what was open."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"" if name == "a" else bytes(10_000))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidInput, match="are empty") as empty:
        rates.disk_rate([tmp_path / "a"])
    rates.disk_rate([tmp_path / "a", tmp_path / "b"])
    assert len(os.listdir("/proc/self/fd")) == before, str(empty)

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ReadError, match=r"bytes 0 to 10000 of .* the disk failed") as failed:
        rates.disk_rate([tmp_path / "b"])
    assert len(os.listdir("/proc/self/fd")) == before, str(failed)
