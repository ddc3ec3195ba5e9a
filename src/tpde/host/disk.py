"""Packed weights that stay in their files: read ahead by threads, past the page cache, into locked memory."""

from __future__ import annotations

import weakref

from tpde.errors import InvalidInput
from tpde.host.arena import Arena
from tpde.host.direct_io import BLOCK, BlockReader, Files
from tpde.host.feed import ReadLog, Ticket
from tpde.host.locking import forced_mode, not_locked
from tpde.host.page_lock import PageLock, Refused
from tpde.host.read_queue import ReadQueue, ReadTicket
from tpde.io.sources import Extent

SLACK = 2 * BLOCK  # of a buffer: a piece starts and ends anywhere
# Of a read. With 1 MiB a disk reached 0.9 GB/s, with 4 or 8 MiB 2.5, with 32 MiB 2.0. Several threads that
# share a piece have it ready sooner than one, too.
READ_BYTES = 4 << 20
READERS = 8  # threads: between the 4 and 16 at which disks reach their rate


def _lock(arena: Arena, page_lock: PageLock | None, forced: str | None) -> None:
    if page_lock is None or forced == "pageable":
        return
    try:
        arena.lock(page_lock)
    except Refused as error:
        not_locked(error, arena.size, forced, "the memory that files are read to")


class ReadAhead:
    """Reads pieces of files into a few buffers, in the order of their requests.

    A feed (`tpde.host.feed`).

    Reads go past the page cache (`O_DIRECT`), or drop from it what they brought there, so that the memory in
    use is that of the buffers. A file that has another name by now, or none, is still read; one that has
    become shorter is noticed by `wait`.

    Parameters
    ----------
    buffers : int
        How many pieces are held: requested ones, and those that are being copied.
    piece : int
        Bytes of a piece, at most.
    threads : int
        How many read.
    page_lock : PageLock or None
        Of the device that copies. The buffers are page-locked, unless that is refused, with a warning. With
        None nothing copies, and they are not.
    files : BlockReader, optional
        What reads, and is closed with this; by default, past the page cache.
    read_bytes : int
        Of a read, at most: threads share a piece.

    Raises
    ------
    OutOfMemory
        If the system has too little memory.
    UnsupportedDevice
        If `TPDE_HOST_MEMORY` forces memory to be locked, and that is refused.

    Attributes
    ----------
    locked_bytes, private_bytes : int
        Of the buffers.
    """

    def __init__(
        self,
        buffers: int,
        piece: int,
        threads: int,
        page_lock: PageLock | None,
        *,
        files: BlockReader | None = None,
        read_bytes: int = READ_BYTES,
    ) -> None:
        if min(buffers, piece, threads) < 1:
            raise InvalidInput(f"{buffers} buffers of {piece} bytes and {threads} threads read nothing")
        self._room = -(-piece // BLOCK) * BLOCK + SLACK
        arena = Arena(buffers * self._room)
        try:
            _lock(arena, page_lock, forced_mode())
        except BaseException:
            arena.close()
            raise
        self._piece, self.ahead = piece, buffers * piece
        self.locked_bytes, self.private_bytes = arena.size if arena.locked else 0, arena.size
        # Threads know the queue, not this object: it can be collected while they wait.
        self._queue = ReadQueue(
            arena, self._room, buffers, page_lock if arena.locked else None, files or Files(), read_bytes
        )
        self._close = weakref.finalize(self, self._queue.stop)
        self._close.atexit = False  # the end of a process ends the threads, whatever they are at
        self._queue.start(threads)

    @property
    def trace(self) -> ReadLog | None:
        """What takes note of reads; None for nothing."""
        return self._queue.trace

    @trace.setter
    def trace(self, trace: ReadLog | None) -> None:
        with self._queue.lock:
            self._queue.trace = trace

    def request(self, extent: Extent) -> Ticket:
        """Read a piece as soon as all that were requested before are being read, and a buffer is free.

        Raises
        ------
        InvalidInput
            If it is larger than a buffer.
        """
        if not 0 < extent.size <= self._piece:
            raise InvalidInput(f"`{extent.name}`: {extent.size} bytes, but a piece has 1 to {self._piece}")
        ticket = ReadTicket(self._queue, extent)
        try:
            with self._queue.lock:
                self._queue.waiting.append(ticket)
                self._queue.work.notify_all()
        except BaseException:  # after Ctrl-C nobody has the ticket, and a buffer would be lost
            ticket.cancel()
            raise
        return ticket

    def device_address(self, extent: Extent) -> int | None:
        """None: nothing stays."""
        return None

    def close(self) -> None:
        """End the threads, after the reads that they are at, and give the memory back."""
        self._close()
        self._queue.join()
