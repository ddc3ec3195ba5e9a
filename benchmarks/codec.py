"""Encode and decode speed in memory against ZipNN, zstd and a plain copy, in one process and one run.

Ours is everything that a file costs: sample, plan, tables, chunks, index map, checksums and hash, from the
tensor's bytes to the packed file's, and back through the reader. GB/s count bytes of the original, 10^9 each.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import zstandard

from benchmarks.data.weights import normal, tensor_bytes
from benchmarks.harness.processes import reason
from benchmarks.harness.report import Page, note, verdict
from benchmarks.harness.timing import Laps, wall
from benchmarks.peers import zipnn
from tpde.codec import prefix_codes
from tpde.codec.native import Bytes
from tpde.codec.selection import core_layout, plan_tensor, sample_ranges
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

TITLE = "Codec: speed in memory"
BARS = {"one thread, x ZipNN": 3.0, "two threads, x one": 1.7}
ZIPNN = "ZipNN"


class Contestant(ABC):
    """One way to make bytes smaller."""

    name: str

    def prepare(self, data: Bytes) -> None:  # noqa: B027 - most only read the input
        """Make what `encode` may consume, outside the timed region, right before it."""

    @abstractmethod
    def encode(self, data: Bytes, threads: int) -> Any:
        """Return the coded bytes."""

    @abstractmethod
    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """Return the original's bytes."""


class Tpde(Contestant):
    """What `tpde.torch.save`, `tpde.numpy.save` and `load` do; `reuse` takes buffers made beforehand."""

    def __init__(self, spec: TensorSpec, *, reuse: bool) -> None:
        self.name = "tpde, buffers reused" if reuse else "tpde"
        self._spec, self._reuse = spec, reuse
        self._buffer = np.zeros(spec.nbytes + (1 << 20), np.uint8) if reuse else None
        self._out = np.zeros(spec.nbytes, np.uint8) if reuse else None

    def encode(self, data: Bytes, threads: int) -> Any:
        """Tensor bytes to the bytes of a packed file."""
        sink = BytesSink(self._spec.nbytes + (1 << 20), self._buffer)
        with FileWriter(sink, {"weight": self._spec}, threads=threads) as writer:
            writer.write("weight", data)
        return sink.data

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """A packed file's bytes to the tensor's, every chunk's checksum checked."""
        if self._out is None:
            return PackedFile(coded).read("weight", threads)
        PackedFile(coded).tensor("weight").read(0, nbytes, self._out, threads)
        return self._out


class Core(Contestant):
    """The codec alone, into buffers made beforehand: plan, tables, chunks, index map and checksums.

    No file around it, no hash; this is what ZipNN's functions do, too.
    """

    name = "tpde, codec alone"

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._coded = np.zeros(spec.nbytes + (1 << 20), np.uint8)
        self._out = np.zeros(spec.nbytes, np.uint8)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def encode(self, data: Bytes, threads: int) -> Any:
        """Tensor bytes to chunks and their index map."""
        sample = np.concatenate([data[begin:end] for begin, end in sample_ranges(self._spec)])
        plan = plan_tensor(self._spec, sample)
        assert plan is not None
        header = plan.header
        self._codec = prefix_codes.PrefixCodec(core_layout(header), plan.section, encode=True)
        made = self._codec.encode(data, 0, header.chunks, header.chunks_at, self._coded, threads)
        self._made, self._at = made, header.chunks_at
        self._size = header.chunks_at + made.data.size
        return self

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """Chunks to tensor bytes, every checksum checked."""
        made, end = self._made, self._at + self._made.data.size
        self._codec.decode(made.records, 0, made.data, self._at, end, self._out, threads)
        return self._out


class ZipNN(Contestant):
    """ZipNN's own defaults."""

    def __init__(self) -> None:
        self.name = ZIPNN
        self._copy = bytearray()

    def prepare(self, data: Bytes) -> None:
        """Copy the input, which it changes in place."""
        self._copy = bytearray(data)

    def encode(self, data: Bytes, threads: int) -> Any:
        """Bytes to bytes."""
        return zipnn.ZipNN("BF16", threads).compress(self._copy)

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """Bytes to bytes."""
        return zipnn.ZipNN("BF16", threads).decompress(coded)


