"""Plain tensors that lie beside each other in memory, and are copied to a device as one."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from tpde.io.sources import BytesSource, Extent
from tpde.memory.device_memory import free_bytes

# Of plain tensors that are on the device at a time, at most, and of what is free there.
_HELD_BYTES, _HELD_SHARE = 3 << 29, 8


class AdjacentTensors:
    """Tensors that lie beside each other, as those of a mapped file do.

    One copy for all, and one piece of memory: where a layer has 128 experts, a tensor has some 3 MB, and what
    it takes to have a thread copy it alone keeps other threads from running Python.
    """

    def __init__(self, first: Tensor) -> None:
        self.tensors = [first]
        self._begin, self._end = first.data_ptr(), first.data_ptr() + first.nbytes

    @property
    def nbytes(self) -> int:
        """Of all."""
        return self._end - self._begin

    def takes(self, tensor: Tensor) -> bool:
        """Take one that lies behind the last; otherwise it is False."""
        if tensor.data_ptr() != self._end or self.nbytes % tensor.itemsize:
            return False
        self.tensors.append(tensor)
        self._end += tensor.nbytes
        return True

    def extent(self, name: str) -> Extent:
        """Where its bytes are. They are there as long as the tensors."""
        data = (ctypes.c_ubyte * self.nbytes).from_address(self._begin)
        return Extent(BytesSource(memoryview(data), name), 0, self.nbytes, name)

    def views(self, room: Tensor) -> list[Tensor]:
        """The tensors in other memory."""
        ends = [it.data_ptr() + it.nbytes - self._begin for it in self.tensors]
        return [
            room[end - it.nbytes : end].view(it.dtype).view(it.shape)
            for it, end in zip(self.tensors, ends, strict=True)
        ]


def adjacent_of(tensors: Sequence[Tensor]) -> list[AdjacentTensors]:
    """Those that have bytes without gaps in host memory, in their order."""
    found: list[AdjacentTensors] = []
    for it in tensors:
        if it.device.type != "cpu" or it.nbytes == 0 or not it.is_contiguous():
            continue
        if not found or not found[-1].takes(it):
            found.append(AdjacentTensors(it))
    return found


class BoundedRoom:
    """Memory of a device for tensors, of which there may be so many bytes at a time.

    vLLM keeps a layer's tensors until the last has come. Of files in another order it would have most of a
    model there. With Qwen3-30B-A3B, PyTorch reserves 43.2 GiB of an H200 at most while it is loaded,
    41.3 where one thread copies (by hand).

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._held, self._most = device, 0, 0

    def look(self) -> None:
        """See what is free: layers that are packed take more and more."""
        self._most = min(_HELD_BYTES, self._held + free_bytes(self._device) // _HELD_SHARE)

    def room(self, size: int) -> Tensor | None:
        """So many bytes, given back when nobody has them or a view of them; None if that is more."""
        if size > self._most - self._held:
            return None
        try:
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError:  # what is free is in small parts
            self._most = 0
            return None
        self._held += size
        weakref.finalize(made.untyped_storage(), self._let_go, size).atexit = False
        return made

    def _let_go(self, size: int) -> None:
        self._held -= size
