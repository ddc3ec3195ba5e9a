"""Deltas of a model's weights on a GPU: made from two states there, and applied to live ones.

bf16 weights of the 8 B Llama shape whose fp32 masters move by 3.2e-7 each, as a step of Adam at a small
learning rate moves them, so that some 0.7 % of the weights change. Compared with a 32-bit index and the new
word for each change, as verl and vLLM ship it, computed by PyTorch on the GPU. All start and end with bytes
on the host. Times are from the call to the end of all work on the device, by the host's clock; rates are in
bytes of the model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import tpde
from benchmarks.harness.gpu import wait
from benchmarks.harness.report import Page, note

TITLE, NEEDS_GPU = "Deltas on a GPU", True
HIDDEN, MIDDLE, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
STEP = 3.2e-7  # of an update, where the weights' deviation is 0.02
BARS = {"make": 300, "apply": 600}  # GB/s


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights of the model, by name."""
    block = {
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (KEYS, HIDDEN),
        "v_proj": (KEYS, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (MIDDLE, HIDDEN),
        "up_proj": (MIDDLE, HIDDEN),
        "down_proj": (HIDDEN, MIDDLE),
        "input_norm": (HIDDEN,),
        "post_norm": (HIDDEN,),
    }
    for layer in range(layers):
        yield from ((f"layers.{layer}.{name}", shape) for name, shape in block.items())
    yield from (("embed_tokens", (VOCABULARY, HIDDEN)), ("lm_head", (VOCABULARY, HIDDEN)))


def states(layers: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights before and after a step."""
    import torch

    draw = torch.Generator("cuda").manual_seed(seed)
    old, new = {}, {}
    for name, shape in shapes(layers):
        scale = torch.exp(
            0.3 * torch.randn((shape[0], *[1] * (len(shape) - 1)), device="cuda", generator=draw)
        )
        weight = (torch.randn(shape, device="cuda", generator=draw) * 0.02 * scale).bfloat16()
        # Masters lie anywhere between the words that they are rounded from.
        apart = torch.rand(shape, device="cuda", generator=draw) - 0.5
        master = weight.float() * (1 + apart * 2**-8 * 0.98)
        step = STEP * torch.sign(torch.randn(shape, device="cuda", generator=draw))
        old[name], new[name] = master.bfloat16(), (master + step).bfloat16()
    return old, new


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states have the same bits."""
    import torch

    words = torch.int16
    return all(torch.equal(one[name].view(words), other[name].view(words)) for name in one)


def index_and_value(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The peer: where words differ, and what they become, on the host."""
    import torch

    found = {}
    for name, before in old.items():
        words, now = before.view(torch.int16).view(-1), new[name].view(torch.int16).view(-1)
        at = (words != now).nonzero().view(-1)
        found[name] = at.int().cpu(), now[at].cpu()
    return found


def put(live: dict[str, Any], found: dict[str, Any]) -> None:
    """The peer's update."""
    import torch

    for name, (at, words) in found.items():
        live[name].view(torch.int16).view(-1)[at.cuda().long()] = words.cuda()


def taken(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call and of what it started on the device, and what it returned."""
    wait()
    start = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - start, result


class Way(NamedTuple):
    """How a delta is made, applied to live weights, and how many bytes it has."""

    make: Callable[[], Any]
    apply: Callable[[Any], Any]
    size: Callable[[Any], int] = len


def ways(old: dict[str, Any], new: dict[str, Any], live: dict[str, Any]) -> dict[str, Way]:
    """Ours and the peer."""

    def apply(made: Any) -> None:
        tpde.apply_delta(live, made)

    def apply_unchecked(made: Any) -> None:
        tpde.apply_delta(live, made, check="changed")

    def make_fast() -> Any:
        return tpde.make_delta(old, new, fast=True)

    return {
        "tpde": Way(lambda: tpde.make_delta(old, new), apply),
        "tpde, fast": Way(make_fast, apply),
        'tpde, fast, check="changed"': Way(make_fast, apply_unchecked),
        "index and value": Way(
            lambda: index_and_value(old, new),
            lambda made: put(live, made),
            lambda made: sum(at.nbytes + words.nbytes for at, words in made.values()),
        ),
    }


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each, after two to warm up")


def run(options: argparse.Namespace, page: Page) -> None:
    """Make and apply in turns."""
    import torch

    note("making the states")
    old, new = states(options.layers, options.seed)
    total = sum(it.nbytes for it in old.values())
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old)
    live = {name: it.clone() for name, it in old.items()}
    every = ways(old, new, live)
    times: dict[tuple[str, str], list[float]] = {}
    sizes, right = {}, True
    for number in range(options.runs + 2):
        for name, (make, apply, size) in every.items():
            seconds, made = taken(make)
            found = {"make": seconds}
            for tensor, before in old.items():
                live[tensor].copy_(before)
            found["apply"], _ = taken(partial(apply, made))
            right &= same(live, new)
            sizes[name] = size(made)
            for what, seconds in found.items():
                if number >= 2:
                    times.setdefault((name, what), []).append(seconds)
    copied = [taken(lambda: [live[name].copy_(it) for name, it in old.items()])[0] for _ in range(5)]
    page.judge(right, "bits")
    rows = []
    for name in every:
        cells = [name, f"{sizes[name] / 1e6:.1f}", f"{8 * sizes[name] / changed:.2f}"]
        for what, bar in BARS.items():
            rates = [total / it / 1e9 for it in times[name, what]]
            cells += [f"{statistics.median(rates):.0f}", f"{min(rates):.0f} to {max(rates):.0f}"]
            if name == "tpde":
                cells[-2] += f" (bar {bar}: {page.judge(statistics.median(rates) >= bar, what)})"
        rows.append(cells)
    page.say(
        f"{total / 1e9:.2f} GB of bf16 in {len(old)} tensors, {100 * changed * 2 / total:.2f} % of the words "
        f"changed. Medians of {options.runs} alternating runs after two to warm up. Bits: "
        f"{'equal' if right else 'WRONG'}. A copy of all weights on the device takes "
        f"{statistics.median(copied) * 1e3:.1f} ms, {2 * total / statistics.median(copied) / 1e12:.2f} TB/s "
        "read and written; making reads both states twice, applying the weights twice."
    )
    page.table(["", "MB", "bits a change", "make, GB/s", "", "apply, GB/s", ""], rows)