class Zstd(Contestant):
    """zstd level 1, one frame; its decoder has one thread."""

    name = "zstd -1"

    def encode(self, data: Bytes, threads: int) -> Any:
        """Bytes to one frame."""
        workers = threads if threads > 1 else 0
        return zstandard.ZstdCompressor(level=1, threads=workers).compress(data.data)

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """One frame to bytes."""
        return zstandard.ZstdDecompressor().decompress(coded)


class Copy(Contestant):
    """A copy of the same bytes: the limit."""

    def __init__(self, nbytes: int, *, reuse: bool) -> None:
        self.name = "memcpy, buffers reused" if reuse else "memcpy"
        self._there = np.zeros(nbytes, np.uint8) if reuse else None
        self._back = np.zeros(nbytes, np.uint8) if reuse else None

    @staticmethod
    def _copy(data: Bytes, out: Bytes | None, threads: int) -> Bytes:
        """Copy, each thread its part."""
        target = np.empty(data.size, np.uint8) if out is None else out
        step = -(-data.size // threads)
        if threads == 1:
            np.copyto(target, data)
            return target

        def part(at: int) -> None:
            np.copyto(target[at : at + step], data[at : at + step])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(0, data.size, step)))
        return target

    def encode(self, data: Bytes, threads: int) -> Any:
        """Copy there."""
        return self._copy(data, self._there, threads)

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """Copy back."""
        return self._copy(coded, self._back, threads)


def arithmetic(threads: int, rounds: int = 60_000) -> float:
    """Seconds that some arithmetic takes which needs no memory: how the processors alone scale."""
    part = partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", rounds // threads)
    with ThreadPoolExecutor(threads) as pool:
        return wall(lambda: list(pool.map(lambda _: part(), range(threads))))


Times = dict[tuple[str, int], Laps]
"""What each contestant took with each number of threads: laps `encode` and `decode`."""


def measure(
    contestants: Sequence[Contestant], data: Bytes, threads: Sequence[int], runs: int
) -> tuple[Times, dict[str, float], dict[str, str], dict[int, list[float]]]:
    """Run all in turns, once to warm up and `runs` times for the record; every result is compared.

    Returns what each took, its ratio or why it has none, and `arithmetic` in the same turns.
    """
    times: Times = {(c.name, count): Laps() for c in contestants for count in threads}
    ratios, problems = dict[str, float](), dict[str, str]()
    alone: dict[int, list[float]] = {count: [] for count in threads}
    for run in range(runs + 1):
        note(f"run {run} of {runs}" if run else "warm-up")
        for count in threads if run else ():
            alone[count].append(arithmetic(count))
        for contestant in (it for it in contestants if it.name not in problems):
            for count in threads:  # one after the other: a machine's speed changes
                laps = times[contestant.name, count]
                try:
                    contestant.prepare(data)
                    coded = laps("encode", partial(contestant.encode, data, count))
                    ratios[contestant.name] = data.size / len(coded)
                    plain = laps("decode", partial(contestant.decode, coded, data.size, count))
                except ImportError as error:
                    problems[contestant.name] = reason(error)
                    break
                if not np.array_equal(np.frombuffer(plain, np.uint8), data):
                    raise SystemExit(f"error: {contestant.name}, {count} threads: input not restored")
                del coded, plain
    for laps in times.values():
        laps.seconds = {way: them[1:] for way, them in laps.seconds.items()}  # one to warm up
    return times, ratios, problems, alone


def _ratios(slow: list[float] | None, fast: list[float]) -> tuple[float, float] | None:
    """The ratio of the medians, and the median of each turn's ratio, if both were measured."""
    if not slow:
        return None
    turns = [a / b for a, b in zip(slow, fast, strict=True)]
    return statistics.median(slow) / statistics.median(fast), statistics.median(turns)


def _shown(ratios: tuple[float, float] | None, form: str) -> str:
    return "" if ratios is None else form.format(*ratios)


