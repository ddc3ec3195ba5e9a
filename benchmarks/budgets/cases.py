"""What models are run with in `budgets`, what they give as whole numbers, and where that differs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.shapes import Shape, forward_inputs, prompts

NEW = 8  # tokens that are generated
BATCHES = (1, 8)


def device_of(given: dict[str, Any]) -> str:
    """Where models run."""
    return str(given["device"])


class Recorder:
    """Keeps the scores from which `generate` chooses, on the host."""

    def __init__(self) -> None:
        self.scores: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """As a processor of logits: changes nothing."""
        self.scores.append(scores.cpu())
        return scores


def words(tensor: Any) -> Any:
    """The bits of a tensor as whole numbers, on the host."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    here = tensor.detach().cpu().contiguous()  # in this order: nothing is copied on the device
    return here.view(kinds[here.element_size()]).numpy()


def inputs_of(given: dict[str, Any], shape: Shape, case: str, batch: int) -> dict[str, Any]:
    """The same for everyone, on the device."""
    import torch

    draw = torch.Generator().manual_seed(given["seed"] + batch)

    def numbers(below: int, size: tuple[int, ...]) -> Any:
        return torch.randint(3, below, size, generator=draw)

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=draw).bfloat16()

    if case == "forward":
        made = forward_inputs(shape, given["tiny"], batch, numbers, normal)
    else:
        made = prompts(shape, given["tiny"], batch, NEW, numbers, normal)
    where = device_of(given)
    return {key: it.to(where) if isinstance(it, torch.Tensor) else it for key, it in made.items()}


def cases(shape: Shape) -> Iterator[tuple[str, int]]:
    """What is run, in this order, in one process: what comes first leaves holes for what comes next."""
    for case in ("forward",) if shape.inputs == "image" else ("forward", "generate"):
        for batch in BATCHES:
            yield case, batch


def perform_case(model: Any, shape: Shape, case: str, took: dict[str, Any]) -> list[Any]:
    """What a model gives, as whole numbers: logits, or tokens and the scores that they were chosen by."""
    import torch
    from transformers import LogitsProcessorList

    with torch.no_grad():
        if case == "forward":
            made = model(**took)
            return [words(made[0] if shape.inputs == "image" else made.logits)]
        kept = Recorder()
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        made = model.generate(**took, **options, logits_processor=LogitsProcessorList([kept]))
        return [words(made), *(words(it) for it in kept.scores)]


def saved(given: dict[str, Any], case: str, batch: int) -> Path:
    """Where what the plain model gives is kept."""
    return Path(given["dir"]) / f"{case}-{batch}"


def unsure(results: list[Any], again: Callable[[], list[Any]]) -> str:
    """Where the plain model differs from itself in two more runs; nothing if it does not."""
    return next(filter(None, (difference(results, again()) for _ in range(2))), "")


def difference(expected_all: list[Any], found: list[Any]) -> str:
    """Where something differs from what was expected; nothing if it does not."""
    if len(expected_all) != len(found):
        return f"{len(found)} results, expected {len(expected_all)}"
    for number, (expected, here) in enumerate(zip(expected_all, found, strict=True)):
        if expected.shape != here.shape:
            return f"result {number} has shape {here.shape}, plain {expected.shape}"
        differs = here != expected
        if differs.any():
            at = np.unravel_index(int(differs.argmax()), here.shape)
            rows = len(np.unique(np.nonzero(differs)[0]))
            return (
                f"result {number}: {int(differs.sum())} of {here.size} differ, in {rows} of {len(here)} "
                f"sequences, first {[*map(int, at)]}"
            )
    return ""


@contextmanager
def peak_of(given: dict[str, Any], found: dict[str, Any]) -> Iterator[None]:
    """Note what PyTorch allocates inside at most, beyond what it has, as `took`, in bytes."""
    import torch

    if device_of(given) == "cpu":
        yield
        return
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        found["took"] = torch.cuda.max_memory_allocated() - before
