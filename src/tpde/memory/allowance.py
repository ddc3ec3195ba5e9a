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
from typing import NamedTuple

import torch

from tpde.errors import OutOfMemory
from tpde.memory.device_memory import gib, memory_fraction

# Smaller holes in PyTorch's segments are not counted on: most of what a plan places is larger.
HOLE = 32 << 20


class Held(NamedTuple):
    """What PyTorch's allocator holds of a device for this process, when it has given back what it can.

    Where tensors lie in a segment, the allocator keeps all of it: after a model that was loaded into one
    segment, as transformers does, a workspace of a few MiB may keep 15 GiB.

    Attributes
    ----------
    tensors : int
        Bytes of memory in use.
    reusable : int
        Bytes of holes of at least `HOLE` that tensors of the current stream can go to.
    rest : int
        What else it has reserved.
    """

    tensors: int
    reusable: int
    rest: int

    @property
    def counted(self) -> int:
        """Bytes that a new budget cannot use."""
        return self.tensors + self.rest

    @property
    def reserved(self) -> int:
        """All of it."""
        return self.tensors + self.reusable + self.rest


def held(device: torch.device) -> Held:
    """Give back what PyTorch can, and look at what it keeps of a CUDA device."""
    torch.cuda.empty_cache()
    reserved, tensors = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    reusable = _holes(device) if reserved - tensors >= HOLE else 0
    return Held(tensors, reusable, max(reserved - tensors - reusable, 0))


def _holes(device: torch.device) -> int:
    """Bytes of the holes that the current stream's tensors can go to: not those of CUDA graphs' pools."""
    stream = torch.cuda.current_stream(device).cuda_stream
    return sum(
        block["size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == device.index
        and segment["stream"] == stream
        and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] >= HOLE
    )


def describe(found: Held) -> str:
    """What is held, for messages."""
    idle = found.reusable + found.rest
    parts = f", {gib(found.tensors)} of it in tensors and {gib(idle)} unused" if idle else " in tensors"
    return gib(found.reserved) + parts


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
        What `Held.counted` was before anything was done for this budget: what has come since is a part of
        it. By default what it is now.

    Raises
    ------
    OutOfMemory
        If so much is not free, or PyTorch holds more already, or has a limit that is lower.

    Attributes
    ----------
    held : Held
        What PyTorch held of the device.
    others : int
        Bytes that the process had, beyond other budgets, that count towards this one.
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
        self.held = held(device)
        reserved = self.held.counted if reserved is None else min(reserved, self.held.counted)
        free, total = torch.cuda.mem_get_info(device)
        free += self.held.reserved - reserved
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
        # What was done for this budget, such as loading kernels, is planned for.
        kept = self.held.reserved - (self.held.counted - reserved) - planned
        if whole and kept > max(self._share, 0):
            raise OutOfMemory(
                f"`vram={gib(vram)}` is less than this process has of {device} already: PyTorch holds "
                f"{describe(self.held)}, and keeps whole what tensors lie in",
                hint=f"pass `vram` of at least {gib(kept + outside)}, delete those tensors, or load the "
                "model in another process",
                where="vram",
                found=vram,
                needed=kept + outside,
                least=kept + outside,
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
