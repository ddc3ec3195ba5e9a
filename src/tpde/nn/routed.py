"""Forward passes of mixture-of-experts modules, computed straight from the window layout.

Known are those modules of transformers that its own functions compute too (`experts_implementation`): they
say by attributes what is between the two products. Whatever else there is, decodes its weights.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tpde.nn.group import GroupSlot
from tpde.nn.routing import CHOICE, KNOWN
from tpde.weights.launch import capturing
from tpde.weights.transforms import refuse_trace, transformed

_MODULE = "transformers.integrations.moe"  # whose decorator such classes have
_PLAIN = (Tensor, nn.Parameter)


@functools.cache
def arguments_of(kind: Any) -> tuple[str, str, str] | None:
    """What a class calls its tokens, the router's choice and its weights; None if it is not known."""
    if getattr(kind.forward, "__globals__", {}).get("__name__") != _MODULE:
        return None
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return (names[0], names[1], names[2]) if len(names) == 3 and names[1] in CHOICE else None


def projections(module: Any) -> tuple[str, str]:
    """The names of the weights of an experts module that is known."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def why_not(module: Any) -> str | None:
    """Why a module's experts cannot be multiplied from windows; None if they can."""
    kind: Any = getattr(module, "tpde_base", type(module))
    if arguments_of(kind) is None:
        return "their forward pass is their own"
    if not _is_ours(module):
        how = getattr(getattr(module, "config", None), "_experts_implementation", None)
        return "they are spread over devices" if how in KNOWN else f"{how!r} computes them"
    names = projections(module)
    held = [module._parameters.get(name) for name in names]
    if any(it is None or it.dim() != 3 for it in held):
        return "their weights are not those that are known"
    return None


def _is_ours(module: Any) -> bool:
    config = getattr(module, "config", None)
    known = getattr(config, "_experts_implementation", None) in KNOWN
    return known and not getattr(module, "_is_expert_parallel", False)


class Routed(NamedTuple):
    """A call of an experts module that is computed from windows."""

    up: GroupSlot
    down: GroupSlot
    x: Tensor
    chosen: Tensor
    scores: Tensor
    biases: tuple[Tensor | None, Tensor | None]


def routed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Routed | None:
    """A call of an experts module, if it is computed from windows.

    That is one of not too many tokens in bf16 on a GPU, of which no gradient is asked for: `Experts.fits`.
    """
    slots = module.tpde_slots
    up, down = (slots.get(name) for name in projections(module))
    if up is None or down is None or not (up.packed.of_experts and down.packed.of_experts):
        return None
    if not is_compiling():
        refuse_trace(up.packed.name)
    names = module.tpde_arguments
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) + len(kwargs) != 3 or any(type(given.get(name)) not in _PLAIN for name in names):
        return None
    x, index, scores = (given[name] for name in names)
    biases = None, None
    if module.has_bias:
        biases = getattr(module, f"{up.name}_bias"), getattr(module, f"{down.name}_bias")
    call = Routed(up, down, x, index, scores, biases)
    return call if _is_ours(module) and _shapes_fit(call) and _can_compute(module, call) else None


def _shapes_fit(call: Routed) -> bool:
    x, index, scores, device = call.x, call.chosen, call.scores, call.up.device
    if x.dim() != 2 or index.dim() != 2 or index.shape != scores.shape or index.shape[0] != x.shape[0]:
        return False
    first, second = call.up.packed.experts, call.down.packed.experts
    return (
        first.fits(*index.shape)
        and second.fits(*index.shape)
        and x.shape[1] == first.columns
        and x.dtype is torch.bfloat16
        and index.dtype is torch.int64
        and x.device == index.device == scores.device == device
        and call.down.device == device
        and all(it is None or (it.dtype is x.dtype and it.device == device) for it in call.biases)
    )


def _can_compute(module: Any, call: Routed) -> bool:
    """Whether nothing about the call, but what it is given, takes the plain weights."""
    kind = call.x.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not torch.bfloat16:
        return False
    if is_grad_enabled() and any(
        it is not None and it.requires_grad for it in (call.x, call.scores, *call.biases)
    ):
        return False
    if is_compiling():
        return True
    held = module._parameters
    own = all(held.get(slot.name) is slot.parameter for slot in (call.up, call.down))
    return own and not transformed() and forward_ad._current_level < 0


def from_windows(module: Any, call: Routed) -> Tensor:
    """The forward pass: both products with what is between them, and each token's sum over its experts."""
    tokens, each = call.chosen.shape
    ids = call.chosen.reshape(-1)
    y = _product(call.up, call.x, ids, each, call.biases[0], tokens)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = _product(call.down, y, ids, 1, call.biases[1], tokens)
    if getattr(module, "has_post_expert_norm", False):  # older transformers know no such modules
        y = module.post_expert_norm(y)
    weighted = y * call.scores.reshape(-1, 1)
    return weighted.view(tokens, each, -1).sum(1).to(call.x.dtype)


def _product(slot: GroupSlot, x: Tensor, ids: Tensor, per: int, bias: Tensor | None, tokens: int) -> Tensor:
    if is_compiling() or torch._C._len_torch_dispatch_stack():  # somebody counts operators, or records them
        width = slot.packed.experts.width
        return cast(Tensor, torch.ops.tpde.experts_linear(x, ids, bias, slot.key, width, tokens))
    if capturing(slot.device):
        slot.packed.sources[0].recorded = True
    return slot.experts_product(x, ids, per, bias, tokens)
