"""Texts that a transformers model reads in whole windows, its linear layers a few rows at a time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.harness.report import note

GROUP = 16  # windows of a batch
PROGRESS = 64  # groups


class Reader(NamedTuple):
    """A model, and how many rows its linear layers multiply at a time; None for all of a batch."""

    model: Any
    rows: int | None = None


@contextlib.contextmanager
def in_parts(model: Any, rows: int | None) -> Iterator[None]:
    """Have linear layers multiply so many rows at a time."""
    import torch

    def parts(forward: Callable[[Any], Any], x: Any) -> Any:
        made = [forward(it) for it in x.reshape(-1, x.shape[-1]).split(rows)]
        return torch.cat(made).view(*x.shape[:-1], -1)

    layers: list[Any] = [it for it in model.modules() if rows and isinstance(it, torch.nn.Linear)]
    for it in layers:
        it.forward = functools.partial(parts, it.forward)
    try:
        yield
    finally:
        for it in layers:
            del it.forward


def read(reader: Reader, windows: Any) -> Any:
    """Logits of a batch of windows."""
    with in_parts(reader.model, reader.rows):
        return reader.model(
            input_ids=windows, use_cache=True
        ).logits  # without a cache, masks wait for the GPU


def recorded(reader: Reader, like: Any) -> Callable[[Any], Any]:
    """What reads batches like this one, on a GPU by a CUDA graph: launches would take the host longer."""
    import torch

    if not like.is_cuda:
        return functools.partial(read, reader)
    given, graph = like.clone(), torch.cuda.CUDAGraph()
    read(reader, given)
    with torch.cuda.graph(graph):
        made = read(reader, given)

    def replay(windows: Any) -> Any:
        if windows.shape != given.shape:
            return read(reader, windows)
        given.copy_(windows)
        graph.replay()
        return made

    return replay


def log_sums(logits: Any, targets: Any) -> Any:
    """Sums of the logarithms of tokens' probabilities, in float64, one for each window."""
    import torch

    logs = torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])
    return logs.double().sum((-2, -1))


def sums_of(readers: Mapping[str, Reader], windows: Any, device: str, seconds: float) -> dict[str, Any]:
    """What `log_sums` says of windows, all but the first token of each: of those that there is time for."""
    import torch

    found: dict[str, list[Any]] = {name: [] for name in readers}
    with torch.inference_mode():
        batches = windows.split(GROUP)
        ways = {name: recorded(it, batches[0][:, :-1].to(device)) for name, it in readers.items()}
        end = time.monotonic() + seconds
        for number, batch in enumerate(batches):
            there = batch.to(device)
            for name, way in ways.items():
                found[name].append(log_sums(way(there[:, :-1]), there[:, 1:]))
            if number % PROGRESS == 0:
                note(f"{number * GROUP} of {len(windows)} windows, for perplexities")
                for it in found.values():
                    it[-1].cpu()  # waits for what was launched
                if time.monotonic() > end:
                    break
        return {name: torch.cat(it).cpu() for name, it in found.items()}
