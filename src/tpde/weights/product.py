"""Products with packed weights that are multiplied as they are, in eager code."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, is_grad_enabled
from torch._subclasses.fake_tensor import FakeTensor

from tpde.weights.launch import capturing
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.transforms import forward_mode, refuse_trace, transformed

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


def linear(packed: PackedTensor, x: Tensor, bias: Tensor | None, trained: bool) -> Tensor | None:
    """`x @ W.T + bias`, as `torch.nn.functional.linear` would be called.

    Parameters
    ----------
    packed : PackedTensor
        A weight that `multiplies`.
    x, bias
        What the function was called with.
    trained : bool
        What the plain weight says of gradients: PyTorch chooses kernels by it.

    Returns
    -------
    torch.Tensor or None
        None if it must be computed from the decoded weight: of other dtypes, of subclasses of tensors, within
        transforms of `torch.func`, with forward-mode gradients, of what autocast casts once for several
        layers, and for what raises an error, which is then PyTorch's own.

    Raises
    ------
    PackedWeight
        Within a tracer: see `refuse_trace`.
    """
    refuse_trace(packed.name)
    if len(packed.shape) != 2:
        return None
    if type(x) not in _PLAIN or x.is_nested or (bias is not None and type(bias) not in _PLAIN):
        return None
    if transformed() or forward_mode():
        return None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        if not casts(x) or (bias is not None and not casts(bias)):
            return None
        if is_grad_enabled() and _cast_once(x):
            return None
        to = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(to), None if bias is None else bias.to(to)
    source = packed.parts[0][0]
    device, rows, columns = source.device, *packed.shape
    fits = x.dim() and x.shape[-1] == columns and x.layout is torch.strided
    if not fits or x.dtype is not packed.dtype or x.device != device:
        return None
    if bias is not None and (bias.dtype is not packed.dtype or bias.device != device or bias.dim() != 1):
        return None
    if bias is not None and len(bias) != rows:
        return None
    if capturing(device):
        source.recorded = True
    grads = is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    # Where somebody counts operators, or records them, or asks for sizes alone.
    if grads or torch._C._len_torch_dispatch_stack() or type(x) is FakeTensor:
        return cast(Tensor, torch.ops.tpde.linear(x, bias, packed.key, rows, False, trained))
    return packed.product(x, bias, trained)


def casts(tensor: Tensor) -> bool:
    """Whether autocast gives a tensor another dtype."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _cast_once(x: Tensor) -> bool:
    """Whether autocast keeps a tensor's cast for all who take it: their gradients are then summed in it."""
    leaf = x.dtype is torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
    return leaf and torch.is_autocast_cache_enabled()
