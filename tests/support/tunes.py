"""Fine-tunes of small models: some words of most weights moved by a little, and all of some.

And models that are packed and become them.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import tpde
from support.models import assert_same_bits
from support.small import IDS, Model, torch
from tpde.nn import add_deltas, pack_module

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tuned(model: Any, seed: int, share: float = 0.035, dense: int = 7) -> Any:
    """Give a copy of a model of which every fifth parameter is the same, and every `dense`th all another."""
    made, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for number, it in enumerate(made.parameters()):
            bits = it.view(WORDS[it.element_size()])
            if number % dense == seed % dense:
                bits += torch.randint(0, 9, bits.shape, generator=draw).to(bits)
            elif number % 5 != seed % 5:
                at = (torch.rand(bits.shape, generator=draw) < share).to(bits.device)
                bits[at] += torch.randint(1, 4, (int(at.sum()),), generator=draw).to(bits)  # no NaN
    return made


class Tunes(NamedTuple):
    """Plain models by names, of which None is the base; and the packed one that becomes each."""

    plain: dict[str | None, Any]
    packed: Any

    def check(self, name: str | None, ids: Any = IDS) -> None:
        with torch.no_grad():
            assert_same_bits(self.packed(ids), self.plain[name](ids), str(name))


def make(dtype: Any = torch.bfloat16, tie: bool = True, **sizes: int) -> Tunes:
    """Give a small model and two fine-tunes, `math` and `law`."""
    torch.manual_seed(5)
    base = Model(**sizes).to(dtype).eval()
    if not tie:
        base.head.weight = torch.nn.Parameter(base.head.weight.detach().clone())
    plain = {None: base, "math": tuned(base, 1), "law": tuned(base, 2)}
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    return Tunes(plain, packed)
