"""Encode and decode speed in memory against ZipNN, zstd and a plain copy, in one process and one run.

    python benchmarks/codec.py [--out FILE.md]

Ours is everything that a file costs: sample, plan, tables, chunks, index map, checksums and hash, from the
tensor's bytes to the packed file's, and back through the reader. GB/s count bytes of the original, 10^9 each.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import zstandard
from _data import normal, tensor_bytes
from _machine import arguments, emit, header, note, table

from tpde.codec import prefix_codes
from tpde.codec.native import Bytes
from tpde.codec.selection import core_layout, plan_tensor, sample_ranges
from tpde.files.reader import PackedFile
from tpde.files.writer import PackedWriter
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink


class Contestant(Protocol):
    """One way to make bytes smaller. `prepare` runs outside the timed region, right before `encode`."""

    name: str

    def prepare(self, data: Bytes) -> None:
        """Make what `encode` may consume."""

    def encode(self, data: Bytes, threads: int) -> Any:
        """Return the coded bytes."""

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """Return the original's bytes."""


class Tpde:
    """What `tpde.torch.save`, `tpde.numpy.save` and `load` do; `reuse` takes buffers made beforehand."""

    def __init__(self, spec: TensorSpec, *, reuse: bool) -> None:
        self.name = "tpde, buffers reused" if reuse else "tpde"
        self._spec, self._reuse = spec, reuse
        self._buffer = np.zeros(spec.nbytes + (1 << 20), np.uint8) if reuse else None
        self._out = np.zeros(spec.nbytes, np.uint8) if reuse else None

    def prepare(self, data: Bytes) -> None:
        """Nothing: the input is only read."""

    def encode(self, data: Bytes, threads: int) -> Any:
        """Tensor bytes to the bytes of a packed file."""
        sink = BytesSink(self._spec.nbytes + (1 << 20), self._buffer)
        with PackedWriter(sink, {"weight": self._spec}, threads=threads) as writer:
            writer.write("weight", data)
        return sink.data

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """A packed file's bytes to the tensor's, every chunk's checksum checked."""
        if self._out is None:
            return PackedFile(coded).read("weight", threads)
        PackedFile(coded).tensor("weight").read(0, nbytes, self._out, threads)
        return self._out


class Core:
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

    def prepare(self, data: Bytes) -> None:
        """Nothing: the input is only read."""

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


class ZipNN:
    """ZipNN's own defaults. It changes its input in place, so each run gets a copy of its own."""

    def __init__(self) -> None:
        self.name = "ZipNN"
        self._copy = bytearray()

    def prepare(self, data: Bytes) -> None:
        """Copy the input."""
        self._copy = bytearray(data)

    def encode(self, data: Bytes, threads: int) -> Any:
        """Bytes to bytes."""
        import zipnn

        return zipnn.ZipNN(bytearray_dtype="bfloat16", threads=threads).compress(self._copy)

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """Bytes to bytes."""
        import zipnn

        return zipnn.ZipNN(bytearray_dtype="bfloat16", threads=threads).decompress(coded)


class Zstd:
    """zstd level 1, one frame; its decoder has one thread."""

    name = "zstd -1"

    def prepare(self, data: Bytes) -> None:
        """Nothing: the input is only read."""

    def encode(self, data: Bytes, threads: int) -> Any:
        """Bytes to one frame."""
        workers = threads if threads > 1 else 0
        return zstandard.ZstdCompressor(level=1, threads=workers).compress(data.data)

    def decode(self, coded: Any, nbytes: int, threads: int) -> Any:
        """One frame to bytes."""
        return zstandard.ZstdDecompressor().decompress(coded)


