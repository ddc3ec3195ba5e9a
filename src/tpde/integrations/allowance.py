"""Budgets of device memory in this process.

A budget may be for everything that the process takes of a device beyond the bare CUDA context: what PyTorch
allocates, which its allocator is told to keep within limits, and what it does not (kernels, handles of
libraries), for which the budget has a fixed part. What the process had allocated before counts then. Or it is
for one model, and others come on top: then nothing holds the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tpde.errors import OutOfMemory
from tpde.memory import gib, memory_fraction


class _Budgets:
    """Those of one device that are in force, and PyTorch's limit there.

    Attributes
    ----------
    shares : dict of int to int
        Bytes of PyTorch's memory, by the allowances that they are for.
    holding : set of int
        The allowances that the whole process is held to.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total = torch.cuda.get_device_properties(device).total_memory
        self.shares: dict[int, int] = {}
        self.holding: set[int] = set()
        self._theirs: float | None = None  # the limit that others have set, while ours is in force
        self._ours: float | None = None  # what PyTorch says that ours is: it rounds to bytes

    def theirs(self) -> float:
        """The fraction of the device that PyTorch may allocate, but for these budgets.

        Old versions of PyTorch do not say; then it is taken to be all.
        """
        now = memory_fraction(self.device)
        if self._theirs is None or now != self._ours:  # nothing of ours is in force, or it was changed since
            return 1.0 if now is None else now
        return self._theirs

    def apply(self) -> None:
        """Hold the process to the budgets, or leave the limit as it would be without them."""
        theirs = self.theirs()
        if self.holding:
            self._limit(min(sum(self.shares.values()) / self.total, theirs))
            self._theirs, self._ours = theirs, memory_fraction(self.device)
        elif self._theirs is not None:
            self._limit(theirs)
            self._theirs = None

    def _limit(self, fraction: float) -> None:
        torch.cuda.memory.set_per_process_memory_fraction(fraction, self.device)


_lock = threading.Lock()
_budgets: dict[torch.device, _Budgets] = {}
_ended: deque[Allowance] = deque()  # whose limits are still there


def _settle() -> None:
    """Lift the limits of budgets that have ended, unless a thread is at it: then that does.

    It may be this one, in which garbage is collected, and a budget with it, while it holds the lock.
    """
    while _ended and _lock.acquire(blocking=False):
        try:
            _lift()
        finally:
            _lock.release()


def _lift() -> None:
    while _ended:
        _ended.popleft()._end()


@contextmanager
def _locked() -> Iterator[None]:
    try:
        with _lock:
            _lift()
            yield
    finally:
        _settle()


class Allowance:
    """A budget of a device's memory, in force from `start` until it is closed.

    Several on one device add up.

    Parameters
    ----------
    device : torch.device
        A CUDA device with its number.
    vram : int
        Bytes.
    outside : int
        How many of these are taken by others than PyTorch's allocator.
    whole : bool
        It is for the whole process, which is held to it. Otherwise it is for one model: what else the process
        takes comes on top, as far as no other budget holds it; such a one grows by this.
    reserved : int, optional
        Bytes that PyTorch's allocator held before anything was done for this budget: what it has got since
        is a part of it. By default what it holds now.

    Raises
    ------
    OutOfMemory
        If so much is not free, or PyTorch has a limit that is lower.

    Attributes
    ----------
    others : int
        Bytes that the process had allocated, beyond other budgets, that count towards this one.
    """

    def __init__(
        self,
        device: torch.device,
        vram: int,
        outside: int,
        *,
        whole: bool = True,
        reserved: int | None = None,
    ) -> None:
        self._share, self._whole = vram - outside, whole
        torch.cuda.empty_cache()
        now = torch.cuda.memory_reserved(device)
        reserved = now if reserved is None else min(reserved, now)
        free, total = torch.cuda.mem_get_info(device)
        free += now - reserved
        with _locked():
            if device not in _budgets:
                _budgets[device] = _Budgets(device)
            self._budgets = _budgets[device]
            planned = sum(self._budgets.shares.values())
            before, theirs = max(reserved - planned, 0), self._budgets.theirs()
        self.others = before if whole else 0
        # The fixed part may be taken already, if kernels have run.
        if self._share - self.others > free:
            raise OutOfMemory(
                f"`vram={gib(vram)}` is more than {device} has: {gib(free)} of {gib(total)} are free",
                hint="pass a smaller `vram`, or free some of the memory",
                where="vram",
            )
        left = int(theirs * self._budgets.total) - planned - (0 if whole else before)
        if theirs < 1.0 and self._share > left:
            raise OutOfMemory(
                f"`vram={gib(vram)}` is more than this process may take of {device}: PyTorch may allocate "
                f"{gib(max(left, 0))}, by `torch.cuda.set_per_process_memory_fraction`, and {gib(outside)} "
                "are for what it does not allocate",
                hint="pass a smaller `vram`, or raise that limit",
                where="vram",
            )

    def start(self, outside: int = 0) -> None:
        """Let PyTorch allocate no more, if the budget is for the whole process.

        Parameters
        ----------
        outside : int
            Bytes that others than PyTorch's allocator will take beyond what was known at first.
        """
        self._share -= outside
        with _locked():
            self._budgets.shares[id(self)] = self._share
            if self._whole:
                self._budgets.holding.add(id(self))
            self._budgets.apply()

    def close(self) -> None:
        """Lift the limit: to that of the other budgets, or what it was before. Closing again does nothing."""
        _ended.append(self)
        _settle()

    def _end(self) -> None:
        if self._budgets.shares.pop(id(self), None) is not None:
            self._budgets.holding.discard(id(self))
            self._budgets.apply()
