"""Spans of packed weights, and which chunks hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tpde.codec.native import Bytes
from tpde.format.blob_header import align
from tpde.weights.source import ALIGN, Decoder, Source, require_on

PIECE_BYTES = 16 << 20  # decoded at a time on the way elsewhere; malloc keeps up to 32 MiB for the next


class Sized(Protocol):
    """What has spans: a packed weight, one of its sources, or a tensor of a file that is not open yet."""

    @property
    def nbytes(self) -> int:
        """Bytes of it, plain."""


class Parted(Sized, Protocol):
    """What spans are decoded of: a `PackedTensor`.

    Attributes
    ----------
    parts : list of (Source, int)
        Sources, each with its byte offset, one after the other.
    dtype : torch.dtype
        Of the weight.
    """

    parts: list[tuple[Source, int]]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it is decoded."""

    def decode_into(self, out: Tensor) -> None:
        """Decode all of it to the start of a buffer of bytes."""


class ChunkRange(NamedTuple):
    """Chunks `first` to `last` of a source.

    Attributes
    ----------
    offset : int
        Byte of the weight where chunk `first` starts.
    stop : int
        Byte of the weight where chunk `last` ends.
    """

    source: Source
    first: int
    last: int
    offset: int
    stop: int


def covering(parts: Iterable[tuple[Source, int]], begin: int, end: int) -> list[ChunkRange]:
    """The chunks that hold bytes `begin` to `end` of a weight.

    The first may start before `begin`, and the last end behind `end`; between them nothing is left out, and
    nothing is there twice.

    Parameters
    ----------
    parts : iterable of (Source, int)
        What makes up the weight, each with its byte offset in it, one after the other.
    begin, end : int
        Bytes of the weight.
    """
    found = []
    for source, at in parts:
        low, high = max(begin - at, 0), min(end - at, source.nbytes)
        if low >= high:
            continue
        header, size = source.header, source.header.word_bytes
        first, last = header.chunk_of(low // size), header.chunk_of((high - 1) // size)
        start, stop = header.chunk_range(first, last)
        found.append(ChunkRange(source, first, last, at + start * size, at + stop * size))
    return found


T = TypeVar("T", bound=Sized)
P = TypeVar("P", bound=Parted)


@dataclass(frozen=True)
class Span(Generic[T]):
    """Bytes `begin` to `end` of a packed weight, decoded without the rest as far as chunks allow.

    Attributes
    ----------
    tensor : PackedTensor
        The weight; where nothing is decoded yet, whatever has as many bytes.
    begin, end : int
        Of its plain bytes, in the order of its memory. Rows of a matrix are a span, columns are not.
    """

    tensor: T
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes it is."""
        return self.end - self.begin

    @property
    def whole(self) -> bool:
        """Whether it is all of the weight."""
        return self.nbytes == self.tensor.nbytes

    def chunks(self: Span[P]) -> list[ChunkRange]:
        """The chunks that hold it: the first may start before it, and the last end behind it."""
        return covering(self.tensor.parts, self.begin, self.end)

    def decoders(self: Span[P], at: int) -> list[Decoder]:
        """What decodes its chunks to a buffer on the weight's device, its own first byte to byte `at`."""
        ranges = self.chunks()
        require_on(self.tensor.device, (it.source for it in ranges))
        return [it.source.chunks(it.first, it.last, it.offset - self.begin + at) for it in ranges]

    def decoded(self: Span[P], room: int = 0) -> Tensor:
        """Its bytes, in memory of their own of at least `room` bytes, at an address as round as in it.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        ranges = self.chunks()
        first, stop = (ranges[0].offset, ranges[-1].stop) if ranges else (self.begin, self.end)
        at = align(self.begin - first, ALIGN) + self.begin % ALIGN
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(
                max(at + stop - self.begin, room), dtype=torch.uint8, device=self.tensor.device
            )
            for decode in self.decoders(at):
                decode(flat)
            return flat[at : at + self.nbytes]

    def pieces(self: Span[P], size: int = PIECE_BYTES) -> Iterator[Span[P]]:
        """Spans of about `size` bytes that make it up; all but the last end where a chunk does."""
        at = self.begin
        while at < self.end:
            stop = min(covering(self.tensor.parts, at, at + size)[-1].stop, self.end)
            yield Span(self.tensor, at, stop)
            at = stop

    def decode_to(self: Span[P], out: Tensor) -> None:
        """Decode it to a tensor that is there, on any device; beside it, little memory is needed.

        Parameters
        ----------
        out : torch.Tensor
            One-dimensional, contiguous, with as many elements as the span; they are cast to its dtype.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        dtype, at = self.tensor.dtype, 0
        if out.dtype is dtype:
            out, dtype = out.view(torch.uint8), torch.uint8  # bits, whatever a copy does to numbers
            if out.device.type == self.tensor.device.type == "cpu":
                self._decode_on_host(out.numpy())
                return
            if self.whole and out.device == self.tensor.device and out.data_ptr() % ALIGN == 0:
                self.tensor.decode_into(out)
                return
        for piece in self.pieces():
            found = piece.decoded().view(dtype)
            out[at : at + found.numel()].copy_(found)
            at += found.numel()

    def _decode_on_host(self: Span[P], out: Bytes) -> None:
        """Straight to where it goes."""
        for source, at in self.tensor.parts:
            low, high = max(self.begin, at), min(self.end, at + source.nbytes)
            if low < high:
                source.decode_on_host(low - at, high - at, out[low - self.begin : high - self.begin])


def joined(spans: Sequence[Span[T]]) -> list[Span[T]]:
    """The same bytes in as few spans as can be: none is empty, and none goes on where another ends."""
    out: list[Span[T]] = []
    for it in spans:
        if out and out[-1].tensor is it.tensor and out[-1].end == it.begin:
            out[-1] = Span(it.tensor, out[-1].begin, it.end)
        elif it.nbytes:
            out.append(it)
    return out
