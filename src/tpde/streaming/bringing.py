"""Bringing ranges of files into memory that devices copy from, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from tpde.errors import ReadError, UnsupportedDevice
from tpde.streaming import lock
from tpde.streaming.arena import Arena, fill
from tpde.streaming.mapping import Mapping
from tpde.streaming.modes import VARIABLE, not_locked
from tpde.streaming.parallel import NAME, overlapped
from tpde.streaming.ranges import Range


class _Stopped(Exception):
    """Nobody wants the rest."""


class _Memory(Protocol):
    def close(self) -> None:
        """Unlock it and give it back."""


class Place:
    """Where a range is: `host` for copies, `device` for kernels, which is None if it is not locked."""

    __slots__ = ("device", "host")

    def __init__(self, host: int, device: int | None) -> None:
        self.host, self.device = host, device


class Bringing:
    """Ranges that a thread of its own locks in place, or copies: as `tpde.streaming.host` says.

    One after the other, the first of them first: each can be used as soon as it is there. Where locking in
    place is refused for one, it and those after it are copied to an arena.

    Parameters
    ----------
    ranges : sequence of Range
        Of each file in order. Sources must stay open until `close`.
    device : int
        One of the devices that will read them.
    forced : {"mapped", "arena", "pageable"} or None
        The only mode that will do.
    held : bool
        Lock nothing before `release` is called.
    total : int
        Bytes to report.
    progress : callable, optional
        Called with numbers of bytes, in the thread.

    Attributes
    ----------
    kind : str
        The mode of the last range so far.
    locked_bytes, private_bytes : int
        So far.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        device: int,
        forced: str | None,
        held: bool,
        total: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.kind, self.locked_bytes, self.private_bytes = forced or "mapped", 0, 0
        self._ranges, self._device, self._forced = ranges, device, forced
        self._places: list[Place] = []  # of the ranges that are there
        self._memory: list[_Memory] = []
        self._error: BaseException | None = None
        self._ended = self._stopped = False
        self._held = held
        self._changed = threading.Condition()
        self._total, self._progress, self._told = total, progress, 0
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    # ---- whoever uses it ----

    def there(self, number: int) -> bool:
        """Whether a range is there."""
        return number < len(self._places)

    def place(self, number: int) -> Place:
        """Where a range is, once it is there.

        Raises
        ------
        Truncated, ReadError, OutOfMemory, UnsupportedDevice
            If it could not be brought, and whatever `progress` raised.
        """
        if number >= len(self._places):
            with self._changed:
                self._changed.wait_for(lambda: number < len(self._places) or self._ended)
            if number >= len(self._places):
                self._raise()
        return self._places[number]

    def wait(self) -> None:
        """Wait for all of them. Raises what `place` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        if self._error is not None:
            self._raise()

    def _raise(self) -> None:
        assert self._error is not None
        raise self._error

    def release(self) -> None:
        """Let ranges be locked from now on."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Bring no more: returns when the thread has ended, after the piece that it is at.

        At once in one of these threads: where garbage is collected there, this one may be waiting for it.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if not threading.current_thread().name.startswith(NAME):
            self._thread.join()

    def close(self) -> None:
        """Stop, unlock everything and give it back; the thread does if it has not ended."""
        self.stop()
        if self._ended:
            self._free()

    def _free(self) -> None:
        with self._changed:
            memory, self._memory = self._memory, []
        for it in reversed(memory):
            it.close()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            if self._forced in {None, "mapped"}:
                self._in_place()
            if len(self._places) < len(self._ranges):
                self._copy(len(self._places))
            self._report(self._total)
        except _Stopped:
            self._error = ReadError("the memory of the packed weights was given back; load the model again")
        except BaseException as error:  # of the progress bar too
            self._error = error
        finally:
            with self._changed:
                self._ended, stopped = True, self._stopped
                self._changed.notify_all()
            if stopped:
                self._free()

    def _wait_for_release(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._stopped)
        if self._stopped:
            raise _Stopped

    def _put(self, host: int, device: int | None) -> None:
        with self._changed:
            self._places.append(Place(host, device))
            self._changed.notify_all()

    def _report(self, done: int) -> None:
        """Report bytes: as many as there are in all, even where a second attempt is needed."""
        if self._stopped:
            raise _Stopped
        more = min(done, self._total) - self._told
        if more > 0:
            self._told += more
            if self._progress is not None:
                self._progress(more)

    def _counter(self, first: int) -> Callable[[int], None]:
        """What reports bytes of the ranges from one on."""
        done = sum(it.size for it in self._ranges[:first])

        def count(size: int) -> None:
            nonlocal done
            done += size
            self._report(done)

        return count

    def _in_place(self) -> None:
        """Lock ranges where they lie, while the next one's pages are brought in; until one is refused."""
        report = self._counter(0)

        def put(number: int) -> None:
            self._wait_for_release()
            mapping.lock(number)
            start = mapping.starts[number]
            self.locked_bytes += self._ranges[number].size
            self._put(start, lock.device_address(start, self._device))

        try:
            mapping = Mapping(self._ranges, self._device)
            self._memory.append(mapping)
            overlapped(range(len(self._ranges)), lambda number: mapping.populate(number, report), put)
        except lock.Refused as error:
            if self._forced is not None:
                raise UnsupportedDevice(
                    f"the packed files cannot be page-locked in place: {error}; unset `{VARIABLE}` to copy "
                    "them"
                ) from error

    def _copy(self, first: int) -> None:
        """Fill an arena, each range being locked while the next one is read."""
        ranges, report = self._ranges[first:], self._counter(first)
        offsets = list(accumulate((it.size for it in ranges), initial=0))
        arena = Arena(max(offsets[-1], 1))
        self._memory.append(arena)
        self.private_bytes += arena.size
        self.kind = "pageable" if self._forced == "pageable" else "arena"

        def put(number: int) -> None:
            at, size = offsets[number], ranges[number].size
            host, device = arena.address + at, None
            if self.kind != "pageable":
                self._wait_for_release()
                try:
                    arena.lock(self._device, at, size)
                except lock.Refused as error:
                    not_locked(error, arena.size - at, self._forced, "the memory of the packed weights")
                    self.kind = "pageable"
                else:
                    self.locked_bytes += size
                    device = lock.device_address(host, self._device)
            self._put(host, device)

        overlapped(
            range(len(ranges)), lambda number: fill(arena, offsets[number], ranges[number], report), put
        )
