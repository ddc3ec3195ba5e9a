"""The chain of prototypes that tpde grew out of, rebuilt on their own workload and timed in one run.

A 1024x4096 fp32 matrix of which 10 % of the words change: positions and new words in 64 chunks of 65,536
words, each compressed with zstd. Every row starts from the old matrix on the device and ends with the new
one there; what it starts from besides (compressed bytes on the host, or plain ones on the device) is in the
table. Bits are compared each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard

from benchmarks.data.blobs import Decoder, pack, upload
from benchmarks.harness.gpu import Result, attempt, stream
from benchmarks.harness.machine import cores
from benchmarks.harness.report import Page, ms, note
from benchmarks.harness.timing import to_the_end
from tpde.codec import pool
from tpde.codec.delta import CHUNK_WORDS
from tpde.codec.zstd import DECODE_SPEED, LEVEL
from tpde.codec.zstd import decompress as decompress_frame
from tpde.cuda.backend import current
from tpde.cuda.delta_kernels import Changes, DeltaBatch, Lists, Pair
from tpde.format.container import TensorSpec

TITLE, NEEDS_GPU = "The prototypes' systems", True
ROWS, COLUMNS, CHANGED = 1024, 4096, 0.1
WORDS = ROWS * COLUMNS
CHUNKS = WORDS // CHUNK_WORDS
HOST = "zstd, on the host"


@dataclass
class Workload:
    """Old and new matrix, and the changes between them as chunks: plain, and as zstd frames."""

    seed: int
    old: np.ndarray[Any, Any] = field(init=False)
    new: np.ndarray[Any, Any] = field(init=False)
    counts: list[int] = field(default_factory=list)  # changes of each chunk
    starts: list[int] = field(default_factory=list)  # where they begin in a list of all, with room between
    room: int = 0  # changes in the list of all
    frames: list[bytes] = field(default_factory=list)  # two a chunk: positions, new words
    places: list[int] = field(default_factory=list)  # in the data, of each frame's content
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)

        def draw(count: int) -> Any:
            return (rng.standard_normal(count, np.float32) * np.float32(0.02)).view(np.uint32)

        self.old = draw(WORDS)
        positions = np.sort(rng.choice(WORDS, int(WORDS * CHANGED), replace=False))
        self.new = self.old.copy()
        self.new[positions] = draw(positions.size)
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        parts = [positions[positions // CHUNK_WORDS == number] for number in range(CHUNKS)]
        self.counts = [part.size for part in parts]
        for part in parts:
            self.starts.append(self.room)
            self.room += -(-part.size // 8) * 8  # so that all begins at multiples of 16 bytes
        for start, part in zip(self.starts, parts, strict=True):
            for place, content in (
                (2 * start, (part % CHUNK_WORDS).astype(np.uint16)),
                (2 * self.room + 4 * start, self.new[part]),
            ):
                self.places.append(place)
                self.sizes.append(content.nbytes)
                self.frames.append(compressor.compress(content.tobytes()))

    @property
    def plain_bytes(self) -> int:
        """Of the data: all positions, then all new words."""
        return 6 * self.room

    @property
    def coded_bytes(self) -> int:
        """All frames together."""
        return sum(map(len, self.frames))

    def decompress(self, number: int, out: np.ndarray[Any, Any]) -> None:
        """One frame's content to its place."""
        at, size = self.places[number], self.sizes[number]
        out[at : at + size] = decompress_frame(memoryview(self.frames[number]), size, 0, number // 2)

    def decompress_all(self, out: np.ndarray[Any, Any], threads: int, shared: bool | None) -> None:
        """Every frame, on this thread, on the kept pool, or on whichever pays (None)."""

        def chunk(number: int) -> None:
            self.decompress(2 * number, out)
            self.decompress(2 * number + 1, out)

        work = self.coded_bytes / DECODE_SPEED
        pool.each(chunk, range(CHUNKS), seconds=work, threads=threads, shared=shared)


class Device:
    """What all rows share on the device."""

    def __init__(self, work: Workload, threads: int) -> None:
        import torch

        self.work, self.threads = work, threads
        self.old, self.new = upload(work.old), upload(work.new)
        self.out = torch.empty_like(self.old)
        self.data = torch.zeros(work.plain_bytes, dtype=torch.uint8, device="cuda")
        self.pinned = torch.zeros(work.plain_bytes, dtype=torch.uint8, pin_memory=True)
        self.host = self.pinned.numpy()
        self.counts = upload(np.array(work.counts, np.uint32))
        self.starts = upload(np.array(work.starts, np.uint64))
        at = self.out.data_ptr()
        self.all = self._batch(at, WORDS)
        self.each = [self._batch(at + 4 * CHUNK_WORDS * number, CHUNK_WORDS) for number in range(CHUNKS)]

    def _batch(self, at: int, words: int) -> tuple[DeltaBatch, Any, Any]:
        import torch

        batch = DeltaBatch([Pair(at, 0, words)], 4, 1, torch.cuda.current_device())
        return batch, upload(batch.items), upload(batch.whose)

    def write(self, data: Any, number: int | None = None) -> None:
        """Launch the kernel that writes changes on torch's current stream: of one chunk, or of all."""
        batch, items, whose = self.all if number is None else self.each[number]
        first = number or 0
        batch.write(
            items.data_ptr(),
            whose.data_ptr(),
            Lists(self.counts.data_ptr() + 4 * first, self.starts.data_ptr() + 8 * first),
            Changes(data.data_ptr(), data.data_ptr() + 2 * self.work.room),
            stream(),
        )

    def spans(self, number: int) -> list[slice]:
        """Where a chunk's positions and words lie in the data."""
        frames = 2 * number, 2 * number + 1
        return [slice(self.work.places[i], self.work.places[i] + self.work.sizes[i]) for i in frames]


def v1(device: Device) -> Callable[[], None]:
    """One launch over all chunks, positions and words plain on the device."""
    data = upload(np.zeros(device.work.plain_bytes, np.uint8))
    host = np.zeros(device.work.plain_bytes, np.uint8)
    device.work.decompress_all(host, 1, False)
    data.copy_(_tensor(host))
    return lambda: device.write(data)


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array)


