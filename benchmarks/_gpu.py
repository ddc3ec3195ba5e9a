"""What the GPU benchmarks share: packed blobs on the device, cold caches, peers that may be missing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from _machine import note

from tpde.codec.blob import BlobWriter
from tpde.codec.selection import plan_tensor, sample_ranges
from tpde.format.blob_header import BlobHeader, parse_blob_header
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

FLUSH_BYTES = 256 << 20


class Blob(NamedTuple):
    """A packed tensor on the host."""

    header: BlobHeader
    section: bytes  # its tables
    data: np.ndarray[Any, np.dtype[np.uint8]]


def pack(spec: TensorSpec, data: np.ndarray[Any, np.dtype[np.uint8]], codec: Any = "auto") -> Blob:
    """Pack a tensor as `tpde pack` does, with all threads."""
    sample = np.concatenate([data[begin:end] for begin, end in sample_ranges(spec)])
    plan = plan_tensor(spec, sample, codec)
    if plan is None:
        raise SystemExit(f"error: {spec} would stay plain")
    sink = BytesSink(spec.nbytes + (1 << 20))
    writer = BlobWriter(plan, sink, 0, len(os.sched_getaffinity(0)))
    writer.write(data)
    size = writer.finish(bytes(16))
    blob = np.frombuffer(bytes(sink.data[:size]), np.uint8)
    header = parse_blob_header(blob[:8192].tobytes(), blob.size)
    return Blob(header, blob[header.tables_at : header.index_at].tobytes(), blob)


def upload(data: np.ndarray[Any, Any]) -> Any:
    """Bytes on the device, at a multiple of 512; at least 16 of them, since nothing has no address."""
    import torch

    flat = np.zeros(max(data.nbytes, 16), np.uint8)
    flat[: data.nbytes] = data.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).cuda()


class Decoder:
    """Packed tensors on the device, decoded one behind the other into one buffer, in one launch.

    Parameters
    ----------
    blobs : sequence of Blob
        A blob that comes again gets memory of its own, so that no cache serves two.
    out : Tensor of uint8
        The buffer.
    check : bool
        Compare checksums.

    Attributes
    ----------
    blobs : list of Tensor
        The blobs' bytes on the device.
    """

    def __init__(self, blobs: Sequence[Blob], out: Any, *, check: bool = False) -> None:
        import torch

        from tpde.cuda.decode import WorkList
        from tpde.cuda.items import Item, lookup_tables

        self._out, self._check = out, check
        tables, images, items = {}, {}, []
        self.blobs, at = list[Any](), 0
        for blob in blobs:
            key = id(blob)
            if key not in tables:
                tables[key] = lookup_tables(blob.header, blob.section)
                assert tables[key] is not None
                images[key] = upload(tables[key].image)
            self.blobs.append(upload(blob.data))
            items.append(
                Item(blob.header, tables[key], self.blobs[-1].data_ptr(), images[key].data_ptr(), at)
            )
            at += blob.header.spec.nbytes
        self._images = images
        self._work = WorkList(items, torch.cuda.current_device())
        self._work.prepare()
        self._descriptors = upload(self._work.descriptors)
        self.status = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.stored = sum(blob.header.blob_bytes for blob in blobs)

    def __call__(self) -> Any:
        """Launch on torch's current stream."""
        import torch

        self._work.launch(
            self._descriptors.data_ptr(),
            self.status.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
            self._out.data_ptr(),
            self._check,
        )
        return self._out


class Contestant(Protocol):
    """A way to get bytes on the device; returns the tensor that holds them. `stored`: what it read."""

    stored: int

    def __call__(self) -> Any:
        """Enqueue the work on torch's current stream."""


class Flush:
    """256 MiB written between runs, so that each finds the cache cold."""

    def __init__(self, nbytes: int = FLUSH_BYTES) -> None:
        import torch

        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        """Enqueue the writes; four times, so that the host is ahead of the device when timing starts."""
        for value in range(4):
            self._buffer.fill_(value)


def seconds(work: Callable[[], Any], flush: Flush) -> float:
    """What some work takes on the device, from a cold cache."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


@dataclass
class Result:
    """What a contestant reached: seconds of each run and the bytes it stored, or why there are none."""

    times: list[float] = field(default_factory=list)
    stored: int = 0
    problem: str = ""

    @property
    def median(self) -> float:
        """Median of the runs in seconds."""
        return statistics.median(self.times)


def reason(error: BaseException) -> str:
    """One line that says why a peer has no row."""
    if isinstance(error, ImportError):
        return "not installed"
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:120]


@contextmanager
def attempt(results: dict[str, Result], name: str) -> Iterator[None]:
    """Whatever a peer raises becomes its row."""
    try:
        yield
    except (Exception, SystemExit) as error:
        results.setdefault(name, Result()).problem = reason(error)
        note(f"{name}: {reason(error)}")


def same_bits(found: Any, source: Any) -> bool:
    """Whether two tensors on the device hold the same bytes."""
    import torch

    def flat(tensor: Any) -> Any:
        return tensor.reshape(-1).view(torch.uint8)

    a, b, step = flat(found), flat(source), 1 << 28
    if a.numel() != b.numel():
        return False
    return all(torch.equal(a[at : at + step], b[at : at + step]) for at in range(0, a.numel(), step))


def race(
    makers: dict[str, Callable[[], Contestant]], source: Any, out: Any, runs: int, flush: Flush
) -> dict[str, Result]:
    """Check every contestant's result by bits, then time them in turns."""
    import torch

    results: dict[str, Result] = {}
    ready: dict[str, Contestant] = {}
    for name, make in makers.items():
        with attempt(results, name):
            contestant = make()
            if out is not None:
                out.fill_(0xA5)
            found = contestant()
            torch.cuda.synchronize()
            if not same_bits(found, source):
                raise ValueError("WRONG BITS")
            ready[name] = contestant
            results[name] = Result(stored=contestant.stored)
    for run in range(runs + 2):
        for name, contestant in list(ready.items()):
            with attempt(results, name):
                took = seconds(contestant, flush)
                if run >= 2:  # two to warm up
                    results[name].times.append(took)
            if results[name].problem:
                del ready[name]
    return {name: results[name] for name in makers}


def need_cuda() -> None:
    """End with a message if there is no GPU."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"error: torch is missing ({error})\nhint: pip install 'tpde[cuda]'") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device\nhint: run this on a machine with an NVIDIA GPU")
