"""How linear layers and experts are computed: as plain ones are, or straight from packed weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tpde.errors import InvalidInput, PackedWeight
from tpde.files.given_tensors import require_module
from tpde.memory.device_memory import give_back
from tpde.nn.embedding import PackedEmbedding, gathers
from tpde.nn.group import GroupSlot
from tpde.nn.modules import PackedLinear, PackedModule
from tpde.nn.replace import finish, packed_modules
from tpde.nn.routed import projections, why_not
from tpde.nn.routing import fused as of_experts
from tpde.weights.active_delta import ALWAYS
from tpde.weights.expert_products import can_be_experts
from tpde.weights.experts_in_windows import experts_in_windows
from tpde.weights.frozen import CONTIGUOUS
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident
from tpde.weights.source import Source
from tpde.weights.windowed import Windowed

log = logging.getLogger("tpde")

Kernels = Literal["exact", "fused"]
# Of the plain weight's bytes. Windows take 0.69, and as much more as the share of words that are escapes, on
# which a product also spends instructions.
MOST_SHARE = 0.85
TOO_LARGE = f"windows would take more than {MOST_SHARE} of their bytes"


def check_kernels(kernels: Any) -> Kernels:
    """What `kernels` may be.

    Raises
    ------
    InvalidInput
        If it is something else.
    """
    if kernels not in get_args(Kernels):
        raise InvalidInput(
            f"`kernels` is {kernels!r}", hint='say "exact" or "fused"', where="kernels", found=kernels
        )
    return kernels  # type: ignore[no-any-return]


def set_kernels(model: nn.Module, kernels: Kernels) -> nn.Module:
    """Say how a packed model is computed: exactly as the plain one, or straight from packed weights.

    With `"exact"`, weights are decoded, and PyTorch multiplies: outputs are the plain model's, bit for bit.
    With `"fused"`, bf16 weights are put in the window layout (docs/windows.md), about 11.25 bits each, and up
    to 64 rows of inputs at a time are multiplied by kernels that decode on the way. On an H100 that is 1.55
    times as fast as multiplying with plain weights with one row, 1.45 times with 16, 1.2 with 64. Every
    weight is exact. Sums are in fp32, in an order that depends on the number of columns alone: a row's result
    has the same bits in every such batch, but not those of the plain model. So it is with experts, of up to
    64 tokens; on other GPUs than Hopper's of up to 512, or 32 rows an expert. Gradients take decoded weights,
    and so do longer inputs, or on Hopper GPUs, where that is faster, other kernels that decode on the way.

    Parameters
    ----------
    model : nn.Module
        Packed, on any devices. On the CPU, weights in the window layout are decoded and multiplied as plain
        ones.
    kernels : {"exact", "fused"}
        Which.

    Returns
    -------
    nn.Module
        `model`.

    Raises
    ------
    InvalidInput
        If `kernels` is something else, or `model` no module.
    PackedWeight
        If weights are streamed or in the window layout under a VRAM budget, have named deltas, or were
        recorded in a CUDA graph.
    UnsupportedDevice, MissingDependency, CompileError
        If weights are on a GPU that the kernels cannot run on.

    Notes
    -----
    In the window layout are the weights of `nn.Linear` layers, of embeddings that are tied to them, and of
    experts whose classes transformers' own functions compute (its `experts_implementation` "eager",
    "batched_mm" or "grouped_mm"), where that takes at most 0.85 of the plain weight. Others stay as they are:
    other experts, which the logger `tpde` names, convolutions, other dtypes, and those that
    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take from their layers. The logger warns if none
    is left. What is saved is packed in prefix codes, as ever. Weights are converted one at a time; beside
    them, one plain weight and its blob are in memory, of experts both weights' blobs. No forward pass may be
    under way in another thread.

    Examples
    --------
    >>> model = tpde.from_pretrained("packed", device="cuda")  # doctest: +SKIP
    >>> tpde.nn.set_kernels(model, "fused")  # doctest: +SKIP
    """
    require_module(model, "set_kernels")
    check_kernels(kernels)
    uses = _uses(model)
    fused, taken = kernels == "fused", taken_by_others(model)
    work = [_Work([it]) for it in uses if it.multiplies and not fused]
    if fused:
        work = [_Work([it]) for it, places in uses.items() if not it.multiplies and _fits(it, places, taken)]
        work += _experts(model, uses)
    for packed in (it for some in work for it in some.weights):
        _require_free(packed)
    large = set[str]()
    try:
        for some in work:
            give_back(some.weights[0].sources[0].device)
            if not convert(some, fused) and some.kind:
                large.add(some.kind)
        for device in {some.weights[0].sources[0].device for some in work}:
            give_back(device)
    finally:  # those that were converted are not decoded with their blocks any more, or are again
        if any(_is_misplaced(module, slot) for places in uses.values() for module, slot in places):
            finish(model)
    if fused:
        tell_experts(dict.fromkeys(sorted(large), TOO_LARGE))
        tell_if_none(model)
    return model


def tell_if_none(model: nn.Module) -> None:
    """Warn if no weight of a model that was to have fused kernels is in the window layout."""
    uses, taken = _uses(model), taken_by_others(model)
    if any(it.multiplies for it in uses):
        return
    if any(it.dtype is torch.bfloat16 and _fits(it, places, taken) for it, places in uses.items()):
        why = TOO_LARGE
    else:
        found = {(it.dtype, module.tpde_base.__name__) for it, places in uses.items() for module, _ in places}
        kinds = sorted(f"`{kind}` in {str(dtype).removeprefix('torch.')}" for dtype, kind in found)
        why = "those of `nn.Linear` layers in bfloat16 can be, packed are " + (", ".join(kinds) or "none")
    log.warning("no weight is multiplied as it is packed: %s", why)


def _uses(model: nn.Module) -> dict[PackedTensor, list[tuple[PackedModule, GroupSlot]]]:
    """Packed weights, each with the modules that have it."""
    uses: dict[PackedTensor, list[tuple[PackedModule, GroupSlot]]] = {}
    for _, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            uses.setdefault(slot.packed, []).append((module, slot))
    return uses


class _Work(NamedTuple):
    """Weights that are converted, all or none, and whether they are multiplied from the left."""

    weights: list[PackedTensor]
    turned: bool = False
    kind: str = ""  # of experts, their class


def _experts(
    model: nn.Module, uses: Mapping[PackedTensor, Sequence[tuple[PackedModule, GroupSlot]]]
) -> list[_Work]:
    """What of experts goes to windows: both weights of a module, or none, and then it is told why."""
    found: list[_Work] = []
    told: dict[str, str] = {}
    for _, module in packed_modules(model):
        slots = [slot for slot in of_experts(module) if slot.dtype is torch.bfloat16]
        weights = [slot.packed for slot in slots]
        if not slots or all(it.multiplies for it in weights):
            continue
        parts = {it.name: (it.shape, [source.shape for source in it.packed.sources]) for it in slots}
        why = why_no_experts(module, parts)
        if why is None and any(len(uses[it]) > 1 for it in weights):
            why = "another module has their weights too"
        if why is None:
            found.append(_Work(weights, bool(module.is_transposed), module.tpde_base.__name__))
        else:
            told.setdefault(module.tpde_base.__name__, why)
    tell_experts(told)
    return found


def why_no_experts(
    module: nn.Module, parts: Mapping[str, tuple[Sequence[int], Sequence[Sequence[int]]]]
) -> str | None:
    """Why experts do not go to the window layout; None if they do.

    Parameters
    ----------
    module : nn.Module
        Packed, or before it is.
    parts : mapping of str to (shape, shapes)
        The weights of three dimensions in bf16 that are packed: their shapes, and of what they are made of.
    """
    why = why_not(module)
    if why is not None:
        return why
    if set(parts) != set(projections(module)):
        return "not all of their weights are packed"
    turned = bool(module.is_transposed)
    if not all(can_be_experts(*it, turned) for it in parts.values()):
        return "they are made of tensors that are no experts"
    return None


def tell_experts(told: Mapping[str, str]) -> None:
    """Say which experts stay in prefix codes, by their classes, and why.

    Of others that have weights of three dimensions, such as convolutions, nobody expects it.
    """
    for kind, why in told.items():
        if "expert" in kind.lower():
            log.warning(
                "the experts of `%s` are decoded, and not multiplied as they are packed: %s", kind, why
            )


def convert(work: _Work, fused: bool) -> bool:
    """Put weights in the window layout if all are small enough, or back in prefix codes; tell whether."""
    made = []
    for packed in work.weights:
        sources = _in_windows(packed, work.turned) if fused else _in_codes(packed)
        if sources is None:
            return False
        made.append(sources)
    for packed, sources in zip(work.weights, made, strict=True):
        packed.replace(sources)
    return True


def _in_codes(packed: PackedTensor) -> dict[Source, Source]:
    return {it: Resident(it.blob.to(it.device), it.name) for it in packed.sources}


def _in_windows(packed: PackedTensor, turned: bool) -> dict[Source, Source] | None:
    if len(packed.shape) == 2:
        one = Windowed.of(packed.sources[0], MOST_SHARE)
        return None if one is None else {packed.sources[0]: one}
    return experts_in_windows(packed, MOST_SHARE, turned)


def can_fuse(module: nn.Module) -> bool:
    """Whether a module's `weight` may be in the window layout, packed or before it is."""
    kind = module.tpde_base if isinstance(module, PackedModule) else type(module)
    if kind is NonDynamicallyQuantizableLinear:  # of `nn.MultiheadAttention`, which takes its weight
        return False
    return kind.forward is nn.Linear.forward or gathers(kind)


