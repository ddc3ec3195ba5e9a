"""Packed weights in host memory that devices copy from, page-locked if that is possible."""

from __future__ import annotations

import bisect
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.format.source import Extent, Source
from tpde.streaming import lock
from tpde.streaming.arena import Arena, fill
from tpde.streaming.mapping import Mapping
from tpde.streaming.parallel import overlapped
from tpde.streaming.ranges import Range, merge, require

MODES = ("mapped", "arena", "pageable")
VARIABLE = "TPDE_HOST_MEMORY"


def forced_mode(mode: str | None = None) -> str | None:
    """The mode that was asked for, by the caller or by the environment; None to find out.

    Raises
    ------
    InvalidInput
        If there is no such mode.
    """
    wanted = mode or os.environ.get(VARIABLE) or None
    if wanted is not None and wanted not in MODES:
        raise InvalidInput(
            f"host memory of mode `{wanted}` is unknown; `{VARIABLE}` takes {', '.join(MODES)}"
        )
    return wanted


def not_locked(error: lock.Refused, size: int, forced: str | None, what: str) -> None:
    """Say that memory is not page-locked.

    Raises
    ------
    UnsupportedDevice
        If it was forced to be.
    """
    if forced is not None:
        raise UnsupportedDevice(
            f"{what} ({size} bytes) cannot be page-locked: {error}; raise the limit of locked "
            f"memory (`ulimit -l`), or unset `{VARIABLE}`"
        ) from error
    warnings.warn(
        f"{what} ({size} bytes) cannot be page-locked ({error}) and stays pageable: copies to the "
        "GPU take several times as long; raise the limit of locked memory (`ulimit -l`)",
        RuntimeWarning,
        stacklevel=4,
    )


class HostMemory:
    """Extents of files in host memory. A supply (`tpde.streaming.supply`) that has everything already.

    The files are mapped and page-locked in place; where that is refused they are copied to an arena, which is
    page-locked; where that is refused too, the arena stays pageable, with a warning.

    Parameters
    ----------
    extents : sequence of Extent
        What is wanted. Sources must stay open.
    device : int
        Number of the device. Memory is locked for all of them.
    mode : {"mapped", "arena", "pageable"}, optional
        Force one; by default what `TPDE_HOST_MEMORY` says, or the best that is possible.
    progress : callable, optional
        Called with numbers of bytes; their sum is that of the extents' sizes.

    Raises
    ------
    Truncated
        If a file ends before an extent does.
    ReadError
        If the disk fails.
    OutOfMemory
        If the system has too little memory.
    UnsupportedDevice
        If the forced mode is refused.

    Attributes
    ----------
    kind : str
        The mode: `mapped`, `arena` or `pageable`.
    locked_bytes, private_bytes : int
        Page-locked, and beside the page cache.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        device: int,
        *,
        mode: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        require(extents)
        forced = forced_mode(mode)
        report = _Report(sum(it.size for it in extents), progress)
        self._ranges = merge(extents)
        self._starts: list[int]
        self._device_starts: list[int | None]
        self._held: Mapping | Arena
        if not (forced in {None, "mapped"} and self._in_place(device, forced, report)):
            report.restart()
            arena = Arena(max(sum(it.size for it in self._ranges), 1))
            try:
                self._copy(arena, device, forced, report)
            except BaseException:
                arena.close()
                raise
        report.finish()
        self._files: dict[Source, tuple[list[int], int]] = {}
        for i, it in enumerate(self._ranges):
            self._files.setdefault(it.source, ([], i))[0].append(it.first)
        self._close = weakref.finalize(self, self._held.close)
        self._close.atexit = False  # the end of a process frees all of it, and the driver may have gone

    def _in_place(self, device: int, forced: str | None, report: _Report) -> bool:
        try:
            held = Mapping(self._ranges, device, report)
        except lock.Refused as error:
            if forced is None:
                return False
            raise UnsupportedDevice(
                f"the packed files cannot be page-locked in place: {error}; unset `{VARIABLE}` to copy them"
            ) from error
        self._held, self._starts, self._device_starts = held, held.starts, held.device_starts
        self.kind, self.locked_bytes, self.private_bytes = "mapped", held.size, 0
        return True

    def _copy(self, arena: Arena, device: int, forced: str | None, report: _Report) -> None:
        """Fill an arena, each range being locked while the next one is read."""
        places = list(accumulate((it.size for it in self._ranges), initial=0))[:-1]
        refused: list[lock.Refused] = []

        def lock_part(part: tuple[int, Range]) -> None:
            if forced == "pageable" or refused:
                return
            try:
                arena.lock(device, part[0], part[1].size)
            except lock.Refused as error:
                refused.append(error)

        overlapped(zip(places, self._ranges, strict=True), lambda part: fill(arena, *part, report), lock_part)
        if refused:
            arena.unlock()
            not_locked(refused[0], arena.size, forced, "the memory of the packed weights")
        self._starts = [arena.address + at for at in places]
        self._device_starts = [
            lock.device_address(it, device) if arena.locked else None for it in self._starts
        ]
        self._held, self.kind = arena, "arena" if arena.locked else "pageable"
        self.locked_bytes, self.private_bytes = arena.size if arena.locked else 0, arena.size

    def _find(self, extent: Extent) -> tuple[int, int]:
        """The range that holds an extent, and how far from its first page the extent starts."""
        firsts, before = self._files.get(extent.source, ([], 0))
        i = before + bisect.bisect_right(firsts, extent.offset) - 1
        if i < before or not firsts or extent.offset + extent.size > self._ranges[i].last:
            raise ValueError(
                f"bytes {extent.offset} to {extent.offset + extent.size} of `{extent.source.name}` "
                f"(`{extent.name}`) were not asked for"
            )
        if not self._close.alive:
            raise ValueError("the memory was given back")
        return i, extent.offset - self._ranges[i].begin

    def address(self, extent: Extent) -> int:
        """The host address of bytes that lie inside of an extent, or reach from one into the next.

        Only a device may read there when the files are mapped: see `tpde.streaming.mapping`.
        """
        i, at = self._find(extent)
        return self._starts[i] + at

    def device_address(self, extent: Extent) -> int | None:
        """Where kernels read the same bytes over the bus; None if they are not locked."""
        i, at = self._find(extent)
        start = self._device_starts[i]
        return None if start is None else start + at

    # ---- a supply ----

    ahead = 0

    def request(self, extent: Extent) -> Extent:
        """Nothing to do: everything is there."""
        return extent

    def wait(self, ticket: Extent) -> int:
        """The address, at once."""
        return self.address(ticket)

    def ready(self, ticket: Extent) -> bool:
        """Always."""
        return True

    def copied(self, ticket: Extent, event: Any) -> None:
        """Nothing to do: the bytes stay."""

    def cancel(self, ticket: Extent) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Unlock it and give it back."""
        self._close()


class _Report:
    """Reports bytes to a progress bar: as many as there are in all, even where a second attempt is needed."""

    def __init__(self, total: int, progress: Callable[[int], None] | None) -> None:
        self._total, self._progress = total, progress
        self._done = self._told = 0

    def restart(self) -> None:
        self._done = 0

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        more = min(self._done, self._total) - self._told
        if more > 0:
            self._told += more
            if self._progress is not None:
                self._progress(more)

    def finish(self) -> None:
        self(self._total)
