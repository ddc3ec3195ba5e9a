"""Pieces of files that were asked for, and the threads that read them into a few buffers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from tpde.errors import ReadError, TpdeError
from tpde.host.arena import Arena
from tpde.host.direct_io import BLOCK, BlockReader
from tpde.host.feed import Event, ReadLog
from tpde.host.page_lock import PageLock
from tpde.host.ranges import read_error
from tpde.io.sources import Extent


class ReadTicket:
    """A piece that was requested."""

    def __init__(self, queue: ReadQueue, extent: Extent) -> None:
        self.extent = extent
        self.buffer = -1  # which holds it
        self.left = 0  # reads that are not done
        self.reading = 0  # reads that threads are at
        self.error: TpdeError | None = None
        self.dropped = False
        self.done = False
        self.began = 0
        self._queue = queue  # and not the `ReadAhead`, which can be collected meanwhile

    def ready(self) -> bool:
        """Whether the piece is there. A failed one never is: whoever needs it learns why from `wait`."""
        return self.done

    def wait(self) -> int:
        """The host address of the piece, once it has been read: see `Ticket`."""
        queue = self._queue
        with queue.lock:
            while not (self.done or self.error or self.dropped or queue.stopped):
                queue.there.wait()
            if self.error is not None:
                raise self.error
            if queue.stopped:
                what = f"`{self.extent.name}` is not read any more"
                if queue.failed is None:
                    raise ReadError(
                        f"{what}: its model was closed", hint="load it again", where=self.extent.name
                    )
                raise ReadError(
                    f"{what}: {queue.failed}", hint="load the model again", where=self.extent.name
                ) from queue.failed
            if not self.done:
                raise ValueError(f"`{self.extent.name}` was cancelled, or copied already")
            return queue.address(self)

    def copied(self, event: Event) -> None:
        """Read another piece to the same buffer once the device has passed the event."""
        queue = self._queue
        with queue.lock:
            buffer = self.buffer
            # First, for Ctrl-C between the two must not have `cancel` free the buffer a second time.
            self.done, self.dropped, self.buffer = False, True, -1
            queue.draining.append((buffer, event))
            queue.work.notify_all()

    def cancel(self) -> None:
        """Stop reading the piece, or let go of it."""
        with self._queue.lock:
            self._queue.drop(self)


class ReadQueue:
    """What threads that read share. All but `start`, `stop` and `join` is called with `lock` held.

    Parameters
    ----------
    arena : Arena
        The buffers, one after the other; closed by the last thread.
    room, buffers : int
        Bytes of a buffer, and how many there are.
    page_lock : PageLock or None
        Of the device that copies from the arena, if that is locked.
    files : BlockReader
        What reads; closed by the last thread.
    read_bytes : int
        Of a read, at most.
    """

    def __init__(
        self,
        arena: Arena,
        room: int,
        buffers: int,
        page_lock: PageLock | None,
        files: BlockReader,
        read_bytes: int,
    ) -> None:
        self.lock = threading.RLock()  # a finalizer may take it again, in the same thread
        self.work, self.there = threading.Condition(self.lock), threading.Condition(self.lock)
        self.waiting: deque[ReadTicket] = deque()
        self.draining: deque[tuple[int, Event]] = deque()  # buffers that are copied from
        self.stopped = False
        self.failed: BaseException | None = None  # what no read is to blame for
        self.trace: ReadLog | None = None
        self._arena, self._room, self._page_lock = arena, room, page_lock
        self._free = list(range(buffers))
        self._reads: deque[tuple[ReadTicket, int, int]] = deque()  # not begun: ticket, offset, size
        self._waits_for_copy = False
        self._files, self._read_bytes = files, read_bytes
        self._threads: list[threading.Thread] = []
        self._alive = 0

    # ---- threads ----

    def start(self, threads: int) -> None:
        """Begin to read, on so many threads."""
        self._threads = [
            threading.Thread(target=self._run, name="tpde-disk", daemon=True) for _ in range(threads)
        ]
        with self.lock:
            for thread in self._threads:
                thread.start()
                self._alive += 1

    def stop(self) -> None:
        """Tell the threads to end. Does not wait for them: a finalizer may run on one of them."""
        with self.lock:
            self.stopped = True
            self.work.notify_all()
            self.there.notify_all()

    def join(self) -> None:
        """Wait until the threads have ended, unless this is one of them."""
        if threading.current_thread() in self._threads:
            return  # garbage is collected in any thread, and this one may hold the lock that others end with
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with self.lock:
            try:
                if self._page_lock is not None:
                    self._page_lock.bind()
                while not self.stopped:
                    if not self._work():
                        self.work.wait()
            except BaseException as error:
                self.failed = error
                self.stop()
            self._alive -= 1
            if not self._alive:  # nobody reads to the buffers any more
                for _, event in self.draining:
                    with contextlib.suppress(Exception):  # a device that has crashed copies nothing
                        event.synchronize()
                self._arena.close()
                self._files.close()

    def _work(self) -> bool:
        """Do something; False if there is nothing to do."""
        if not self._reads and self.waiting and self._free:
            self._begin(self.waiting.popleft())
        if self._reads:
            self._read(*self._reads.popleft())
            return True
        if self.waiting and self.draining and not self._waits_for_copy:
            self._wait_for_copy()
            return True
        return False

    def _wait_for_copy(self) -> None:
        """Copies end in the order in which they were queued: one thread waits for the oldest."""
        buffer, event = self.draining.popleft()
        self._waits_for_copy = True
        self.lock.release()
        try:
            event.synchronize()
        finally:
            self.lock.acquire()
            self._waits_for_copy = False
        self._free.append(buffer)
        self.work.notify_all()  # somebody else waits for the next one, while this thread reads

    # ---- reading ----

    def address(self, ticket: ReadTicket) -> int:
        """Where the bytes of a piece are."""
        return self._arena.address + ticket.buffer * self._room + ticket.extent.offset % BLOCK

    def _begin(self, ticket: ReadTicket) -> None:
        """Give a piece a buffer, and cut it up into reads of about the same size."""
        ticket.buffer, ticket.began = self._free.pop(), time.perf_counter_ns()
        first = ticket.extent.offset // BLOCK * BLOCK
        last = ticket.extent.offset + ticket.extent.size
        count = -(-(last - first) // self._read_bytes)
        size = -(-(last - first) // (count * BLOCK)) * BLOCK
        self._reads += [(ticket, at, min(size, last - at)) for at in range(first, last, size)]
        ticket.left = len(self._reads)
        self.work.notify_all()

    def _read(self, ticket: ReadTicket, offset: int, size: int) -> None:
        source, first = ticket.extent.source, ticket.extent.offset // BLOCK * BLOCK
        at = ticket.buffer * self._room + offset - first
        ticket.reading += 1
        error: TpdeError | None = None
        self.lock.release()
        try:
            room = self._arena.view[at : at + -(-size // BLOCK) * BLOCK]
            self._files.read(source, offset, room, size)
        except OSError as failed:
            error = read_error(source.name, offset, size, failed)
        except TpdeError as failed:
            error = failed
        finally:
            self.lock.acquire()
            ticket.reading -= 1
        self._finish(ticket, error)

    def _finish(self, ticket: ReadTicket, error: TpdeError | None) -> None:
        """Take note of a read."""
        ticket.left -= 1
        if error is not None and ticket.error is None:
            # A new one: the traceback of the old one holds on to the buffer.
            ticket.error = error.prefixed(f"`{ticket.extent.name}`", where=ticket.extent.name)
            self._skip(ticket)
            self.there.notify_all()
        if ticket.left == 0 and not ticket.dropped and ticket.error is None:
            ticket.done = True
            self.there.notify_all()
            if self.trace is not None:
                end = time.perf_counter_ns()
                self.trace.read(ticket.began, end, ticket.extent.name, ticket.extent.size)
        elif ticket.reading == 0 and (ticket.dropped or ticket.error is not None):
            self._skip(ticket)  # `drop` may not have come so far, after Ctrl-C
            self._release(ticket)

    def drop(self, ticket: ReadTicket) -> None:
        """Forget a piece, whatever it is at. Its buffer is free once no thread reads to it.

        Doing so again does nothing, or the rest of it after Ctrl-C.
        """
        ticket.dropped, ticket.done = True, False
        if ticket.buffer >= 0:
            self._skip(ticket)
            if ticket.reading == 0:
                self._release(ticket)
        elif ticket in self.waiting:  # not if it failed, or was copied
            self.waiting.remove(ticket)
        self.there.notify_all()

    def _skip(self, ticket: ReadTicket) -> None:
        """Begin no more reads of a piece."""
        self._reads = deque(it for it in self._reads if it[0] is not ticket)

    def _release(self, ticket: ReadTicket) -> None:
        buffer, ticket.buffer = ticket.buffer, -1  # first: Ctrl-C must not have it freed a second time
        self._free.append(buffer)
        self.work.notify_all()
