"""A small model whose rows of one batch are under several fine-tunes, and what each row alone gives."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import tpde
from support.models import assert_same_bits
from support.small import Model, torch
from support.tunes import tuned
from tpde.nn import add_deltas, pack_module

IDS = torch.arange(35).reshape(5, 7)


class Tunes(NamedTuple):
    """Plain models by names, of which None is the base; and the packed one that becomes each."""

    plain: dict[str | None, Any]
    packed: Any

    def expected(self, names: Any, ids: Any) -> Any:
        """What rows of each name alone give under it, in their order."""
        made = [None] * len(names)
        for name in dict.fromkeys(names):
            rows = [i for i, it in enumerate(names) if it == name]
            with torch.no_grad():
                for row, found in zip(rows, self.plain[name](ids[rows]), strict=True):
                    made[row] = found
        return torch.stack(made)

    def check(self, names: Any) -> None:
        ids = IDS[: len(names)]
        with torch.no_grad():
            assert_same_bits(self.packed(ids), self.expected(names, ids), str(names))


def make(dtype: Any = torch.bfloat16, pack: bool = True, **sizes: int) -> Tunes:
    """Give a small model, packed or not, and two fine-tunes, `math` and `law`."""
    torch.manual_seed(5)
    base = Model(**sizes).to(dtype).eval()
    plain = {None: base, "math": tuned(base, 1), "law": tuned(base, 2)}
    packed = copy.deepcopy(base)
    if pack:
        pack_module(packed, min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    return Tunes(plain, packed)