def speeds(times: Times, sizes: dict[str, float], problems: dict[str, str], nbytes: int, page: Page) -> None:
    """A row for each contestant and number of threads."""
    rows = []
    for (name, count), laps in times.items():
        if name in problems:
            rows.append([name, str(count), problems[name], *[""] * 6])
            continue
        cells = [name, str(count), f"{sizes[name]:.4f}"]
        for way in ("encode", "decode"):
            rates = [nbytes / it / 1e9 for it in laps.seconds[way]]
            cells += [f"{nbytes / statistics.median(laps.seconds[way]) / 1e9:.3f}"]
            cells += [f"{min(rates):.2f}-{max(rates):.2f}"]
        for way, them in laps.seconds.items():
            cells.append(_shown(_ratios(times[ZIPNN, count].seconds.get(way), them), "{:.2f}"))
        rows.append(cells)
    columns = ["codec", "threads", "ratio", "encode GB/s", "range", "decode GB/s", "range"]
    page.table([*columns, "encode x ZipNN", "decode x ZipNN"], rows)


def scaling(times: Times, alone: dict[int, list[float]], low: int, high: int, page: Page) -> None:
    """How much faster more threads are."""
    page.say(f"Scaling from {low} to {high} threads, by medians (and by the median of turns):")
    form = "{:.2f} ({:.2f})"
    rows = [["arithmetic alone", *[_shown(_ratios(alone[low], alone[high]), form)] * 2]]
    for name in dict.fromkeys(name for name, _ in times):
        one, two = times[name, low].seconds, times[name, high].seconds
        rows.append(
            [name, *(_shown(_ratios(one.get(way), two.get(way, [])), form) for way in ("encode", "decode"))]
        )
    page.table(["codec", "encode", "decode"], rows)


def bars(times: Times, page: Page) -> None:
    """Hold our rows against the bars; those of the first count, a whole file in new memory."""
    rows = []
    ours = [name for name in dict.fromkeys(name for name, _ in times) if name.startswith("tpde")]
    for name in ours:
        for way in ("encode", "decode"):
            for (what, bar), (slow, fast) in zip(
                BARS.items(), (((ZIPNN, 1), (name, 1)), ((name, 1), (name, 2))), strict=True
            ):
                found = _ratios(times[slow].seconds.get(way), times[fast].seconds[way])
                met = found is not None and found[0] >= bar
                judged = page.judge(met, f"{way}, {what}") if name == ours[0] else verdict(met)
                cells = ["not measured", ""] if found is None else [f"{it:.2f}" for it in found]
                rows.append([name, way, what, *cells, f"{bar:.2f}", judged])
    page.say("Bars:")
    page.table(["codec", "way", "what", "found", "median of turns", "bar", ""], rows)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each, after one to warm up")
    parser.add_argument("--rows", type=int, default=8192, help="rows of 4096 weights (default 8192: 64 MiB)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])


def run(options: argparse.Namespace, page: Page) -> None:
    """Make the data, let all run in turns, compare."""
    note("making the data")
    import torch

    data = tensor_bytes(normal(options.seed, options.rows).to(torch.bfloat16)).copy()
    spec = TensorSpec("BF16", (options.rows, 4096))
    contestants: list[Contestant] = [
        Tpde(spec, reuse=False),
        ZipNN(),
        Zstd(),
        Copy(data.size, reuse=False),
        Tpde(spec, reuse=True),
        Core(spec),
        Copy(data.size, reuse=True),
    ]
    times, ratios, problems, alone = measure(contestants, data, options.threads, options.runs)
    page.say(
        f"Data: bf16, normal, per-row scale 0.02 * exp(0.3 * normal), {options.rows}x4096 "
        f"({data.size / 2**20:.0f} MiB), torch generator seed {options.seed}. Medians (and ranges) of "
        f"{options.runs} alternating runs after a warm-up. Every run's output was compared with the input, "
        "bit by bit. Where buffers are not reused, each run's output is new memory, whose page faults count, "
        "as with the peers' interfaces. zstd's decoder has one thread."
    )
    speeds(times, ratios, problems, data.size, page)
    if len(options.threads) > 1:
        scaling(times, alone, options.threads[0], options.threads[-1], page)
    if {1, 2} <= set(options.threads):
        bars(times, page)
    page.data = {f"{name}, {count}": laps.seconds for (name, count), laps in times.items()}
