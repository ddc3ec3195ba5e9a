"""Holding this process to a budget of device memory.

A budget is for everything that the process takes of a device beyond the bare CUDA context: what PyTorch
allocates, which its allocator is told to keep within limits, and what it does not (kernels, handles of
libraries), for which the budget has a fixed part. What the process had allocated before counts too.
"""

from __future__ import annotations

import threading

import torch

from tpde.errors import OutOfMemory
from tpde.memory import gib

_lock = threading.Lock()
_shares: dict[torch.device, dict[int, int]] = {}  # of PyTorch's memory, by the allowances that they are for


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

    Raises
    ------
    OutOfMemory
        If so much is not free.

    Attributes
    ----------
    others : int
        Bytes that the process had allocated, beyond other budgets. They count towards this one.
    """

    def __init__(self, device: torch.device, vram: int, outside: int) -> None:
        self.device, self.vram = device, vram
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        with _lock:
            self.others = max(reserved - sum(_shares.setdefault(device, {}).values()), 0)
            # The fixed part may be taken already, if kernels have run.
            if vram - self.others - outside > free:
                raise OutOfMemory(
                    f"`vram={gib(vram)}` is more than {device} has: {gib(free)} of {gib(total)} are free; "
                    "pass a smaller `vram`, or free some of the memory"
                )
        self._share = vram - outside

    def start(self) -> None:
        """Let PyTorch allocate no more."""
        with _lock:
            _shares[self.device][id(self)] = self._share
            _limit(self.device)

    def close(self) -> None:
        """Lift the limit, or lower it to the other budgets' of this device. Closing again does nothing."""
        with _lock:
            if _shares.get(self.device, {}).pop(id(self), None) is not None:
                _limit(self.device)


def _limit(device: torch.device) -> None:
    shares = _shares[device]
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = min(sum(shares.values()) / total, 1.0) if shares else 1.0
    torch.cuda.memory.set_per_process_memory_fraction(fraction, device)
