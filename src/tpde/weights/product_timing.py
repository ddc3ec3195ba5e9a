"""Timing all ways in which products with matrices in the window layout may be launched."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpde.cuda.backend import current
from tpde.cuda.product_ways import Product, ways_of
from tpde.cuda.window_products import X_AT, DeviceWindow
from tpde.errors import OutOfMemory, UnsupportedDevice
from tpde.format.blob_header import align
from tpde.weights import windowing
from tpde.weights.launch import on_device

LEAST_GAIN = 0.02  # of the default's time, for another way to be chosen: a guess at what is noise
_AT = 128  # what addresses of matrices are multiples of
_X_WORDS = X_AT // 2

Enqueue = Callable[[int], None]  # queues something on a stream, by its handle
Clock = Callable[[Enqueue], Callable[[], float]]  # gives what works, and says how many seconds it takes


class Sample(NamedTuple):
    """How much is multiplied to time a way.

    Attributes
    ----------
    cold_bytes : int
        Of matrices that are multiplied in turn: several times what caches have.
    most_matrices : int
        How many these are: of 256, small ones, below 512 x 512 words, stay in a cache of 50 MB.
    least_products : int
        That are timed at a time: what starts a graph takes as long as one or two.
    runs : int
        After one that warms up.
    """

    cold_bytes: int = 256 << 20
    most_matrices: int = 256
    least_products: int = 32
    runs: int = 9


USUAL = Sample()


class Timed(NamedTuple):
    """What products of one kind take.

    Attributes
    ----------
    rows, columns : int
        Of the matrix.
    x_rows : int
        Rows of x.
    seconds : dict of str to float
        Medians for one product, by labels of the ways; the first is that without a table.
    """

    rows: int
    columns: int
    x_rows: int
    seconds: dict[str, float]

    @property
    def default(self) -> str:
        """How it is launched without a table."""
        return next(iter(self.seconds))

    @property
    def best(self) -> str:
        """The fastest way; the default if that is about as fast."""
        best = min(self.seconds, key=self.seconds.__getitem__)
        gains = self.seconds[best] <= (1 - LEAST_GAIN) * self.seconds[self.default]
        return best if gains else self.default


def on_gpu(work: Enqueue) -> Callable[[], float]:
    """Record work as a CUDA graph, whose launches wait for no host, to be timed on the device by events."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    # What x is made of may lie where y does, and is read until then.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(stream.cuda_stream)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work(stream.cuda_stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def run() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return run


def time_products(
    shape: tuple[int, int],
    counts: Sequence[int],
    device: torch.device,
    clock: Clock = on_gpu,
    sample: Sample | None = None,
) -> Iterator[Timed]:
    """Time products with matrices of a shape, in every way that the device has room for.

    Parameters
    ----------
    shape : tuple of int
        Rows and columns.
    counts : sequence of int
        Rows of x, each 1 to `MOST_ROWS`.
    device : torch.device
        A CUDA device, with its number.
    clock : callable
        Times work; by default on the GPU.
    sample : Sample, optional
        How much is multiplied.

    Yields
    ------
    Timed
        For each count.

    Raises
    ------
    OutOfMemory
        If the device has too little memory for the matrices.
    """
    try:
        with on_device(device):
            made = _Matrices(*shape, device, sample or USUAL)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"matrices of {shape[0]} x {shape[1]} words to be multiplied do not fit on {device} "
            f"({str(error).splitlines()[0]})",
            hint="free some memory, or leave the shape out",
            where=str(device),
        ) from None
    for count in counts:
        with on_device(device):
            seconds = made.race(count, clock)
        yield Timed(*shape, count, seconds)


class _Matrices:
    """Copies of a matrix of weights as they are, normal with rows of different scales."""

    def __init__(self, rows: int, columns: int, device: torch.device, sample: Sample) -> None:
        assert device.index is not None
        self._sample = sample
        self._shape, self._device, self._number = (rows, columns), device, device.index
        self._draw = torch.Generator(device).manual_seed(7)
        plain = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        plain.normal_(0, 0.02, generator=self._draw)
        plain *= torch.exp(0.3 * torch.randn((rows, 1), device=device, generator=self._draw)).to(plain.dtype)
        encoded = windowing.encode(plain)
        assert encoded is not None  # shapes that have no layout are refused before
        del plain
        blob, self._window = encoded
        step = align(blob.numel(), _AT)
        count = min(max(-(-sample.cold_bytes // step), 1), sample.most_matrices)
        self._room = torch.zeros(count * step + _AT, dtype=torch.uint8, device=device)
        first = -self._room.data_ptr() % _AT
        self._places = []
        for at in range(first, first + count * step, step):
            self._room[at : at + blob.numel()].copy_(blob)
            self._places.append(self._room.data_ptr() + at)
        torch.cuda.synchronize(device)  # products may read matrices before what is queued has ended

    def race(self, count: int, clock: Clock) -> dict[str, float]:
        """Medians of alternating runs, in seconds for one product, by labels of the ways."""
        rows, columns = self._shape
        wide = align(columns, _X_WORDS)
        x = torch.zeros(count, wide, dtype=torch.bfloat16, device=self._device)
        x[:, :columns] = torch.randn(count, columns, device=self._device, generator=self._draw)
        y = torch.empty(count, rows, dtype=torch.bfloat16, device=self._device)
        products = max(self._sample.least_products, len(self._places))
        ways = ways_of(current().facts(self._number), self._window, count)
        room = torch.empty(max(it.room for it in ways), dtype=torch.uint8, device=self._device)
        runs: dict[str, Callable[[], float]] = {}
        needed: Tensor | None = None
        for how in ways:
            try:
                there = self._launched(count, how)
            except UnsupportedDevice:  # a part of a device has no room for clusters
                continue
            runs[how.label] = clock(_work(there, x, y, room, products))
            y.zero_()
            runs[how.label]()
            found = y.view(torch.int16).clone()
            needed = found if needed is None else needed
            if not torch.equal(found, needed):
                raise AssertionError(
                    f"{rows} x {columns}, {count} rows of x: other bits by {how}; report this"
                )
        taken: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(self._sample.runs):
            for label, run in runs.items():
                taken[label].append(run() / products)
        return {label: statistics.median(them) for label, them in taken.items()}

    def _launched(self, count: int, how: Product) -> list[DeviceWindow]:
        """All matrices, to be multiplied in one way."""
        made = [DeviceWindow(self._window, at, self._number) for at in self._places]
        for it in made:
            it.choose(count, how)
        return made


def _work(there: Sequence[DeviceWindow], x: Tensor, y: Tensor, room: Tensor, products: int) -> Enqueue:
    """So many products, with one matrix after the other."""
    places = x.data_ptr(), x.stride(0), len(x), y.data_ptr(), y.stride(0)

    def work(stream: int) -> None:
        for number in range(products):
            there[number % len(there)].product(*places, 0, stream, room.data_ptr())

    return work
