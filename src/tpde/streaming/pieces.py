"""Cutting packed tensors into pieces: runs of a file's bytes that are copied, and decoded, at once.

A piece ends where a chunk does, so that it can be decoded as soon as it is there, whatever the size of its
tensor, and its place in the ring is free again at once. It may hold the end of one tensor, all of others that
follow it in the file, and the start of one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpde.cuda.items import ALIGNMENT, StagedChunks
from tpde.errors import InvalidInput
from tpde.host.feed import Feed
from tpde.host.ranges import GAP_BYTES
from tpde.io.sources import Extent

if TYPE_CHECKING:  # what brings bytes to host memory does without torch
    from tpde.streaming.streamed_source import Streamed


class PieceSpan(NamedTuple):
    """Chunks of a tensor in a piece.

    Attributes
    ----------
    tensor : Streamed
        Which.
    out : int
        Where the tensor's first byte lies in the buffer that is decoded to.
    chunks : StagedChunks
        Which.
    at : int
        Where the tensor's blob starts, in bytes from the first of the piece in the ring: before it, mostly.
    """

    tensor: Streamed
    out: int
    chunks: StagedChunks
    at: int


class Piece(NamedTuple):
    """Bytes of a file, and what is decoded from them.

    Attributes
    ----------
    extent : Extent
        The bytes.
    feed : Feed
        What brings them.
    spans : tuple of PieceSpan
        What they hold.
    """

    extent: Extent
    feed: Feed
    spans: tuple[PieceSpan, ...]


class TensorPart(NamedTuple):
    """Chunks `first` to `last` of a tensor whose first byte goes to byte `out` of a buffer."""

    tensor: Streamed
    out: int
    first: int
    last: int


def cut(parts: Sequence[TensorPart], limit: int, gap: int = GAP_BYTES) -> list[Piece]:
    """Cut parts of tensors into pieces.

    Parameters
    ----------
    parts : sequence of TensorPart
        In the order of use.
    limit : int
        Bytes of a piece, at most.
    gap : int
        Bytes between two tensors, at most, that are copied in vain.

    Returns
    -------
    list of Piece
        In the order of files and offsets: as a disk reads them best.

    Raises
    ------
    InvalidInput
        If a chunk is larger than a piece.
    """
    pieces: list[Piece] = []
    spans: list[PieceSpan] = []
    begin = end = 0  # of the piece in the making, in its file

    def finish() -> None:
        if spans:
            first = spans[0].tensor
            made = tuple(it._replace(at=it.tensor.extent.offset - begin) for it in spans)
            extent = Extent(first.extent.source, begin, end - begin, first.extent.name)
            pieces.append(Piece(extent, first.feed, made))
            spans.clear()

    ordered = sorted(parts, key=lambda it: (it.tensor.extent.source.name, it.tensor.extent.offset, it.first))
    for tensor, out, begin_at, last in ordered:
        offsets, start, first = tensor.offsets, tensor.extent.offset, begin_at
        while first <= last:
            low = start + int(offsets[first])
            if spans:
                one = spans[0].tensor
                joins = (
                    one.extent.source is tensor.extent.source
                    and one.feed is tensor.feed
                    and 0 <= low - end <= gap
                    and (start - one.extent.offset) % ALIGNMENT == 0
                )
                if not joins or start + int(offsets[first + 1]) - begin > limit:
                    finish()
            if not spans:
                begin = low
            # As many chunks as fit.
            stop = int(np.searchsorted(offsets[first : last + 2], begin + limit - start, "right")) + first - 1
            if stop <= first:
                size = int(offsets[first + 1] - offsets[first])
                raise InvalidInput(
                    f"chunk {first} of `{tensor.extent.name}` has {size} bytes, a piece {limit}"
                )
            end = start + int(offsets[stop])
            chunks = StagedChunks(first, stop - 1, int(offsets[first]), int(offsets[stop]))
            spans.append(PieceSpan(tensor, out, chunks, 0))
            first = stop
    finish()
    return pieces