def v2_synchronous(device: Device) -> Callable[[], None]:
    """For each chunk: decompress, copy from pageable memory, launch, wait."""
    import torch

    host = np.zeros(device.work.plain_bytes, np.uint8)

    def run() -> None:
        for number in range(CHUNKS):
            device.work.decompress(2 * number, host)
            device.work.decompress(2 * number + 1, host)
            for part in device.spans(number):
                device.data[part].copy_(_tensor(host[part]))
            device.write(device.data, number)
            torch.cuda.synchronize()

    return run


def v2_pipelined(device: Device) -> Callable[[], None]:
    """The same from pinned memory on two streams, without waiting: the host decompresses on meanwhile."""
    import torch

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]

    def run() -> None:
        for side in streams:
            side.wait_stream(torch.cuda.current_stream())
        for number in range(CHUNKS):
            device.work.decompress(2 * number, device.host)
            device.work.decompress(2 * number + 1, device.host)
            with torch.cuda.stream(streams[number % 2]):
                for part in device.spans(number):
                    device.data[part].copy_(device.pinned[part], non_blocking=True)
                device.write(device.data, number)
        for side in streams:
            torch.cuda.current_stream().wait_stream(side)

    return run


def v21(device: Device, shared: bool | None) -> Callable[[], None]:
    """Decompress all on the host, copy once, launch once."""

    def run() -> None:
        device.work.decompress_all(device.host, device.threads, shared)
        device.data.copy_(device.pinned, non_blocking=True)
        device.write(device.data)

    return run


