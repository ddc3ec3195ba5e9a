"""Run several fine-tunes of a model on one packed base, each of which takes what it changed.

    python examples/fine_tunes.py

Two copies of a small model get some of their weights changed. The base then holds both as deltas, and
computes each one's outputs, bit for bit; at last those of a batch each row of which is under its own.
"""

from __future__ import annotations

import copy

import torch

import tpde
from tpde.nn import add_deltas

SHARE = 0.035  # of weights, that a fine-tune changes


def tuned(base: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Give a copy of a model whose weights were moved a little, here and there."""
    model, draw = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            here = torch.rand(weight.shape, generator=draw) < SHARE
            weight[here] *= 1.01
    return model


def main() -> None:
    """Compare each state of the one model with the model that it is a state of."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)]
    base = torch.nn.Sequential(*layers).to(torch.bfloat16)
    tunes = {"math": tuned(base, 1), "law": tuned(base, 2)}
    deltas = {name: tpde.make_delta(base, tune) for name, tune in tunes.items()}

    model = add_deltas(tpde.pack_module(copy.deepcopy(base)), deltas)
    x = torch.randn(8, 512, dtype=torch.bfloat16)
    states = {"math": tunes["math"], "law": tunes["law"], None: base}
    for name, plain in states.items():
        model.use(name)
        same = torch.equal(model(x).view(torch.int16), plain(x).view(torch.int16))
        print(f"{name or 'the base'}: {'the same bits' if same else 'OTHER BITS'}")
        if not same:
            raise SystemExit(1)
    names = ["math", None, "law", "math", "law", None, "math", "math"]
    model.use(names)
    found = model(x)
    for name, plain in states.items():
        rows = [row for row, it in enumerate(names) if it == name]
        same = torch.equal(found[rows].view(torch.int16), plain(x[rows]).view(torch.int16))
        print(f"rows {rows} of {name or 'the base'}: {'the same bits' if same else 'OTHER BITS'}")
        if not same:
            raise SystemExit(1)
    one = sum(weight.nbytes for weight in base.parameters())
    print(f"{len(deltas)} fine-tunes take {model.tpde_deltas.nbytes / one:.3f} of a plain copy")


if __name__ == "__main__":
    main()
