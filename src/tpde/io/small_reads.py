"""Small tensors, read many at a time: a file may have hundreds of thousands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tpde.io.sources import ByteSource

_MOST = 1024  # small tensors at a time, of less than 1 MiB together


def batches(names: Iterable[str], is_small: Callable[[str], bool]) -> Iterator[tuple[bool, list[str]]]:
    """Cut names, as they come, into lists of those of small tensors and of others, and say which."""
    for small, run in itertools.groupby(names, is_small):
        while some := list(itertools.islice(run, _MOST)):
            yield small, some


def read_together(source: ByteSource, places: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Read what lies at some offsets, each with its size; what lies side by side is read at once.

    A call of the system takes as long as copying some kilobytes.

    Raises
    ------
    Truncated
        If the source ends before.
    """
    data = memoryview(bytearray(sum([size for _, size in places])))
    found = [data] * len(places)
    begin = end = -1  # of what lies side by side, in the source
    start = at = 0  # of the same, in the data
    for i in sorted(range(len(places)), key=places.__getitem__):
        offset, size = places[i]
        if offset != end:
            if at > start:
                source.read_into(begin, data[start:at])
            begin, start = offset, at
        end = offset + size
        found[i] = data[at : at + size]
        at += size
    if at > start:
        source.read_into(begin, data[start:at])
    return found
