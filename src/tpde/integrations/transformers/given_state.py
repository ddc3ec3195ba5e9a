"""`save_pretrained(state_dict=...)` of a packed model, where transformers looks at no given state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpde.errors import PackedWeight
from tpde.nn import PackedParameter

_NAMED = 3  # tensors in an error


def refuse_others(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse to save a state that is not the model's.

    Raises
    ------
    PackedWeight
        If one of its tensors is missing, or has other bits.
    """
    own: dict[str, Any] = model.state_dict()
    other = [name for name, it in given.items() if name not in own or not _is_same(own[name], it)]
    if not getattr(model, "_hf_peft_config_loaded", False):  # adapters alone are saved of one that has some
        there = {_memory(own[name]) for name in given if name in own}
        other += [name for name, it in own.items() if name not in given and _memory(it) not in there]
    if other:
        names = ", ".join(f"`{name}`" for name in other[:_NAMED]) + ", ..." * (len(other) > _NAMED)
        raise PackedWeight(
            f"`save_pretrained` was given a state that is not the model's: {len(other)} of "
            f"{len(own.keys() | given.keys())} tensors are others, or only in one of the two ({names}); a "
            "packed model is saved as it is",
            hint=("call `tpde.unpack_module(model)` first, or write the tensors with `tpde.torch.save_file`"),
        )


def _memory(tensor: Any) -> Any:
    """What tied tensors share."""
    return tensor.packed if isinstance(tensor, PackedParameter) else (tensor.data_ptr(), tensor.shape)


def _is_same(own: Tensor, given: Any) -> bool:
    """Whether a tensor has the bits of the model's."""
    if not isinstance(given, Tensor) or given.dtype is not own.dtype or given.shape != own.shape:
        return False
    mine, theirs = (it.packed if isinstance(it, PackedParameter) else it for it in (own, given))
    if mine is theirs:
        return True
    plain = (it if isinstance(it, Tensor) else it.decoded() for it in (mine, theirs))
    words = [it.detach().cpu().contiguous().view(-1).view(torch.uint8) for it in plain]
    return torch.equal(*words)
