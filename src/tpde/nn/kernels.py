"""How linear layers are computed: as plain ones are, or straight from packed weights."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn.modules import PackedEmbedding, PackedLinear, PackedModule, gathers
from tpde.nn.replace import finish, packed_modules
from tpde.nn.slot import Slot
from tpde.weights.active_delta import ALWAYS
from tpde.weights.frozen import CONTIGUOUS
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident
from tpde.weights.windowed import Windowed

log = logging.getLogger("tpde")

Kernels = Literal["exact", "fused"]
# Of the plain weight's bytes. Windows take 0.69, and as much more as the share of words that are escapes, on
# which a product also spends instructions.
MOST_SHARE = 0.85


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
    """Say how linear layers of a packed model are computed: exactly as plain ones, or from packed weights.

    With `"exact"`, weights are decoded, and PyTorch multiplies: outputs are the plain model's, bit for bit.
    With `"fused"`, bf16 weights are put in the window layout (docs/windows.md), about 11.25 bits each, and up
    to 64 rows of inputs at a time are multiplied by kernels that decode on the way. On an H200 that is 1.46
    times as fast as multiplying with plain weights with one row, 1.22 times with 16, and slower with more
    than 32. Every weight is exact. Sums are in fp32, in an order that depends on the number of columns alone:
    a row's result has the same bits in every batch of up to 64 rows, but not those of the plain model.
    Longer inputs and gradients take decoded weights.

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
        If `kernels` is something else.
    PackedWeight
        If weights are streamed or in the window layout under a VRAM budget, have named deltas, or were
        recorded in a CUDA graph.
    UnsupportedDevice, MissingDependency, CompileError
        If weights are on a GPU that the kernels cannot run on.

    Notes
    -----
    In the window layout are the weights of `nn.Linear` layers, and of embeddings that are tied to them, where
    that takes at most 0.85 of the plain weight. Others stay as they are: experts, convolutions, other dtypes,
    and those that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take from their layers. The logger
    `tpde` warns if none is left. What is saved is packed in prefix codes, as ever. Weights are converted one
    at a time; beside them, one plain weight and its blob are in memory. No forward pass may be under way in
    another thread.

    Examples
    --------
    >>> model = tpde.from_pretrained("packed", device="cuda")  # doctest: +SKIP
    >>> tpde.nn.set_kernels(model, "fused")  # doctest: +SKIP
    """
    check_kernels(kernels)
    uses: dict[PackedTensor, list[tuple[PackedModule, Slot]]] = {}
    for _, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            uses.setdefault(slot.packed, []).append((module, slot))
    fused, taken = kernels == "fused", taken_by_others(model)
    work = [
        it
        for it, places in uses.items()
        if it.multiplies != fused and (not fused or _fits(it, places, taken))
    ]
    for packed in work:
        _require_free(packed)
    try:
        for packed in work:
            convert(packed, fused)
    finally:  # those that were converted are not decoded with their blocks any more, or are again
        if any(_is_misplaced(module, slot) for places in uses.values() for module, slot in places):
            finish(model)
    if fused:
        tell_if_none(model)
    return model


def tell_if_none(model: nn.Module) -> None:
    """Warn if no weight of a model that was to have fused kernels is in the window layout."""
    slots = [slot for _, module in packed_modules(model) for slot in module.tpde_slots.values()]
    if not any(slot.packed.multiplies for slot in slots):
        kinds = sorted({str(slot.dtype).removeprefix("torch.") for slot in slots}) or ["none"]
        log.warning(
            "no weight is multiplied as it is packed: those of `nn.Linear` layers in bfloat16 can be, the "
            "model's packed weights are %s",
            ", ".join(kinds),
        )


def convert(packed: PackedTensor, fused: bool) -> None:
    """Put a weight in the window layout if that is small enough, or back in prefix codes."""
    source = packed.sources[0]
    made = Windowed.of(source, MOST_SHARE) if fused else Resident(source.blob.to(source.device), source.name)
    if made is not None:
        packed.replace({source: made})


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


def _is_misplaced(module: PackedModule, slot: Slot) -> bool:
    """Whether a weight is decoded with a block and should not be, or the other way round."""
    return not isinstance(module, PackedEmbedding) and slot.packed.multiplies == (slot.group is not None)


def _fits(
    packed: PackedTensor, places: list[tuple[PackedModule, Slot]], taken: Collection[nn.Module]
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
    elif packed.choice not in (None, ALWAYS):
        why = "has deltas on it", "load the target itself, or the model without `deltas=`"
    elif any(user.recorded for user in packed.users()):
        why = "was recorded in a CUDA graph, which would go on with it", "load the model again"
    if why is not None:
        raise PackedWeight(f"`{packed.name}` {why[0]}; nothing was changed", hint=why[1], where=packed.name)
