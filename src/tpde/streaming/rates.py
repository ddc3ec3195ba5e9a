"""Measuring how fast a machine is, in two to three seconds, and a disk in one more or as 512 MiB take."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tpde.cuda.backend import current
from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.host.direct_io import Files
from tpde.host.disk import READERS, ReadAhead
from tpde.host.feed import Ticket
from tpde.host.ranges import read_error
from tpde.io.sources import Extent, FileSource
from tpde.planning.units import Rates
from tpde.weights.launch import on_device

COPY_BYTES = 256 << 20  # of one copy: larger ones are no faster
REPEATS = 5
DECODE_SHARE = 0.48  # of the memory's rate: 2.0 of 4.2 TB/s of bf16 on an H200
# Of the rate at which plain weights are read, for which the memory's is taken: with one row, linear layers
# of the 8 B Llama shape read 10.52 GB in 2712 us, plain 15.01 GB in 3964 (benchmarks/results/linear.md).
WINDOWS_SHARE = 1.02
MODEL_SHARE = 1.15  # models' own code takes more than that of the layers here: 43 to 45 us a call, not 38.5
CALL_SECONDS = 42e-6  # of hosts with an H200: 31 to 54 us (docs/notes/prediction.md)
LAYERS, WIDTH = 8, 64  # of the model that is timed: so narrow that a GPU waits for the host
# Seconds of it, some 120 passes, at each of three times, of which the fastest counts: hosts with other work
# take up to twice as long for seconds on end, and one second of it was up to 45 % off from tokens soon after.
TIMED = 0.5
_UNLIMITED = float("inf")


class DiskSample(NamedTuple):
    """How much of a disk is read to measure it, and how.

    Attributes
    ----------
    least, most : int
        Bytes: so many at least, then until the time is over. Fast disks read the least in 0.1 s.
    seconds : float
        The time.
    buffers, piece : int
        Reads that are under way or done, and bytes of each.
    """

    least: int = 512 << 20
    most: int = 4 << 30
    seconds: float = 1.0
    buffers: int = 8
    piece: int = 32 << 20


def given_rates(copy: float, memory: float, disk: float | None = None) -> Rates:
    """Rates of a machine that is not here. Its host takes as long as those of H200s for a call."""
    return _rates(copy, _UNLIMITED if disk is None else disk, memory, CALL_SECONDS)


def _rates(copy: float, disk: float, memory: float, launch: float) -> Rates:
    """With those that are shares of the memory's."""
    return Rates(copy, disk, memory, DECODE_SHARE * memory, launch, WINDOWS_SHARE * memory)


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second from page-locked memory to the device, and those that it reads and writes in its own."""
    from cuda.bindings import driver

    with on_device(device), contextlib.ExitStack() as stack:
        torch.cuda.synchronize(device)  # there is a context now
        one, two = (_allocated(stack, driver.cuMemAlloc, driver.cuMemFree, COPY_BYTES) for _ in range(2))
        host = _allocated(stack, driver.cuMemHostAlloc, driver.cuMemFreeHost, COPY_BYTES, 0)
        stream = torch.cuda.current_stream(device)

        def seconds(call: Any, *args: Any) -> float:
            found = []
            for _ in range(REPEATS + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record(stream)
                _checked(call(*args, COPY_BYTES, stream.cuda_stream))
                end.record(stream)
                end.synchronize()
                found.append(start.elapsed_time(end) / 1e3)
            return float(statistics.median(found[1:]))

        copying = seconds(driver.cuMemcpyHtoDAsync, one, int(host))
        moving = seconds(driver.cuMemcpyDtoDAsync, one, two)
    return COPY_BYTES / copying, 2 * COPY_BYTES / moving


def _checked(result: Any) -> Any:
    from cuda.bindings import driver

    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedDevice(
            f"the CUDA driver refused what measuring needs ({code.name})",
            hint="free memory, or name the rates",
        )
    return values[0] if values else None


def _allocated(stack: contextlib.ExitStack, allocate: Any, free: Any, *args: Any) -> Any:
    made = _checked(allocate(*args))
    stack.callback(lambda: _checked(free(made)))
    return made


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, 16)
        query, key, value = (it(x).view(shape).transpose(1, 2) for it in (self.query, self.key, self.value))
        query, key = (torch.cat((-it[..., 8:], it[..., :8]), -1) * 0.5 + it * 0.5 for it in (query, key))
        key, value = torch.cat([past, key], 2), torch.cat([past, value], 2)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())
        return made


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.activation = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return made


class _Layer(nn.Module):
    """A decoder layer as models have them: 13 calls of modules, and the small operations between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attention, self.perceptron = (
            _Norm(),
            _Norm(),
            _Attention(),
            _Perceptron(),
        )

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x), past)
        made: torch.Tensor = x + self.perceptron(self.second(x))
        return made


