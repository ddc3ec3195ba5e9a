"""Tensors made of blobs, one after the other in memory, that pass through conversions undecoded.

transformers stacks, concatenates, chunks and renames a checkpoint's tensors on their way into a model and
back. A `Run` answers these functions of torch. Where a result's memory is a sequence of whole blobs, it is a
`Run` again; everything else raises, and the caller decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from tpde.weights.source import Source
from tpde.weights.tensor import PackedTensor


class Part(Protocol):
    """What a run is made of: something that has a name and a number of plain bytes."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that it holds, plain."""


class NotARun(Exception):
    """A result is not a sequence of whole blobs."""


P = TypeVar("P", bound=Part)


class Run(Generic[P]):
    """A tensor whose memory is that of some parts, one after the other.

    Parameters
    ----------
    shape : iterable of int
        Of the tensor.
    dtype : torch.dtype
        Of the tensor and its parts.
    parts : sequence of Part
        Whose bytes follow each other.
    """

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, parts: Sequence[P]) -> None:
        self.shape, self.dtype, self.parts = torch.Size(shape), dtype, tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, plain."""
        return sum(part.nbytes for part in self.parts)

    def opened(self, by_name: Mapping[str, Source]) -> PackedTensor:
        """The packed weight that it is, by what the parts' names stand for."""
        return PackedTensor([by_name[part.name] for part in self.parts], self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Run[P]:
        """The run itself: its bytes lie in order."""
        return self

    def squeeze(self, dim: int | None = None) -> Run[P]:
        """Without a dimension of size 1, or without all of them."""
        drop = range(self.ndim) if dim is None else (dim % self.ndim,)
        shape = [n for i, n in enumerate(self.shape) if i not in drop or n != 1]
        return Run(shape, self.dtype, self.parts)

    def unsqueeze(self, dim: int) -> Run[P]:
        """With a dimension of size 1 more."""
        shape = list(self.shape)
        shape.insert(dim % (self.ndim + 1), 1)
        return Run(shape, self.dtype, self.parts)

    def rows(self, dim: int, sizes: Sequence[int]) -> list[list[tuple[P, ...]]]:
        """Cut along a dimension: for each index of those before it, the parts of each piece.

        Raises
        ------
        NotARun
            If a cut goes through a part.
        """
        outer = math.prod(self.shape[:dim])
        unit = self.nbytes // max(outer * self.shape[dim], 1)
        parts, at, out = self.parts, 0, []
        for _ in range(outer):
            row = []
            for size in sizes:
                first, left = at, size * unit
                while left > 0 and at < len(parts):
                    left -= parts[at].nbytes
                    at += 1
                if left:
                    raise NotARun
                row.append(parts[first:at])
            out.append(row)
        return out

    def split(self, sizes: Sequence[int], dim: int) -> tuple[Run[P], ...]:
        """Pieces of the given sizes along a dimension."""
        dim %= self.ndim
        if sum(sizes) != self.shape[dim]:
            raise NotARun
        rows = self.rows(dim, sizes)
        return tuple(
            Run(
                (*self.shape[:dim], size, *self.shape[dim + 1 :]),
                self.dtype,
                [part for row in rows for part in row[number]],
            )
            for number, size in enumerate(sizes)
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer the functions that conversions use."""
        if func not in _FUNCTIONS:
            raise NotARun
        return _FUNCTIONS[func](*args, **(kwargs or {}))


def _cat(tensors: Sequence[Run[P]], dim: int = 0) -> Run[P]:
    first = tensors[0]
    if not all(isinstance(t, Run) and t.dtype is first.dtype and t.ndim == first.ndim for t in tensors):
        raise NotARun
    dim %= first.ndim
    others = [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors]
    if any(other != others[0] for other in others):
        raise NotARun
    rows = zip(*(t.rows(dim, [t.shape[dim]]) for t in tensors), strict=True)
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    return Run(shape, first.dtype, [part for row in rows for (piece,) in row for part in piece])


def _stack(tensors: Sequence[Run[P]], dim: int = 0) -> Run[P]:
    return _cat([t.unsqueeze(dim) if isinstance(t, Run) else t for t in tensors], dim)


def _chunk(tensor: Run[P], chunks: int, dim: int = 0) -> tuple[Run[P], ...]:
    size = tensor.shape[dim]
    step = -(-size // chunks)  # as torch.chunk: the last is the smaller one
    return tensor.split([min(step, size - at) for at in range(0, size, step)], dim)


def _split(tensor: Run[P], sizes: int | Sequence[int], dim: int = 0) -> tuple[Run[P], ...]:
    if isinstance(sizes, int):
        size = tensor.shape[dim]
        sizes = [min(sizes, size - at) for at in range(0, size, sizes)]
    return tensor.split(sizes, dim)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.chunk: _chunk,
    torch.split: _split,
}
