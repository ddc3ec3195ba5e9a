"""GPUs: whether there is one, cold caches, copies, and contestants that decode on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from benchmarks.harness.processes import reason
from benchmarks.harness.report import note
from benchmarks.harness.timing import on_device, to_the_end

FLUSH_BYTES = 256 << 20
COPY_BYTES = 256 << 20


def need_cuda() -> None:
    """End with a message if there is no GPU."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"error: torch is missing ({error})\nhint: pip install 'tpde[cuda]'") from None
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device\nhint: run this on a machine with an NVIDIA GPU")


def device() -> str:
    """Where models run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Until the device has done all."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def give_back() -> None:
    """Let the driver have what PyTorch keeps of the card."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def stream() -> int:
    """The current stream's handle."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def copy_rate() -> float:
    """Bytes a second from memory of `cuMemHostAlloc` to the device: copies of 256 MiB, median of 8."""
    import torch
    from cuda.bindings import driver

    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    code, source = driver.cuMemHostAlloc(COPY_BYTES, 0)  # not torch's: its allocator would keep the memory
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"256 MiB of host memory could not be locked: {code}")
    send = partial(driver.cuMemcpyHtoDAsync, target.data_ptr(), source, COPY_BYTES, stream())
    took = [on_device(send) for _ in range(10)]
    driver.cuMemFreeHost(source)
    del target
    torch.cuda.empty_cache()
    return COPY_BYTES / statistics.median(took[2:])


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

    def cold(self, work: Callable[[], Any]) -> float:
        """Seconds that some work takes on the device from a cold cache."""
        return on_device(work, self)

    def whole(self, work: Callable[[], Any]) -> float:
        """Seconds of all of it by the host's clock, from a cold cache."""
        self()
        return to_the_end(work)


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
                took = flush.cold(contestant)
                if run >= 2:  # two to warm up
                    results[name].times.append(took)
            if results[name].problem:
                del ready[name]
    return {name: results[name] for name in makers}


def graph_of(run: Callable[[], None]) -> Callable[[], None]:
    """What replays what a function launches."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph.replay
