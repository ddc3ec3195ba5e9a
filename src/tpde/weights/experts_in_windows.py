"""Weights of experts, encoded to the window layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpde.weights import window_stacking
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Source, decoded
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts

_TOGETHER_BYTES = 256 << 20  # of plain matrices that are encoded at a time


def parts_in_windows(plain: Sequence[Tensor], names: Sequence[str]) -> list[Windowed] | None:
    """Contiguous bf16 matrices of one shape in the window layout, in one memory; None if one has none."""
    made = window_stacking.encode_together(plain)
    if made is None:
        return None
    windows, starts = made.stack.windows, made.stack.starts
    return [
        Windowed(made.blob[at : at + it.nbytes], name, it, prepared=False)
        for name, it, at in zip(names, windows, starts, strict=True)
    ]


def experts_in_windows(packed: PackedTensor, most: float, turned: bool) -> dict[Source, Source] | None:
    """What takes the places of a weight's sources in the window layout, on its device.

    Parameters
    ----------
    packed : PackedTensor
        One that `can_be_experts`, whose bytes are there.
    most : float
        What share of the plain weight's bytes it may take.
    turned : bool
        Whether it is multiplied from the left.

    Returns
    -------
    dict of Source to Source, or None
        None if it would take more, or is not in bf16.
    """
    sources = packed.sources
    if packed.dtype is not torch.bfloat16:
        return None
    if len(sources) == 1:
        one = WindowedExperts.of(sources[0], most, turned)
        return None if one is None else {sources[0]: one}
    made: dict[Source, Source] = {}
    step = max(_TOGETHER_BYTES // sources[0].nbytes, 1)
    for first in range(0, len(sources), step):
        some = sources[first : first + step]
        found = parts_in_windows([decoded(it) for it in some], [it.name for it in some])
        if found is None:
            return None
        made |= dict(zip(some, found, strict=True))
    return made if sum(it.packed_bytes for it in made.values()) <= most * packed.nbytes else None
