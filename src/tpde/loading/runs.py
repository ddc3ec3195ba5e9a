"""Tensors made of blobs, or of spans of them, that pass through conversions undecoded.

transformers stacks, concatenates, chunks and renames a checkpoint's tensors on their way into a model and
back. A `Run` answers these functions of torch: where a result's memory is a sequence of spans, it is a `Run`
again. Everything else raises, and the caller decodes whole blobs. So do cuts into columns: chunks hold rows,
and each column takes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from tpde.memory.device_memory import allocate
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Source
from tpde.weights.span import Span, joined

# Of a span that is not all there is of a cut: where they are shorter, as columns of a matrix are, or rows of
# small experts, their chunks, of 8 to 512 KiB, would be decoded again and again.
STRIP_BYTES = 1 << 20


class RunPart(Protocol):
    """What a run is made of: something that has a name and a number of plain bytes."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that it holds, plain."""


class NotARun(Exception):
    """A result is not a sequence of spans."""


P = TypeVar("P", bound=RunPart)


class Run(Generic[P]):
    """A tensor whose memory is that of some parts, or spans of them, one after the other.

    Parameters
    ----------
    shape : iterable of int
        Of the tensor.
    dtype : torch.dtype
        Of the tensor and its parts.
    parts : sequence of RunPart or Span
        Whose bytes follow each other.

    Attributes
    ----------
    spans : list of Span
        What it is made of: neither is any empty, nor could two be one.
    """

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, parts: Sequence[P | Span[P]]) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.spans = joined([it if isinstance(it, Span) else Span(it, 0, it.nbytes) for it in parts])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, plain."""
        return sum(span.nbytes for span in self.spans)

    @property
    def whole(self) -> bool:
        """Whether it is made of whole parts: then it can stay packed."""
        return bool(self.spans) and all(span.whole for span in self.spans)

    @property
    def parts(self) -> tuple[P, ...]:
        """What it is made of, if it is whole."""
        assert self.whole
        return tuple(span.tensor for span in self.spans)

    def opened(self, by_name: Mapping[str, Source]) -> PackedTensor:
        """The packed weight that it is, if it is whole, by what the parts' names stand for."""
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
        return Run(shape, self.dtype, self.spans)

    def unsqueeze(self, dim: int) -> Run[P]:
        """With a dimension of size 1 more."""
        shape = list(self.shape)
        shape.insert(dim % (self.ndim + 1), 1)
        return Run(shape, self.dtype, self.spans)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Run[P], ...]:
        """As `torch.chunk`."""
        size = self.shape[dim]
        return self.split(_even(size, -(-size // chunks)) if size else [0] * chunks, dim)

    def rows(self, dim: int, sizes: Sequence[int]) -> list[list[list[Span[P]]]]:
        """Cut along a dimension: for each index of those before it, the spans of each piece.

        Raises
        ------
        NotARun
            If parts would be cut into many spans that are short.
        """
        outer = math.prod(self.shape[:dim])
        unit = self.nbytes // max(outer * self.shape[dim], 1)
        short = outer > 1 and any(0 < size * unit < STRIP_BYTES for size in sizes)
        spans, at = iter(self.spans), 0
        now = next(spans, None)
        out = []
        for _ in range(outer):
            row = []
            for size in sizes:
                piece, left = [], size * unit
                while left and now is not None:
                    stop = min(at + left, now.nbytes)
                    if short and stop - at < now.nbytes:
                        raise NotARun
                    piece.append(Span(now.tensor, now.begin + at, now.begin + stop))
                    left -= stop - at
                    now, at = (now, stop) if stop < now.nbytes else (next(spans, None), 0)
                row.append(piece)
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
                [span for row in rows for span in row[number]],
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

    def __getattr__(self, name: str) -> Any:
        """Refuse what else tensors can do."""
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            raise NotARun
        raise AttributeError(f"a run has no `{name}`")


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
    return Run(shape, first.dtype, [span for row in rows for (piece,) in row for span in piece])


def _stack(tensors: Sequence[Run[P]], dim: int = 0) -> Run[P]:
    return _cat([t.unsqueeze(dim) if isinstance(t, Run) else t for t in tensors], dim)


def _even(size: int, step: int) -> list[int]:
    """A dimension in steps: the last is the smaller one."""
    return [min(step, size - at) for at in range(0, size, step)]


def _split(tensor: Run[P], sizes: int | Sequence[int], dim: int = 0) -> tuple[Run[P], ...]:
    return tensor.split(_even(tensor.shape[dim], sizes) if isinstance(sizes, int) else sizes, dim)


def _unbind(tensor: Run[P], dim: int = 0) -> tuple[Run[P], ...]:
    return tuple(it.squeeze(dim) for it in tensor.split([1] * tensor.shape[dim], dim))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.chunk: Run.chunk,
    torch.split: _split,
    torch.unbind: _unbind,
}


def decoded(
    runs: Sequence[Run[P]],
    device: torch.device,
    opened: Callable[[P], Source],
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Runs as plain tensors, one blob being open at a time: of each, the chunks that hold a span of a run.

    Parameters
    ----------
    runs : sequence of Run
        Decoded side by side.
    device : torch.device
        Where the tensors go.
    opened : callable
        Gives the blob that a part is, on any device.
    dtype : torch.dtype, optional
        They are cast to; by default each keeps its own.

    Raises
    ------
    Corrupt
        Naming tensor and chunk.
    OutOfMemory
        If there is no room for one.
    """
    made = []
    places: dict[P, list[tuple[Span[P], torch.Tensor]]] = {}  # and where each goes, by parts
    for run in runs:
        kind, at = run.dtype if dtype is None else dtype, 0
        name = run.spans[0].tensor.name if run.spans else "nothing"
        size = run.shape.numel() * kind.itemsize
        flat = allocate(max(size, 1), device, f"`{name}`, decoded,")[:size].view(kind)
        for span in run.spans:
            stop = at + span.nbytes // run.dtype.itemsize
            places.setdefault(span.tensor, []).append((span, flat[at:stop]))
            at = stop
        made.append(flat.view(run.shape))
    for part, found in places.items():
        weight = PackedTensor(opened(part))
        for span, out in found:
            weight.span(span.begin, span.end).decode_to(out)
    return made
