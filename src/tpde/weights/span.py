"""Which chunks hold some bytes of a weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tpde.weights.source import Source


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
