"""What a run takes of memory, and what to say when there is not enough."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tpde.errors import OutOfMemory
from tpde.memory.device_memory import free_bytes, gib
from tpde.nn import PackedParameter


class Peak:
    """The most memory that this process takes from now on.

    On a GPU: what it takes of the card beyond what is taken now, counting all that is not free, whoever
    took it; on the CPU: the process's largest resident set so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(device)
            self._free = free_bytes(device)

    def bytes(self) -> int:
        """The peak so far."""
        if self._device.type != "cuda":
            import resource

            # Linux counts KiB, macOS bytes.
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
                1 if sys.platform == "darwin" else 1024
            )
        free, _ = torch.cuda.mem_get_info(self._device)
        back = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
        return int(self._free - free + back)


@contextmanager
def explained(device: torch.device, what: str) -> Iterator[None]:
    """Turn running out of device memory into an error that says what is free."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        wanted = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
        raise OutOfMemory(
            f"{what} needs {wanted or 'more memory'} more on {device}, {gib(free_bytes(device))} are free",
            hint="use a shorter text or fewer tokens, another GPU, or the CPU",
            where=str(device),
        ) from None


def weight_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of a model's packed weights, of the same ones plain, and of those that are stored plain."""
    packed = {id(it.packed): it.packed for it in model.parameters() if isinstance(it, PackedParameter)}
    plain = [it for it in model.parameters() if not isinstance(it, PackedParameter)]
    return {
        "packed_bytes": sum(it.packed_bytes for it in packed.values()),
        "unpacked_bytes": sum(it.nbytes for it in packed.values()),
        "plain_bytes": sum(it.numel() * it.element_size() for it in plain),
    }


class MemoryFootprintMethod:
    """`get_memory_footprint` of a packed model of transformers: packed weights count as what they take.

    It takes the place of the method in the model's own attributes.

    Parameters
    ----------
    model : PreTrainedModel
        Not held, but what it is made of: else a model that nobody uses would stay, or, in
        `tpde.from_pretrained(path).get_memory_footprint()`, be gone before this is called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parts = model._parameters, model._buffers, model._modules

    def __call__(self, return_buffers: bool = True) -> int:
        """Bytes of parameters, and of buffers if asked for."""
        model = torch.nn.Module()
        model._parameters, model._buffers, model._modules = self._parts
        sizes = weight_bytes(model)
        buffers = sum(it.numel() * it.element_size() for it in model.buffers()) if return_buffers else 0
        return sizes["packed_bytes"] + sizes["plain_bytes"] + buffers
