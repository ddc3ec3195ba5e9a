"""Putting tensors into models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tpde.errors import InvalidInput


def misshapen(name: str, found: Sequence[int], needed: Sequence[int] | None, also: str = "") -> InvalidInput:
    """The error for a tensor of another shape than the model's; `also` is what else to do."""
    return InvalidInput(
        f"`{name}` has shape {list(found)} in the packed files, the model needs "
        f"{'none' if needed is None else list(needed)}",
        hint=f"load it with the configuration that it was packed with{also}",
        where=name,
        found=tuple(found),
        needed=None if needed is None else tuple(needed),
    )


def assign(model: nn.Module, name: str, tensor: torch.Tensor, *, frozen: bool = False) -> None:
    """Put a tensor in the place of a parameter or buffer.

    Parameters
    ----------
    model : nn.Module
        Which.
    name : str
        The parameter's or buffer's.
    tensor : torch.Tensor
        Of its shape.
    frozen : bool
        A parameter that requires no gradient stays so, as diffusers has it; transformers lets all of them.

    Raises
    ------
    InvalidInput
        If there is none, or it has another shape.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    is_buffer = leaf in module._buffers
    before = module._buffers[leaf] if is_buffer else module._parameters.get(leaf)
    if before is None or before.shape != tensor.shape:
        raise misshapen(name, tensor.shape, None if before is None else before.shape)
    if is_buffer:
        module._buffers[leaf] = tensor
        return
    trained = tensor.is_floating_point() and (before.requires_grad or not frozen)
    module._parameters[leaf] = nn.Parameter(tensor, requires_grad=trained)
