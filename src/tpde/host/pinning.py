"""Pinning ranges of files: locking them where they lie, or copies of them, in the background."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from tpde.errors import ReadError, UnsupportedDevice
from tpde.host.arena import THREADS as FILLING
from tpde.host.arena import Arena, fill, parts
from tpde.host.locking import VARIABLE, not_locked
from tpde.host.mapped import THREADS as POPULATING
from tpde.host.mapped import Mapping
from tpde.host.page_lock import PageLock, Refused, steps
from tpde.host.ranges import Range
from tpde.host.workers import NAME, staged


class _Stopped(Exception):
    """Nobody wants the rest."""


def not_there_any_more() -> ReadError:
    """What whoever wants bytes is told then."""
    return ReadError("the memory of the packed weights was given back", hint="load the model again")


class _Memory(Protocol):
    def close(self) -> None:
        """Unlock it and give it back."""


class _Piece(Protocol):
    """What is brought into memory at a time."""

    @property
    def size(self) -> int: ...


class _PinnedRange:
    """A range, and how much of it is where.

    Attributes
    ----------
    range : Range
        What it is.
    host, device : int or None
        Where its first page is for copies, and for kernels.
    there, locked : int
        How many bytes of its pages are there, from the first on; and locked, for kernels to read.
    used : bool
        Whether anybody was told where it is.
    """

    def __init__(self, it: Range) -> None:
        self.range = it
        self.host = 0
        self.device: int | None = None
        self.there = self.locked = 0
        self.used = False


class _Step(NamedTuple):
    """Pages of a range that are locked at once: bytes from its first."""

    pinned: _PinnedRange
    number: int
    at: int
    size: int


class Pinning:
    """Ranges that a thread of its own locks in place, or copies: as `tpde.host.pinned` says.

    One after the other, in steps: bytes can be used as soon as they are there. Where locking in place is
    refused, the range at hand and those after it are copied to an arena.

    Parameters
    ----------
    ranges : sequence of Range
        Of each file in order. Sources must stay open until `close`.
    page_lock : PageLock
        Of one of the devices that will read them.
    forced : {"mapped", "arena", "pageable"} or None
        The only mode that will do.
    total : int
        Bytes to report.

    Attributes
    ----------
    kind : str
        The last mode so far.
    locked_bytes, private_bytes : int
        So far.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        page_lock: PageLock,
        forced: str | None,
        total: int,
    ) -> None:
        self.kind, self.locked_bytes, self.private_bytes = forced or "mapped", 0, 0
        self._ranges, self._page_lock, self._forced = ranges, page_lock, forced
        self._pinned = [_PinnedRange(it) for it in ranges]
        self._memory: list[_Memory] = []
        self._error: BaseException | None = None
        self._ended = self._stopped = self._given_back = False
        self._changed = threading.Condition()
        self._total, self._told = total, 0
        self._progress: Callable[[int], None] | None = None
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    # ---- whoever uses it ----

    def start(self, progress: Callable[[int], None] | None) -> None:
        """Begin, unless it has begun or was stopped.

        Ctrl-C may come here: by now somebody must know that this is to be closed.

        Parameters
        ----------
        progress : callable, optional
            Called with numbers of bytes, in the thread.
        """
        if self._thread.ident is not None:  # asked again for each piece that is copied
            return
        with self._changed:
            if self._thread.ident is None and not self._stopped:
                self._progress = progress
                self._thread.start()

    def there(self, number: int, end: int) -> bool:
        """Whether a range is there, up to byte `end` of its pages."""
        return self._pinned[number].there >= end

    def host(self, number: int, end: int) -> int:
        """Where a range is, once it is there up to byte `end` of its pages: only if this has begun.

        Raises
        ------
        Truncated, ReadError, OutOfMemory, UnsupportedDevice
            If it could not be pinned, and whatever `progress` raised.
        """
        return self._find(number, end)[0]

    def device(self, number: int, end: int) -> int | None:
        """Where kernels find it then; None if it is not locked as far. Raises what `host` does."""
        return self._find(number, end)[1]

    def _find(self, number: int, end: int) -> tuple[int, int | None]:
        pinned = self._pinned[number]
        with self._changed:
            self._changed.wait_for(lambda: pinned.there >= end or self._ended)
            if pinned.there < end:
                self._raise()
            pinned.used = True
            return pinned.host, pinned.device if pinned.locked >= end else None

    def wait(self) -> None:
        """Wait for all of them, if this has begun. Raises what `host` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        if self._error is not None:
            self._raise()

    def _raise(self) -> None:
        """Raise the error as a new one: what is raised knows the callers' frames, and with them the model."""
        error = self._error
        assert error is not None
        new = type(error).__new__(type(error), *error.args)
        new.__dict__.update(error.__dict__)
        raise new.with_traceback(error.__traceback__) from error.__cause__

    def stop(self) -> None:
        """Pin no more: returns when the thread has ended, after the piece that it is at.

        At once in one of these threads: where garbage is collected there, this one may be waiting for it.
        """
        with self._changed:
            if self._thread.ident is None:  # or not yet: then it finds that it was stopped
                self._error = self._error or not_there_any_more()
                self._ended = True
            self._stopped = True
        if self._thread.ident is not None and not threading.current_thread().name.startswith(NAME):
            self._thread.join()

    def close(self) -> None:
        """Stop, unlock everything and give it back; the thread does if it has not ended."""
        with self._changed:
            self._given_back = True
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
            with self._changed:  # after `stop`, if that came first
                self._report(0)
            if self._forced in {None, "mapped"}:
                self._in_place()
            first = next((i for i, it in enumerate(self._pinned) if it.there < it.range.size), None)
            if first is not None:
                self._copy(first)
            self._report(self._total)
        except _Stopped:
            self._error = not_there_any_more()
        except BaseException as error:  # of the progress bar too
            self._error = error
            traceback.clear_frames(error.__traceback__)
        finally:
            self._progress = None  # it may know the model, which this must not keep, as those frames may
            with self._changed:
                self._ended, given_back = True, self._given_back
                self._changed.notify_all()
            if given_back:
                self._free()

    def _steps(self, first: int, starts: Sequence[int]) -> list[_Step]:
        """What is locked at once, of ranges that lie at these addresses."""
        return [
            _Step(pinned, number, at, size)
            for number, (pinned, start) in enumerate(zip(self._pinned[first:], starts, strict=True))
            for at, size in steps(start, pinned.range.size, self._page_lock.step)
        ]

    def _put(self, step: _Step, start: int, *, locked: bool) -> None:
        """A step of a range that starts at an address is there."""
        pinned, end = step.pinned, step.at + step.size
        device = self._page_lock.device_address(start + step.at) if locked else None
        with self._changed:
            if not step.at:
                pinned.host, pinned.device, pinned.locked = start, device, 0
            # Kernels read on from where the step before ended: never seen otherwise, but not promised.
            if locked and pinned.locked == step.at and device is not None and pinned.device is not None:
                pinned.locked = end if device == pinned.device + step.at else pinned.locked
            pinned.there = end
            self.locked_bytes += step.size if locked else 0
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

    def _counter(self, first: int) -> Callable[[_Piece], None]:
        """What reports pieces of the ranges from one on."""
        done = sum(it.size for it in self._ranges[:first])

        def count(piece: _Piece) -> None:
            nonlocal done
            done += piece.size
            self._report(done)

        return count

    def _in_place(self) -> None:
        """Lock ranges where they lie, while the next ones' pages are brought in; until that is refused."""
        try:
            mapping = Mapping(self._ranges, self._page_lock)
        except Refused as error:
            self._refused(error)
            return
        self._memory.append(mapping)
        todo = self._steps(0, mapping.starts)

        def put(number: int) -> None:
            step = todo[number]
            mapping.lock(step.number, step.at, step.size)
            self._put(step, mapping.starts[step.number], locked=True)

        pages = [mapping.pieces(step.number, step.at, step.size) for step in todo]
        try:
            staged(pages, mapping.populate, POPULATING, put, self._counter(0))
        except Refused as error:
            self._refused(error)
            self._undo(mapping)

    def _refused(self, error: Refused) -> None:
        """Locking in place is, which is an error only if it was forced."""
        if self._forced is not None:
            raise UnsupportedDevice(
                f"the packed files cannot be page-locked in place: {error}",
                hint=f"unset `{VARIABLE}` to copy them",
            ) from error

    def _undo(self, mapping: Mapping) -> None:
        """Unlock what is locked of the range at hand, which is copied as a whole, if nobody uses it."""
        number = next(i for i, it in enumerate(self._pinned) if it.there < it.range.size)
        with self._changed:
            pinned = self._pinned[number]
            if pinned.used:
                return
            undone, pinned.there, pinned.locked = pinned.there, 0, 0
        mapping.unlock(number)
        self.locked_bytes -= undone

    def _copy(self, first: int) -> None:
        """Fill an arena, each step being locked while the next ones are read."""
        ranges = self._ranges[first:]
        offsets = list(accumulate((it.size for it in ranges), initial=0))
        arena = Arena(offsets.pop())
        self._memory.append(arena)
        self.private_bytes += arena.size
        self.kind = "pageable" if self._forced == "pageable" else "arena"
        todo = self._steps(first, [arena.address + it for it in offsets])

        def put(number: int) -> None:
            step = todo[number]
            at = offsets[step.number] + step.at
            if self.kind != "pageable":
                try:
                    arena.lock(self._page_lock, at, step.size)
                except Refused as error:
                    not_locked(error, arena.size - at, self._forced, "the memory of the packed weights")
                    self.kind = "pageable"
            self._put(step, arena.address + offsets[step.number], locked=self.kind != "pageable")

        work = [parts(ranges[it.number], offsets[it.number], it.at, it.size) for it in todo]
        staged(work, lambda part: fill(arena, part), FILLING, put, self._counter(first))
