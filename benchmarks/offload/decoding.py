"""Decoding with a model, timed on processors that nobody else slows down, and logits as bits."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.llama import prompt
from benchmarks.harness.gpu import device, wait
from benchmarks.harness.quiet import PATIENCE, quiet, settle
from benchmarks.harness.timing import to_the_end

WARM = 2  # tokens before those that are timed
TIMED_SECONDS, BESIDE_SECONDS = 2.0, 0.3
AGAIN_SECONDS = 4.0  # more, where others slow the processor down; after that, all counts


def forward(model: Any, ids: Any, cache: Any) -> Any:
    """Logits of the last token."""
    return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def generate(model: Any, warm: int, count: int, keep: list[Any] | None = None) -> tuple[float, list[int]]:
    """Greedy decoding of a prompt; seconds a token of the last `count`, and the tokens.

    The prompt's forward pass comes first, then `warm` that are not timed. Logits are appended to `keep`.
    """
    import torch
    from transformers import DynamicCache

    cache, ids = DynamicCache(config=model.config), prompt(model.config.vocab_size)
    made, start = [], time.perf_counter()
    with torch.no_grad():
        for step in range(1 + warm + count):
            if step == 1 + warm:
                wait()
                start = time.perf_counter()
            logits = forward(model, ids, cache)
            if keep is not None:
                keep.append(logits.reshape(-1).view(torch.int16).cpu().numpy())
            ids = logits[:, -1].argmax(-1, keepdim=True)
            made.append(ids)
        wait()
        took = (time.perf_counter() - start) / max(count, 1)
        return took, torch.cat(made, 1)[0].tolist()


def timed(model: Any, count: int) -> dict[str, Any]:
    """Seconds a token: the median of as many runs as begin in two seconds; and how many do not count.

    These are the runs after which the processor is slowed down by others.
    """
    took: list[float] = []
    lost: list[float] = []
    end = time.perf_counter() + TIMED_SECONDS + AGAIN_SECONDS
    while sum(took) * count < TIMED_SECONDS:
        settle(max(min(PATIENCE, end - time.perf_counter()), 0.0))
        seconds = generate(model, WARM, count)[0]
        (took if quiet() or time.perf_counter() > end else lost).append(seconds)
    return {"token_s": statistics.median(took), "runs": len(took), "lost": len(lost)}


def one_token(model: Any) -> float:
    """Seconds of one token after a prompt."""
    settle()
    return generate(model, 0, 1)[0]


def call_seconds() -> float:
    """Seconds of the host for a call of a module: what `tpde plan` measures, for a shorter time."""
    import torch

    from tpde.streaming.rates import launch_seconds

    settle()
    return launch_seconds(torch.device(device()), BESIDE_SECONDS)


def prefill(model: Any, length: int, runs: int) -> float:
    """Seconds of one forward pass over a long prompt."""
    import torch
    from transformers import DynamicCache

    ids, took = prompt(model.config.vocab_size, length), []
    with torch.no_grad():
        for _ in range(runs + 1):
            cache = DynamicCache(config=model.config)
            settle()
            took.append(to_the_end(partial(forward, model, ids, cache)))
    return statistics.median(took[1:])


def difference(found: list[Any], path: Path) -> str:
    """Where logits differ from those saved, as bits; nothing if they don't."""
    expected = np.load(path)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        places = np.flatnonzero(a != b)
        if places.size:
            at = places[0]
            return (
                f"step {step}: {places.size} of {a.size} differ, first {at}: "
                f"{int(a[at]) & 0xFFFF:#06x}, plain {int(b[at]) & 0xFFFF:#06x}"
            )
    return ""
