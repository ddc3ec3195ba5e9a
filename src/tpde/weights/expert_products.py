"""Weights of experts, multiplied by what a router sent to each, straight from the window layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tpde.cuda.window_experts import DeviceExperts
from tpde.cuda.window_products import X_AT
from tpde.errors import InvalidInput
from tpde.weights.launch import on_device, stream_handle, upload
from tpde.weights.source import Source, require_on
from tpde.weights.span import Span
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts

_X_WORDS = X_AT // 2


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


class Experts:
    """The experts of a weight of three dimensions, all of whose sources are in the window layout.

    Parameters
    ----------
    parts : list of (Source, int)
        What the weight is made of, each with its byte offset in it: one `WindowedExperts`, or for each expert
        as many `Windowed`, below each other.
    shape : torch.Size
        Of the weight.
    name : str
        What errors call it.

    Attributes
    ----------
    nbytes, dtype, device
        Of the weight.
    turned : bool
        Whether rows of x are multiplied by `weight[i]`, not by its transpose.
    width, columns : int
        Of y and of x.
    """

    def __init__(self, parts: list[tuple[Source, int]], shape: torch.Size, name: str) -> None:
        first = parts[0][0]
        self.parts, self.dtype, self.device = parts, first.dtype, first.device
        require_on(self.device, (source for source, _ in parts))
        self.nbytes = sum(source.nbytes for source, _ in parts)
        self._name, self._shape = name, shape
        self._count, rows, columns = shape
        self.turned = isinstance(first, WindowedExperts) and first.stack.turned
        self.width, self.columns = (columns, rows) if self.turned else (rows, columns)
        self._there: DeviceExperts | None = None
        if isinstance(first, WindowedExperts):
            self._there = first.there
        elif self.device.type == "cuda":
            matrices = [(it.window, it.memory.data_ptr()) for it, _ in parts if isinstance(it, Windowed)]
            self._there = DeviceExperts(matrices, self._count, False, self.device.index)
            self._table = upload(self._there.table.view(np.uint8).reshape(-1), self.device)
            self._there.table_at = self._table.data_ptr()
            self._there.prepare()

    def prepare(self) -> None:
        """Compile the kernels, for the errors that there may be, and for CUDA graphs; on the CPU nothing."""
        if self._there is not None:
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

    @property
    def most_rows(self) -> int:
        """Rows of a result up to which more than few are computed from windows; 0 if they never are."""
        return 0 if self._there is None else self._there.most_rows

    def taken(self, tokens: int, rows: int) -> int:
        """Bytes on the device that `product` takes meanwhile, beside its result."""
        return 0 if self._there is None else self._there.room(tokens, rows)

    def fits(self, tokens: int, each: int) -> bool:
        """Whether products of so many tokens, with so many experts each, are computed from windows.

        How the router spreads them is not asked.
        """
        return self._there is not None and self._there.takes(tokens, each)

    def product(self, x: Tensor, ids: Tensor, per: int, bias: Tensor | None, tokens: int) -> Tensor:
        """Rows of x, times the experts that they are for (docs/windows.md 9), on the current stream.

        Parameters
        ----------
        x : torch.Tensor
            bf16, of two dimensions, as many columns as the experts take.
        ids : torch.Tensor
            The expert of each row of the result, integers. The number after the last one and those below
            0, by which vLLM marks rows of padding, stand for none, and give zeros.
        per : int
            How many rows of the result follow each other that have the same row of x.
        bias : torch.Tensor, optional
            One row for each expert.
        tokens : int
            Of the call, as `fits` was asked.

        Returns
        -------
        torch.Tensor
            Of shape `(len(ids), width)`.

        Notes
        -----
        On a GPU, with up to 64 tokens, a row has the bits that `DeviceWindow.product` gives of it alone,
        whatever else there is; with more, sums may be in another order. On the CPU the experts that are used
        are decoded, one after the other, and PyTorch multiplies.
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
        ids = ids if ids.dtype is torch.int32 else ids.long()
        bias = None if bias is None else bias.contiguous()
        added = 0 if bias is None else bias.data_ptr()
        to = out.data_ptr()
        with on_device(self.device):
            stream = stream_handle(self.device)
            wide, count, more = ids.dtype is torch.int64, ids.numel(), self._there.room(tokens, ids.numel())
            room = x.new_empty(more, dtype=torch.uint8) if more else None
            room_at = 0 if room is None else room.data_ptr()
            there, numbers = self._there, ids.data_ptr()
            there.product(
                at, step, per, numbers, count, to, added, stream, wide=wide, tokens=tokens, room=room_at
            )
        return out

    def weighted(self, y: Tensor, scores: Tensor) -> Tensor:
        """Each token's sum over what its experts gave, on the current stream.

        Parameters
        ----------
        y : torch.Tensor
            A result of `product`, in which a token's rows follow each other.
        scores : torch.Tensor
            What each of them counts, fp32, of shape `(tokens, rows of each)`.

        Returns
        -------
        torch.Tensor
            bf16, of shape `(tokens, width)`. Products and sums are rounded to fp32, row by row.
        """
        if scores.dim() != 2 or y.shape != (scores.numel(), self.width) or scores.dtype is not torch.float32:
            raise InvalidInput(
                f"`{self._name}`: rows of {list(y.shape)} and scores of {list(scores.shape)}, {scores.dtype}",
                hint=f"give fp32 scores of two dimensions, and a row of {self.width} columns for each",
            )
        tokens, each = scores.shape
        if self._there is None:
            terms = y.view(tokens, each, self.width).float() * scores.unsqueeze(-1)
            return sum(terms.unbind(1), terms.new_zeros((tokens, self.width))).to(y.dtype)
        out, y, scores = y.new_empty((tokens, self.width)), y.contiguous(), scores.contiguous()
        if not out.numel():
            return out
        with on_device(self.device):
            stream, to = stream_handle(self.device), out.data_ptr()
            self._there.weighted(y.data_ptr(), scores.data_ptr(), tokens, each, to, stream)
        return out

    def _on_host(self, x: Tensor, ids: Tensor, per: int, bias: Tensor | None) -> Tensor:
        out = x.new_zeros((ids.numel(), self.width))
        for number in sorted(set(ids.tolist())):
            if number < 0 or number == self._count:
                continue
            rows = (ids == number).nonzero().view(-1)
            weight = self._span(number).decoded().view(self.dtype).view(self._shape[1:])
            taken = weight.t() if self.turned else weight
            out[rows] = functional.linear(x[rows // per], taken, None if bias is None else bias[number])
        return out
