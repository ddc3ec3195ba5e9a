"""Packed weights in host memory that devices copy from, page-locked if that is possible."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpde.host.feed import Event, ReadLog, Ticket
from tpde.host.locking import forced_mode
from tpde.host.page_lock import PageLock
from tpde.host.pinning import Pinning, not_there_any_more
from tpde.host.ranges import merge, require
from tpde.io.sources import ByteSource, Extent


class _Ticket(NamedTuple):
    """Bytes that come, and stay, whether they were asked for or not."""

    memory: HostMemory
    extent: Extent

    def ready(self) -> bool:
        return self.memory.there(self.extent)

    def wait(self) -> int:
        return self.memory.address(self.extent)

    def copied(self, event: Event) -> None:
        pass

    def cancel(self) -> None:
        pass


class HostMemory:
    """Extents of files in host memory: a feed (`tpde.host.feed`) that keeps what it has.

    The files are mapped and page-locked in place; from where that is refused on they are copied to an arena,
    which is page-locked; from where that is refused too, the arena stays pageable, with a warning. All of it
    happens in the background, from `begin` on, or from when any bytes are wanted: file by file, in the order
    of the extents, and each file in the order of offsets. Whoever wants bytes waits for them.

    Parameters
    ----------
    extents : sequence of Extent
        What is wanted, of what is wanted first at the start. Sources must stay open.
    page_lock : PageLock
        Of one of the devices. Memory is locked for all of them.
    mode : {"mapped", "arena", "pageable"}, optional
        Force one; by default what `TPDE_HOST_MEMORY` says, or the best that is possible.
    progress : callable, optional
        Called with numbers of bytes, in the background; their sum is that of the extents' sizes.

    Raises
    ------
    Truncated
        If a file ends before an extent does.
    InvalidInput
        If there is no such mode.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        page_lock: PageLock,
        *,
        mode: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        require(extents)
        self._ranges = merge(extents)
        self._files: dict[ByteSource, tuple[list[int], int]] = {}
        for i, it in enumerate(self._ranges):
            self._files.setdefault(it.source, ([], i))[0].append(it.first)
        total, self._progress = sum(it.size for it in extents), progress
        # The thread knows this, not the memory: that can be collected meanwhile.
        self._pinning = Pinning(self._ranges, page_lock, forced_mode(mode), total)
        self._close = weakref.finalize(self, self._pinning.close)
        self._close.atexit = False  # the end of a process frees all of it, and the driver may have gone
        weakref.finalize(self, self._pinning.stop)  # but first the thread leaves the driver alone

    def begin(self) -> None:
        """Pin it from now on. Beginning again does nothing."""
        self._pinning.start(self._progress)

    def complete(self) -> None:
        """Wait until everything is there.

        Raises
        ------
        Truncated, ReadError, OutOfMemory, UnsupportedDevice
            If something cannot be pinned; and whatever `progress` has raised.
        """
        self.begin()
        self._pinning.wait()

    @property
    def kind(self) -> str:
        """The mode; waits for it: `mapped`, `arena` or `pageable`, the last that was needed."""
        self.complete()
        return self._pinning.kind

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked, once everything is there."""
        self.complete()
        return self._pinning.locked_bytes

    @property
    def private_bytes(self) -> int:
        """Bytes beside the page cache, once everything is there."""
        self.complete()
        return self._pinning.private_bytes

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
            raise not_there_any_more()
        return i, extent.offset - self._ranges[i].begin

    def address(self, extent: Extent) -> int:
        """The host address of bytes that lie inside of an extent, or reach from one into the next.

        Waits for them. Only a device may read there when the files are mapped: see `tpde.host.mapped`.
        """
        i, at = self._find(extent)
        self.begin()
        return self._pinning.host(i, at + extent.size) + at

    def device_address(self, extent: Extent) -> int | None:
        """Where kernels read the same bytes over the bus; None if they are not locked. Waits for them."""
        i, at = self._find(extent)
        self.begin()
        start = self._pinning.device(i, at + extent.size)
        return None if start is None else start + at

    def there(self, extent: Extent) -> bool:
        """Whether `address` would return at once."""
        i, at = self._find(extent)
        return self._pinning.there(i, at + extent.size)

    # ---- a feed ----

    ahead = 0
    trace: ReadLog | None = None  # nothing is read when it is asked for

    def request(self, extent: Extent) -> Ticket:
        """Nothing to do: everything comes anyway."""
        return _Ticket(self, extent)

    def close(self) -> None:
        """Unlock it and give it back; returns when the thread has ended, whoever closed it first."""
        self._close()
        self._pinning.stop()
