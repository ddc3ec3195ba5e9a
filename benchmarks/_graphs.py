"""Timing what is launched, in CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable


def graph_of(run: Callable[[], None]) -> Callable[[], None]:
    """What replays what a function launches."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return graph.replay


def times(ways: list[Callable[[], None]], runs: int) -> list[float]:
    """Microseconds that each takes on the device."""
    import torch

    taken: list[list[float]] = [[] for _ in ways]
    for number in range(runs + 1):
        for way, found in zip(ways, taken, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            way()
            end.record()
            end.synchronize()
            if number:
                found.append(1e3 * start.elapsed_time(end))
    return [statistics.median(it) for it in taken]
