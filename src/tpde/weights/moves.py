"""Moving a packed weight: elsewhere it stays packed, in another dtype it is an ordinary tensor."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.readonly import Function


class Movable(Protocol):
    """A packed parameter, as this module takes it: `tpde.weights.parameter.PackedParameter` is one."""

    packed: PackedTensor
    memory_format: torch.memory_format

    def plain(self, room: int = 0) -> Tensor:
        """The weight decoded."""

    def like(self, packed: PackedTensor) -> Tensor:
        """Another packed weight, in a parameter that says the same of gradients and memory format."""


# Device, dtype, whether to wait, and memory format, of what `tensor.to` is called with.
_Parsed = tuple[torch.device | None, torch.dtype | None, bool, torch.memory_format | None]
_parse_to = cast(Function[_Parsed], torch._C._nn._parse_to)  # it says itself what it does not take


def to(func: object, weight: Movable, *args: object, copy: bool = False, **kwargs: object) -> Tensor:
    """Elsewhere, the weight stays packed; in another dtype, it is an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        device, dtype, _, memory_format = _parse_to(*args, **kwargs)
    if memory_format not in (None, torch.preserve_format, weight.memory_format):
        return weight.plain().to(device=device, dtype=dtype, memory_format=memory_format)
    return moved(weight, device, dtype, copy)


def moved(
    weight: Movable, device: torch.device | None, dtype: torch.dtype | None, copies: bool = False
) -> Tensor:
    """The weight on a device and in a dtype; None leaves either as it is."""
    packed = weight.packed
    if dtype is not None and dtype != packed.dtype:
        return weight.plain().to(device=device, dtype=dtype)
    there = device is None or device == packed.device or (device.type == "cuda" and device.index is None)
    if there and device is not None and device.type != packed.device.type:
        there = False
    if there and not copies:
        return cast(Tensor, weight)

    def copy(blob: Tensor) -> Tensor:
        return blob.clone() if there else blob.to(device, copy=True)

    packed.check(copy)
    return weight.like(packed.clone(copy))


def cpu(func: object, weight: Movable, **kwargs: object) -> Tensor:
    """`tensor.cpu`."""
    return moved(weight, torch.device("cpu"), None)


def cuda(
    func: object,
    weight: Movable,
    device: torch.device | str | int | None = None,
    *args: object,
    **kwargs: object,
) -> Tensor:
    """`tensor.cuda`."""
    there = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    return moved(weight, there, None)