class Copy:
    """A copy of the same bytes: the limit."""

    def __init__(self, nbytes: int, *, reuse: bool) -> None:
        self.name = "memcpy, buffers reused" if reuse else "memcpy"
        self._there = np.zeros(nbytes, np.uint8) if reuse else None
        self._back = np.zeros(nbytes, np.uint8) if reuse else None

    def prepare(self, data: Bytes) -> None:
        """Nothing: the input is only read."""

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
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        for part in [
            pool.submit(hashlib.pbkdf2_hmac, "sha256", b"", b"", rounds // threads) for _ in range(threads)
        ]:
            part.result()
        return time.perf_counter() - start


@dataclass
class Times:
    """What one contestant took with one number of threads, in seconds."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    size: int = 0


def _timed(call: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(*given)
    return time.perf_counter() - start, result


def measure(
    contestants: Sequence[Contestant], data: Bytes, threads: Sequence[int], runs: int
) -> tuple[dict[tuple[str, int], Times], dict[int, list[float]]]:
    """Run all in turns, once to warm up and `runs` times for the record; every result is compared.

    Returns what each took, and `arithmetic` in the same turns.
    """
    times = {(c.name, t): Times() for t in threads for c in contestants}
    alone: dict[int, list[float]] = {count: [] for count in threads}
    for run in range(runs + 1):
        note(f"run {run} of {runs}" if run else "warm-up")
        for count in threads if run else ():
            alone[count].append(arithmetic(count))
        for contestant in contestants:
            for count in threads:  # one after the other: a machine's speed changes
                contestant.prepare(data)
                took_encode, coded = _timed(contestant.encode, data, count)
                size = len(coded)
                took_decode, plain = _timed(contestant.decode, coded, data.size, count)
                if not np.array_equal(np.frombuffer(plain, np.uint8), data):
                    raise SystemExit(f"error: {contestant.name}, {count} threads: input not restored")
                if run:
                    record = times[contestant.name, count]
                    record.encode.append(took_encode)
                    record.decode.append(took_decode)
                    record.size = size
                del coded, plain
    return times, alone


def _speed(nbytes: int, seconds: list[float]) -> float:
    return nbytes / statistics.median(seconds) / 1e9


def _with_range(nbytes: int, seconds: list[float]) -> list[str]:
    low, high = nbytes / max(seconds) / 1e9, nbytes / min(seconds) / 1e9
    return [f"{_speed(nbytes, seconds):.3f}", f"{low:.2f}-{high:.2f}"]


def report(
    times: dict[tuple[str, int], Times], alone: dict[int, list[float]], nbytes: int, threads: Sequence[int]
) -> str:
    """The tables."""
    rows = []
    for (name, count), record in times.items():
        peer = times["ZipNN", count]
        multiples = [
            f"{statistics.median(peer.encode) / statistics.median(record.encode):.2f}",
            f"{statistics.median(peer.decode) / statistics.median(record.decode):.2f}",
        ]
        rows.append(
            [
                name,
                str(count),
                f"{nbytes / record.size:.4f}",
                *_with_range(nbytes, record.encode),
                *_with_range(nbytes, record.decode),
                *multiples,
            ]
        )
    columns = ["codec", "threads", "ratio", "encode GB/s", "range", "decode GB/s", "range"]
    text = table([*columns, "encode x ZipNN", "decode x ZipNN"], rows)
    if len(threads) > 1:
        low, high = threads[0], threads[-1]
        alike = "{:.2f} ({:.2f})".format(*_ratios(alone[low], alone[high]))
        rows = [["arithmetic alone", alike, alike]]
        for name in dict.fromkeys(name for name, _ in times):
            one, two = times[name, low], times[name, high]
            ways = [_ratios(one.encode, two.encode), _ratios(one.decode, two.decode)]
            rows.append([name, *("{:.2f} ({:.2f})".format(*it) for it in ways)])
        text += f"\nScaling from {low} to {high} threads, by medians (and by the median of turns):\n\n"
        text += table(["codec", "encode", "decode"], rows)
    return text


def bars(times: dict[tuple[str, int], Times]) -> tuple[str, bool]:
    """Hold our rows against the bars; tells too whether the first, a whole file in new memory, meets all."""
    rows, met = [], True
    ours = [name for name in dict.fromkeys(name for name, _ in times) if name.startswith("tpde")]
    for name in ours:
        for way in ("encode", "decode"):
            found = {
                "one thread, x ZipNN": (times["ZipNN", 1], times[name, 1], 3.0),
                "two threads, x one": (times[name, 1], times[name, 2], 1.7),
            }
            for what, (slow, fast, bar) in found.items():
                value, by_turns = _ratios(getattr(slow, way), getattr(fast, way))
                judged = "pass" if value >= bar else "FAIL"
                rows.append([name, way, what, f"{value:.2f}", f"{by_turns:.2f}", f"{bar:.2f}", judged])
                met = met and (value >= bar or name != ours[0])
    return table(["codec", "way", "what", "found", "median of turns", "bar", ""], rows), met


def _ratios(slow: list[float], fast: list[float]) -> tuple[float, float]:
    """The ratio of the medians, and the median of each turn's ratio."""
    turns = [a / b for a, b in zip(slow, fast, strict=True)]
    return statistics.median(slow) / statistics.median(fast), statistics.median(turns)


def main() -> int:
    """Parse the command line, run, print."""
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each, after one to warm up")
    parser.add_argument("--rows", type=int, default=8192, help="rows of 4096 weights (default 8192: 64 MiB)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    head = header("Codec: speed in memory")
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
    times, alone = measure(contestants, data, options.threads, options.runs)
    about = (
        f"Data: bf16, normal, per-row scale 0.02 * exp(0.3 * normal), {options.rows}x4096 "
        f"({data.size / 2**20:.0f} MiB), torch generator seed {options.seed}. Medians (and ranges) of "
        f"{options.runs} alternating runs after a warm-up. Every run's output was compared with the input, "
        "bit by bit. Where buffers are not reused, each run's output is new memory, whose page faults count, "
        "as with the peers' interfaces. zstd's decoder has one thread.\n"
    )
    text, met = report(times, alone, data.size, options.threads), True
    if {1, 2} <= set(options.threads):
        verdict, met = bars(times)
        text += f"\nBars:\n\n{verdict}"
    emit(f"{head}\n{about}\n{text}", options.out)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
