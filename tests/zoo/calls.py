"""Random calls of packed layers, bit by bit against the plain ones: `python -m tests.zoo.calls`.

A call draws the kind of layer, its shape, bias, `requires_grad`, the batch and the strides of what it is
called with, and how gradients are recorded. Where two plain runs differ, the call proves nothing.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tpde
from tpde.nn import PackedParameter

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
WIDTHS = [8, 24, 64, 96, 100, 128, 257, 384, 512, 1000]


def _strided(draw: random.Random, x: Any, whole: Any) -> Any:
    """One of the ways in which a tensor of three dimensions comes to a layer."""
    ways: list[Callable[[], Any]] = [
        lambda: x,
        lambda: x[:, -1:, :],
        lambda: x[:, ::2, :],
        lambda: x.transpose(0, 1),
        lambda: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda: whole[..., 3 : 3 + x.shape[-1]],
        lambda: x[0],
        lambda: x[:1].expand(3, -1, -1),
        lambda: x[0, 0],
        lambda: x[:0],
        lambda: x.unsqueeze(1),
    ]
    return draw.choice(ways)()


def _linear(draw: random.Random, device: str, dtype: Any) -> tuple[nn.Module, Any]:
    inner, outer = draw.choice(WIDTHS), draw.choice(WIDTHS)
    layer = nn.Linear(inner, outer, bias=draw.random() < 0.5, device=device, dtype=dtype)
    batch, length = draw.choice([1, 2, 3, 4, 7, 8, 16, 32]), draw.choice([1, 2, 5, 9, 16])
    whole = torch.randn(batch, length, inner + 6, device=device).to(dtype)
    return layer, _strided(draw, whole[..., :inner].contiguous(), whole)


def _embedding(draw: random.Random, device: str, dtype: Any) -> tuple[nn.Module, Any]:
    rows = draw.choice([30, 100, 513])
    padding = draw.choice([None, 0])
    layer = nn.Embedding(rows, draw.choice(WIDTHS), padding_idx=padding, device=device, dtype=dtype)
    ids = torch.randint(0, rows, (draw.choice([1, 2, 5]), draw.choice([1, 4, 9])), device=device)
    return layer, draw.choice([ids, ids.t(), ids[:, ::2], ids.int(), ids[0]])


def _convolution(draw: random.Random, device: str, dtype: Any) -> tuple[nn.Module, Any]:
    dims = draw.choice([1, 2, 3])
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    groups = draw.choice([1, 1, 2, 4])
    channels = [groups * draw.choice([4, 8, 12]) for _ in range(2)]
    size, kernel = draw.choice([9, 12, 15]), draw.choice([1, 3])  # more than any kernel, cut in halves, too
    layer = kind(
        *channels,
        kernel,
        stride=draw.choice([1, 2]),
        padding=draw.choice([0, 1]),
        dilation=draw.choice([1, 1, 2]),
        groups=groups,
        bias=draw.random() < 0.5,
        device=device,
        dtype=dtype,
    )
    x = torch.randn(draw.choice([1, 2, 4]), channels[0], *[size] * dims, device=device).to(dtype)
    if draw.random() < 0.3:
        x = x.transpose(-1, -2) if dims > 1 else x[..., ::2]
    if dims == 2 and draw.random() < 0.3:
        x = x.to(memory_format=torch.channels_last)
    return layer, x


KINDS = {"linear": _linear, "embedding": _embedding, "convolution": _convolution}


def _run(layer: nn.Module, x: Any, mode: str) -> list[Any]:
    """The output of a call, what it says of gradients, and the input's gradient."""
    if mode == "inference":
        with torch.inference_mode():
            return [layer(x)]
    if mode == "no_grad":
        with torch.no_grad():
            return [layer(x)]
    took = x.detach()
    if mode == "input" and took.is_floating_point():
        took = took.requires_grad_()
    y = layer(took)
    if not y.requires_grad:
        return [y]
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, device=y.device).to(y.dtype))
    # Of a packed weight, no gradient is computed.
    found = [y.detach(), took.grad, *(it.grad for name, it in layer.named_parameters() if name != "weight")]
    layer.zero_grad()
    return [it for it in found if it is not None]


def _same(a: list[Any], b: list[Any]) -> bool:
    def words(it: Any) -> Any:
        return it.contiguous().view(WORDS[it.dtype]) if it.dtype in WORDS else it

    return len(a) == len(b) and all(torch.equal(words(x), words(y)) for x, y in zip(a, b, strict=True))


def call(kind: str, dtype: str, device: str, seed: int) -> str:
    """Make one call; gives what came of it: `same`, `differs`, `plain` or `unpacked`."""
    draw = random.Random(f"{kind} {dtype} {seed}")
    torch.manual_seed(seed)
    plain, x = KINDS[kind](draw, device, DTYPES[dtype])
    for parameter in plain.parameters():
        parameter.data.mul_(0.1)
    plain.requires_grad_(draw.random() < 0.5)
    ours = tpde.pack_module(copy.deepcopy(plain), min_bytes=0)
    if not any(isinstance(it, PackedParameter) for it in ours.parameters()):
        return "unpacked"  # too small to shrink
    mode = draw.choice(["inference", "no_grad", "grad", "input"])
    first, second = (_run(plain, x, mode) for _ in range(2))
    if not _same(first, second):
        return "plain"
    return "same" if _same(_run(ours, x, mode), first) else "differs"


def main() -> int:
    """Make many calls; 1 if any differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.calls", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="calls for each dtype")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    wrong = 0
    for dtype in options.dtype:
        found: dict[str, int] = {}
        for seed in range(options.count):
            kind = list(KINDS)[seed % 5 % 3]  # more linear layers than others
            result = call(kind, dtype, options.device, seed)
            found[result] = found.get(result, 0) + 1
            if result == "differs":
                print(f"{dtype}: {kind} {seed} differs", flush=True)
        print(dtype, found, flush=True)
        wrong += found.get("differs", 0)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
