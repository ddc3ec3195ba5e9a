"""The PyTorch devices that callers name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpde.errors import UnsupportedDevice
from tpde.frameworks import require_torch

if TYPE_CHECKING:
    import torch


def parse_device(device: str | int | torch.device, where: str = "device") -> torch.device:
    """What PyTorch calls a device, whether it is there or not; a number is that of a GPU.

    Parameters
    ----------
    device : str, int or torch.device
        What the caller named.
    where : str
        The argument, for messages.

    Raises
    ------
    UnsupportedDevice
        If it is none.
    """
    import torch

    name = f"cuda:{device}" if isinstance(device, int) else device
    try:
        return torch.device(name)  # a number alone is refused where there is no GPU
    except (RuntimeError, TypeError):
        raise UnsupportedDevice(
            f"`{device!s:.50}` is no device", hint="use `cpu`, `cuda` or `cuda:N`", where=where, found=device
        ) from None


def target_device(device: str | int | torch.device, where: str = "device") -> torch.device:
    """The device that a caller wants tensors on, which is there.

    Parameters
    ----------
    device, where
        As of `parse_device`.

    Raises
    ------
    UnsupportedDevice
        If it is none, or PyTorch cannot put tensors on it.
    MissingDependency
        If there is no PyTorch.
    """
    require_torch("a device for tensors")
    import torch

    found = parse_device(device, where)
    try:
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, ImportError) as error:
        why = str(error).partition("\n")[0]
        raise UnsupportedDevice(
            f"PyTorch can put no tensors on `{found}` ({why:.150})",
            hint="use `cpu`, or see what `tpde doctor` finds",
            where=where,
            found=device,
        ) from error
    return found