def v3(device: Device) -> Callable[[], None]:
    """Copy the frames, decompress them on the device with nvCOMP, launch once."""
    import torch

    nvcomp = current().nvcomp
    if not nvcomp.available():
        raise ModuleNotFoundError("nvidia.nvcomp")
    frames = device.work.frames
    sizes = [len(frame) for frame in frames]
    starts = np.cumsum([0, *(-(-size // 16) * 16 for size in sizes)]).tolist()
    pinned = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=True)
    for start, frame in zip(starts, frames, strict=False):
        pinned.numpy()[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
    coded = torch.zeros(starts[-1], dtype=torch.uint8, device="cuda")

    def run() -> None:
        coded.copy_(pinned, non_blocking=True)
        nvcomp.decode(
            coded.data_ptr(),
            starts[:-1],
            sizes,
            device.data.data_ptr(),
            device.work.places,
            device.work.sizes,
            torch.cuda.current_device(),
            stream(),
        )
        device.write(device.data)

    return run


def packed(device: Device, copied: bool) -> Callable[[], None]:
    """No delta: the whole new matrix as `tpde pack` stores it, decoded over the old one."""
    import torch

    blob = pack(TensorSpec("F32", (ROWS, COLUMNS)), device.work.new.view(np.uint8))
    decoder = Decoder([blob], device.out)

    def there() -> None:
        decoder()

    if not copied:
        return there
    pinned = torch.zeros(blob.data.size, dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = blob.data

    def run() -> None:
        decoder.blobs[0][: blob.data.size].copy_(pinned, non_blocking=True)
        decoder()

    return run


Way = Callable[[Device], Callable[[], None]]
# What the prototypes' table has as rows 4 to 8, then ours without a delta: what each starts from, the
# milliseconds that were published, and how it is built here.
ROWS_OF: dict[str, tuple[str, str, Way]] = {
    "V1: one launch": ("plain, on the GPU", "works", v1),
    "V2: 64 launches, synchronous": (HOST, "22.07", v2_synchronous),
    "V2: 64 launches, pipelined": (HOST, "16.56", v2_pipelined),
    "V2.1: one launch, CPU zstd serial": (HOST, "7.06", lambda d: v21(d, False)),
    "V2.1: one launch, CPU zstd on a kept pool": (HOST, "9.59", lambda d: v21(d, True)),
    "V2.2: the automatic choice": (HOST, "picks", lambda d: v21(d, None)),
    "V3: nvCOMP zstd on the GPU": (HOST, "never built", v3),
    "tpde, whole matrix": ("packed, on the host", "", lambda d: packed(d, True)),
    "tpde, whole matrix, there": ("packed, on the GPU", "", lambda d: packed(d, False)),
}


def timed(device: Device, run: Callable[[], None]) -> float:
    """Seconds from the old matrix to the new one, everything waited for; every bit compared."""
    import torch

    device.out.copy_(device.old)
    device.data.fill_(0xFF)
    device.host.fill(0xFF)
    took = to_the_end(run)
    if not torch.equal(device.out, device.new):
        raise ValueError("WRONG BITS")
    return took


def measure(device: Device, runs: int) -> dict[str, Result]:
    """Run all in turns, a few times to warm up and `runs` times for the record."""
    results = {name: Result() for name in ROWS_OF}
    ready: dict[str, Callable[[], None]] = {}
    for name, (_, _, make) in ROWS_OF.items():
        with attempt(results, name):
            run = make(device)
            timed(device, run)
            ready[name] = run
    for number in range(runs + 3):
        for name, run in ready.items():
            if results[name].problem:
                continue
            with attempt(results, name):
                took = timed(device, run)
                if number >= 3:
                    results[name].times.append(took)
    return results


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=31, help="timed runs of each, after three to warm up")
    parser.add_argument("--threads", type=int, default=min(8, cores()))


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure, and compare bits."""
    note("making the workload")
    work = Workload(options.seed)
    results = measure(Device(work, options.threads), options.runs)
    auto = work.coded_bytes / DECODE_SPEED
    workers = min(options.threads, CHUNKS)
    chosen = "the pool" if pool.pays(auto, workers) else "one thread"
    rows = []
    for name, result in results.items():
        page.judge(result.problem in ("", "not installed"), name)
        cells = [result.problem, "", ""]
        if result.times and not result.problem:
            cells = [ms(it, 3) for it in (result.median, min(result.times), max(result.times))]
        rows.append([name, *ROWS_OF[name][:2], *cells])
    page.say(
        f"Workload: {ROWS}x{COLUMNS} fp32, normal, {CHANGED:.0%} of the words changed; positions (16-bit, "
        f"in the chunk) and new words in {CHUNKS} chunks of {CHUNK_WORDS} words, "
        f"{work.plain_bytes / 1e6:.2f} MB, as zstd frames {work.coded_bytes / 1e6:.2f} MB (ratio "
        f"{sum(work.sizes) / work.coded_bytes:.2f}; the prototypes' 64-bit positions gave about 2.5). "
        f"Medians of {options.runs} alternating runs after three to warm up, from the first call to the end "
        "of all work on the device. Before each run the old matrix is put back; after each, every bit is "
        f"compared. {options.threads} threads; handing work to them takes "
        f"{pool.hand_off(max(workers, 2)) * 1e6:.0f} us here, one thread is expected to take "
        f"{auto * 1e3:.2f} ms: the automatic choice is {chosen}. The published figures are of another "
        "machine."
    )
    page.table(["system", "starts from", "published, ms", "here, ms", "fastest", "slowest"], rows)
