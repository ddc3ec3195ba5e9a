"""Packing plain tensors in memory to packed weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from tpde.weights.pack_source import pack_sources
from tpde.weights.packed_tensor import PackedTensor


def pack_tensors(
    tensors: Iterable[tuple[str, Tensor]], threads: int | None = None
) -> Iterator[PackedTensor | None]:
    """Pack tensors, each to a weight: see `tpde.weights.pack_source.pack_sources`."""
    for made in pack_sources(tensors, threads):
        yield None if made is None else PackedTensor(made)


def pack_tensor(tensor: Tensor, name: str, threads: int | None = None) -> PackedTensor | None:
    """Pack a tensor: see `pack_tensors`."""
    return next(pack_tensors([(name, tensor)], threads))
