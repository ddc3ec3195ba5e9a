"""Weights of experts, multiplied by what a router sent to each, straight from the window layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tpde.cuda.window_experts import MOST_EXPERTS, MOST_ROUTED, DeviceExperts
from tpde.cuda.window_products import MOST_ROWS, X_AT
from tpde.errors import InvalidInput
from tpde.weights import window_stacking
from tpde.weights.launch import on_device, stream_handle, upload
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Source
from tpde.weights.span import Span
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts

_X_WORDS = X_AT // 2
_TOGETHER_BYTES = 256 << 20  # of plain matrices that are encoded at a time


class Experts:
    """The experts of a weight of three dimensions, all of whose sources are in the window layout.

    Parameters
    ----------
    packed : PackedTensor
        The weight: one `WindowedExperts`, or for each expert as many `Windowed`, below each other.

    Attributes
    ----------
    parts, nbytes, dtype, device
        As of the weight, which holds this, and is not held by it.
    turned : bool
        Whether rows of x are multiplied by `weight[i]`, not by its transpose.
    width, columns : int
        Of y and of x.
    """

    def __init__(self, packed: PackedTensor) -> None:
        sources = packed.sources
        self.parts, self.nbytes, self.dtype, self.device = (
            packed.parts,
            packed.nbytes,
            packed.dtype,
            packed.device,
        )
        self._name, self._shape = packed.name, packed.shape
        self._count, rows, columns = packed.shape
        first = sources[0]
        self.turned = isinstance(first, WindowedExperts) and first.stack.turned
        self.width, self.columns = (columns, rows) if self.turned else (rows, columns)
        self._there: DeviceExperts | None = None
        if isinstance(first, WindowedExperts):
            self._there = first.there
        elif self.device.type == "cuda":
            matrices = [(it.window, it.memory.data_ptr()) for it in sources if isinstance(it, Windowed)]
            self._there = DeviceExperts(matrices, self._count, False, self.device.index)
            self._table = upload(self._there.table.view(np.uint8).reshape(-1), self.device)
            self._there.table_at = self._table.data_ptr()
            self._there.prepare()

    def decode_into(self, out: Tensor) -> None:
        """Decode all of them to the start of a buffer of bytes, on the current stream."""
        if self._there is None:
            Span(self, 0, self.nbytes).decode_to(out[: self.nbytes].view(self.dtype))
            return
        with on_device(self.device):
            self._there.decode(out.data_ptr(), stream_handle(self.device))

    def decode_some(self, numbers: Sequence[int], out: Tensor) -> None:
        """Decode these experts, each to its place in a buffer of bytes for all, on the current stream."""
        if self._there is None:
            for number in numbers:
                span = self._span(number)
                span.decode_to(out[span.begin : span.end].view(self.dtype))
        elif len(numbers) == self._count:
            self.decode_into(out)
        elif numbers:  # what is uploaded goes back to this stream's memory
            listed = upload(np.array(numbers, np.uint32).view(np.uint8), self.device)
            with on_device(self.device):
                stream = stream_handle(self.device)
                self._there.decode(out.data_ptr(), stream, count=len(numbers), numbers=listed.data_ptr())

    def _span(self, number: int) -> Span[Experts]:
        step = self.nbytes // self._count
        return Span(self, number * step, (number + 1) * step)

    def fits(self, tokens: int, routed: int) -> bool:
        """Whether products of so many tokens, for so many rows of y, are computed from windows.

        An expert has as many rows as there are tokens, at most: so nobody asks the router.
        """
        few = 0 < tokens <= MOST_ROWS and 0 < routed <= MOST_ROUTED and self._count <= MOST_EXPERTS
        return few and self._there is not None

    def product(self, x: Tensor, ids: Tensor, per: int, bias: Tensor | None) -> Tensor:
        """Rows of x, times the experts that they are for (docs/windows.md 9), on the current stream.

        Parameters
        ----------
        x : torch.Tensor
            bf16, of two dimensions, as many columns as the experts take.
        ids : torch.Tensor
            The expert of each row of the result, int64. The number after the last one stands for none, and
            gives zeros.
        per : int
            How many rows of the result follow each other that have the same row of x.
        bias : torch.Tensor, optional
            One row for each expert.

        Returns
        -------
        torch.Tensor
            Of shape `(len(ids), width)`.

        Notes
        -----
        On a GPU a row has the bits that `DeviceWindow.product` gives of it alone, whatever else there is. On
        the CPU the experts that are used are decoded, one after the other, and PyTorch multiplies.
        """
        if x.dim() != 2 or x.shape[1] != self.columns or len(x) * per != ids.numel():
            raise InvalidInput(
                f"`{self._name}`: {ids.numel()} rows of {list(x.shape)} by {per} for each, where "
                f"experts take {self.columns} columns"
            )
        if self._there is None:
            return self._on_host(x, ids, per, bias)
        step, at = x.stride(0), x.data_ptr()
        if x.stride(1) != 1 or step % _X_WORDS or at % X_AT or step < self.columns or self.columns % _X_WORDS:
            step = self.columns + -self.columns % _X_WORDS
            padded = x.new_zeros((len(x), step))
            padded[:, : self.columns] = x.detach()
            x, at = padded, padded.data_ptr()
        out, ids = x.new_empty((ids.numel(), self.width)), ids.contiguous()
        bias = None if bias is None else bias.contiguous()
        added = 0 if bias is None else bias.data_ptr()
        to = out.data_ptr()
        with on_device(self.device):
            stream = stream_handle(self.device)
            self._there.product(at, step, per, ids.data_ptr(), ids.numel(), to, added, stream)
        return out

    def _on_host(self, x: Tensor, ids: Tensor, per: int, bias: Tensor | None) -> Tensor:
        out = x.new_zeros((ids.numel(), self.width))
        for number in sorted(set(ids.tolist())):
            if number == self._count:
                continue
            rows = (ids == number).nonzero().view(-1)
            weight = self._span(number).decoded().view(self.dtype).view(self._shape[1:])
            taken = weight.t() if self.turned else weight
            out[rows] = functional.linear(x[rows // per], taken, None if bias is None else bias[number])
        return out


def is_experts(packed: PackedTensor) -> bool:
    """Whether a weight is one of experts that are multiplied as they are."""
    return packed.multiplies and len(packed.shape) == 3


def can_be_experts(shape: Sequence[int], parts: Sequence[Sequence[int]], turned: bool) -> bool:
    """Whether tensors that make up a weight of three dimensions can be its experts in the window layout.

    Parameters
    ----------
    shape : sequence of int
        Of the weight.
    parts : sequence of sequence of int
        Shapes of what it is made of, in the order of its memory.
    turned : bool
        Whether it is multiplied from the left.
    """
    if len(shape) != 3 or 0 in shape:
        return False
    if len(parts) == 1:
        return tuple(parts[0]) == tuple(shape)
    each, rest = divmod(len(parts), shape[0])
    one = (shape[1] // max(each, 1), shape[2])
    return not turned and not rest and each * one[0] == shape[1] and all(tuple(it) == one for it in parts)


def parts_in_windows(plain: Sequence[Tensor], names: Sequence[str]) -> list[Windowed] | None:
    """Contiguous bf16 matrices of one shape in the window layout, in one memory; None if one has none."""
    made = window_stacking.encode_together(plain)
    if made is None:
        return None
    windows, starts = made.stack.windows, made.stack.starts
    return [
        Windowed(made.blob[at : at + it.nbytes], name, it, part=True)
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
        found = parts_in_windows([PackedTensor(it).decoded() for it in some], [it.name for it in some])
        if found is None:
            return None
        made |= dict(zip(some, found, strict=True))
    return made if sum(it.packed_bytes for it in made.values()) <= most * packed.nbytes else None
