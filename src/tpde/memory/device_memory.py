"""Device memory: how much this process could still allocate, and what to say when that is too little."""

from __future__ import annotations

import torch
from torch import Tensor

from tpde.errors import OutOfMemory

# A guess at what is worth a call that may wait for the device: what it costs was not measured.
_MUCH = 32 << 20


def gib(size: int) -> str:
    """A number of bytes for messages about memory."""
    return f"{size / (1 << 30):.2f} GiB"


def memory_fraction(device: torch.device) -> float | None:
    """The share of a device that PyTorch may allocate in this process; None if PyTorch is too old to say."""
    get = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    return None if get is None else float(get(device))


def memory_limit(device: torch.device) -> int:
    """Bytes of a device that PyTorch may allocate in this process, be they free or not."""
    fraction = memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total if fraction is None else fraction * total)


def free_bytes(device: torch.device) -> int:
    """Device memory that this process could still allocate: what is free, and what torch has kept."""
    free, _ = torch.cuda.mem_get_info(device)
    within = min(free + torch.cuda.memory_reserved(device), memory_limit(device))
    return max(int(within - torch.cuda.memory_allocated(device)), 0)


def give_back(device: torch.device) -> None:
    """Let a CUDA device have back what PyTorch keeps of freed tensors, if that is much.

    Else new tensors take parts of it, whose rest stays: of a model of 131 GiB that was packed in place on an
    H200, 19 GiB.

    Parameters
    ----------
    device : torch.device
        Another one has nothing to be given back.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if kept >= _MUCH:
            torch.cuda.empty_cache()


def require(nbytes: int, device: torch.device, what: str) -> None:
    """Refuse before anything is read if a device has too little free memory.

    Raises
    ------
    OutOfMemory
        Saying what is needed and what is free.
    """
    if device.type != "cuda":
        return
    free = free_bytes(device)
    if nbytes > free:
        raise OutOfMemory(
            f"{what} needs {gib(nbytes)} on {device}, {gib(free)} are free",
            hint="free some, spread the model over more GPUs (`device_map`), or use the CPU",
            where=str(device),
            found=free,
            needed=nbytes,
        )


def allocate(nbytes: int, device: torch.device, what: str) -> Tensor:
    """Bytes of device memory that a model cannot do without.

    Parameters
    ----------
    nbytes : int
        How many.
    device : torch.device
        Where.
    what : str
        They are for, for the message.

    Raises
    ------
    OutOfMemory
        Saying what is needed, what is free, and what to do.
    """
    try:
        # It is no operator of the model's: selective checkpointing would look for it in the second pass.
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        free = free_bytes(device)
        raise OutOfMemory(
            f"{what} needs {gib(nbytes)} on {device}, {gib(free)} are free"
            f"{' but not in one piece' if free >= nbytes else ''} of the {gib(memory_limit(device))} that "
            "PyTorch may allocate there",
            hint=(
                "free some, or load the model with another `vram`: a larger one if its budget is what is "
                "used up, a smaller one if others have the memory"
            ),
            where=str(device),
            found=free,
            needed=nbytes,
        ) from None
    except RuntimeError as error:
        if device.type != "cpu" or "DefaultCPUAllocator" not in str(error):  # which has no class of its own
            raise
        raise OutOfMemory(
            f"{what} needs {gib(nbytes)} of host memory, and the system refused",
            hint="free some",
            needed=nbytes,
        ) from None
