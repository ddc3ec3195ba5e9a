"""The devices that a user names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.files.target_device import parse_device
from tpde.loading.machine import current

ON_CPU = 'run on the CPU with `device="cpu"` (`--device cpu`)'
WITHOUT_BUDGET = "`vram` is a budget of a GPU's memory: leave it out to run on the CPU"


def checked_device(device: str | int | torch.device | None, instead: str = ON_CPU) -> torch.device:
    """A device that exists, with its number; for None the GPU that PyTorch uses, or the CPU without one.

    Parameters
    ----------
    device : str, int or torch.device, optional
        What the user named.
    instead : str
        What to do where there is no GPU.

    Raises
    ------
    UnsupportedDevice
        If packed weights cannot be on such a device, or it is not there.
    """
    machine = current()
    if device is None:
        return machine.gpu() or torch.device("cpu")
    found = parse_device(device)
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(
            f"packed weights run on `cpu` and `cuda`, not on `{found.type}`", hint="use one of these"
        )
    if found.type == "cuda":
        there = machine.gpu(found.index)
        if there is not None:
            return there
        if machine.gpu() is None:
            raise UnsupportedDevice(
                "there is no CUDA device that PyTorch can use",
                hint=f"{instead}, or see what `tpde doctor` finds",
                where="device",
            )
        raise UnsupportedDevice(
            f"there is no `{found}`, the last device is `cuda:{torch.cuda.device_count() - 1}`",
            hint="use that",
        )
    return found


def check_gpu(device: Any, hint: str) -> None:
    """Refuse a budget of GPU memory where a model goes elsewhere.

    Parameters
    ----------
    device : str, int or torch.device
        Where it goes.
    hint : str
        What to do about it.

    Raises
    ------
    InvalidInput
        If that is no GPU.
    """
    elsewhere = {"cpu", "disk", "meta"} - {str(current().gpu())}  # a machine's GPU may be simulated
    if str(device) in elsewhere:
        raise InvalidInput(
            f"`vram` is a budget of GPU memory, but the model goes to `{device}`", hint=hint, where="vram"
        )


def map_entry(name: str, device_map: Mapping[str, Any]) -> str | None:
    """The key of a device map that a parameter falls under; None if there is none."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return name if name in device_map else None