def taken_by_others(model: nn.Module) -> set[nn.Module]:
    """Linear layers whose weights another module takes, which computes otherwise with packed ones."""
    layers = [it for it in model.modules() if isinstance(it, nn.TransformerEncoderLayer)]
    return {linear for it in layers for linear in (it.linear1, it.linear2)}


def _is_misplaced(module: PackedModule, slot: GroupSlot) -> bool:
    """Whether a weight is decoded with a block and should not be, or the other way round."""
    group = slot.group
    if slot.experts is not None or (group is not None and slot in group.routed):
        return group is None or (slot in group.routed) != (slot.experts is not None)
    return not isinstance(module, PackedEmbedding) and slot.packed.multiplies == (group is not None)


def _fits(
    packed: PackedTensor, places: list[tuple[PackedModule, GroupSlot]], taken: Collection[nn.Module]
) -> bool:
    """Whether all modules that share a weight can do with windows, one of them a linear layer."""
    return (
        len(packed.parts) == 1
        and not packed.tile_bytes
        and any(isinstance(module, PackedLinear) for module, _ in places)
        and all(can_fuse(module) and module not in taken for module, _ in places)
        and all(slot.parameter.memory_format is CONTIGUOUS for _, slot in places)
    )


def _require_free(packed: PackedTensor) -> None:
    why = None
    if any(isinstance(it, Windowed) and it.budgeted for it in packed.sources):
        why = "is kept under a VRAM budget, which has room for it as it is", "load the model again"
    elif not packed.settled:
        why = "is streamed under a VRAM budget", "load the model without `vram=`"
    elif packed.active_delta not in (None, ALWAYS):
        why = "has deltas on it", "load the target itself, or the model without `deltas=`"
    elif any(user.recorded for user in packed.users()):
        why = "was recorded in a CUDA graph, which would go on with it", "load the model again"
    if why is not None:
        raise PackedWeight(f"`{packed.name}` {why[0]}; nothing was changed", hint=why[1], where=packed.name)