def launch_seconds(
    device: torch.device, seconds: float = TIMED, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of the host for each call of a module, in a small decoder that is run for one token.

    Parameters
    ----------
    device : torch.device
        Where.
    seconds : float
        How long it is run: the median of all passes counts.
    clock : callable
        Gives the time, in seconds.
    """
    layers = nn.ModuleList(_Layer() for _ in range(LAYERS)).to(device, torch.bfloat16).eval()
    x = torch.zeros(1, 1, WIDTH, dtype=torch.bfloat16, device=device)
    past = torch.zeros(1, 4, 32, 16, dtype=torch.bfloat16, device=device)
    calls = sum(not isinstance(it, nn.ModuleList) for it in layers.modules())
    found: list[float] = []
    with torch.no_grad():
        while len(found) <= REPEATS or sum(found[REPEATS:]) < seconds:
            _synchronize(device)
            start = clock()
            for layer in layers:
                x = layer(x, past)
            _synchronize(device)
            found.append(clock() - start)
    return MODEL_SHARE * statistics.median(found[REPEATS:]) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def disk_rate(
    files: Sequence[str | os.PathLike[str]],
    sample: DiskSample | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes a second that come from files, read as weights are that stay there (`tpde.host.disk`).

    Takes a second, or as long as 512 MiB do, and 256 MiB of host memory.

    Parameters
    ----------
    files : sequence of path-like
        Read in turn.
    sample : DiskSample, optional
        How much of them.
    clock : callable
        Gives the time, in seconds.

    Raises
    ------
    InvalidInput
        If there is nothing to read.
    Truncated, ReadError
        If a file becomes shorter meanwhile, or cannot be read.
    OutOfMemory
        If the system has too little memory.
    """
    sample = sample or DiskSample()
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(contextlib.closing(FileSource(os.fspath(file)))) for file in files]
        work = list(_pieces(sources, sample))
        if not work:
            raise InvalidInput(
                "the files are empty, so that their disk cannot be measured", hint="name others"
            )
        read = {it.name for it in work}
        _forget([it for it in sources if it.name in read])
        ahead = ReadAhead(sample.buffers, sample.piece, READERS, None)
        stack.callback(ahead.close)
        waiting: deque[tuple[Ticket, int]] = deque()
        done, start = 0, clock()

        def take() -> int:
            ticket, size = waiting.popleft()
            ticket.wait()
            ticket.copied(_Copied())
            return size

        for extent in work:
            if done >= sample.least and clock() - start > sample.seconds:
                break
            waiting.append((ahead.request(extent), extent.size))
            if len(waiting) == sample.buffers:
                done += take()
        while waiting:
            done += take()
        seconds = clock() - start
    return done / max(seconds, 1e-9)


class _Copied:
    """The event of a copy that has ended."""

    def synchronize(self) -> None:
        """Return at once."""


def _pieces(sources: Sequence[FileSource], sample: DiskSample) -> Iterator[Extent]:
    """Ranges of the files, no more than are to be read."""
    left = sample.most
    for source in sources:
        for at in range(0, source.size, sample.piece):
            size = min(sample.piece, source.size - at, left)
            if not size:
                return
            left -= size
            yield Extent(source, at, size, source.name)


def _forget(sources: Sequence[FileSource]) -> None:
    """Drop what the page cache has of files, where reading does not go past it."""
    with contextlib.closing(Files()) as files:
        for source in sources:
            try:
                direct = files.direct(source)
            except OSError as error:
                raise read_error(source.name, 0, source.size, error) from error
            if not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Meters(NamedTuple):
    """What measures a machine: see the functions that are the defaults."""

    copy: Callable[[torch.device], tuple[float, float]] = copy_rates
    launch: Callable[[torch.device], float] = launch_seconds
    disk: Callable[[Sequence[str | os.PathLike[str]]], float] = disk_rate


def measure_rates(
    device: torch.device, files: Sequence[str | os.PathLike[str]] = (), meters: Meters | None = None
) -> Rates:
    """Measure a CUDA device, and the disk that some files are on. Everything that it allocates is freed.

    Parameters
    ----------
    device : torch.device
        With its number.
    files : sequence of path-like
        Read in part, past the page cache where the file system allows it. Without files the disk counts as
        infinitely fast.
    meters : Meters, optional
        What measures each rate.

    Raises
    ------
    UnsupportedDevice, MissingDependency
        If it is no CUDA device that can decode, or refuses the memory that measuring needs.
    """
    if device.type != "cuda":
        raise UnsupportedDevice(
            f"rates are measured on CUDA devices, not on `{device}`",
            hint="name one, or name the rates (`--copy-rate` and `--memory-rate` of `tpde plan`)",
        )
    current().facts(device.index or 0)  # says what is missing, if anything is
    meters = meters or Meters()
    before = meters.launch(device)
    copy, memory = meters.copy(device)
    between = meters.launch(device)
    disk = meters.disk(files) if files else _UNLIMITED
    return _rates(copy, disk, memory, min(before, between, meters.launch(device)))
