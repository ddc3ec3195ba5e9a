"""A transformers model's weights as the units of a streaming plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.format.blob import MAX_FIXED_BYTES, BlobHeader, align, parse_blob_header
from tpde.format.constants import CODEC_CONSTANT, CODEC_PREFIX, MAX_PREFIX_CHUNK_WORDS, RECORD_BYTES
from tpde.format.source import read
from tpde.integrations.checkpoint import Checkpoint, Stored
from tpde.integrations.transformers.demand import (
    ALIGN,
    FIXED_BYTES,
    activation_dtype,
    demand_of,
    module_calls,
)
from tpde.integrations.transformers.experts import cache_least, is_routed
from tpde.integrations.transformers.plan import Plan
from tpde.nn.modules import gathers
from tpde.nn.replace import block_path
from tpde.nn.tiles import least_tile_bytes
from tpde.packing.order import forward_order
from tpde.streaming.plan import Rates, StreamPlan, Unit, make_plan
from tpde.streaming.rates import given_rates

__all__ = ["FIXED_BYTES", "StreamPlan", "plan_streaming", "unit_of", "units_of"]

TABLES_BYTES = 16 << 10  # expanded tables of a tensor on a GPU (docs/gpu.md)
DESCRIPTOR_BYTES = 2 << 10  # of a tensor's pieces: a few of 136 bytes each
EXPERT_BYTES = 512  # of an expert's pieces in a fused weight
TILE_BYTES = 16 << 20  # smaller tiles of a matrix spend more on launches than on copies

# An H200 on PCIe 5. Where weights go depends little on rates: all that matters is what is faster than what.
TYPICAL = given_rates(copy=55e9, memory=4.2e12, disk=6e9)


def unit_of(model: Any, name: str) -> str:
    """The unit that a packed parameter belongs to: its block, or its module if it is in none.

    A parameter that is tied belongs where it is used whole: an embedding to the head that shares its weight.
    """
    path = _users(model, name)[0].rpartition(".")[0]
    return block_path(model, path) or path


def _users(model: Any, name: str) -> list[str]:
    """A parameter and those tied to it; without embeddings, if any of them is used whole."""
    names = _ties(model).get(name, [name])
    return [it for it in names if not _is_rows(model, it)] or names


def _ties(model: Any) -> dict[str, list[str]]:
    """For each tied parameter those that it is tied to, in the model's order."""
    groups: dict[str, list[str]] = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups.setdefault(source, [source]).append(target)
    return {name: sorted(group) for group in groups.values() for name in group}


def _is_rows(model: nn.Module, name: str) -> bool:
    return gathers(type(model.get_submodule(name.rpartition(".")[0])))


def units_of(model: Any, plan: Plan, only: Collection[str] | None = None) -> list[Unit]:
    """The units of a model, in the order of a forward pass.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    plan : Plan
        Which packed tensors make up its parameters.
    only : collection of str, optional
        Parameters that count; by default all.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If the header of a packed tensor is damaged.
    """
    members: dict[str, list[str]] = {}
    for name in plan.runs:
        if only is None or name in only:
            members.setdefault(unit_of(model, name), []).append(name)
    order = forward_order(f"{unit}.weight" for unit in members)
    return [_unit(model, plan, unit, members[unit]) for unit in (it.rpartition(".")[0] for it in order)]


def _unit(model: Any, plan: Plan, unit: str, names: Sequence[str]) -> Unit:
    stored: dict[str, Stored] = {}
    weights: dict[tuple[str, ...], int] = {}
    for name in names:
        parts = plan.runs[name].parts
        stored.update({part.name: part for part in parts})
        weights[tuple(part.name for part in parts)] = align(plan.runs[name].nbytes, ALIGN)
    headers = [_header(it) for it in stored.values()]
    experts = sum(plan.runs[name].shape[0] for name in names if is_routed(model, plan, name))
    users = sorted({user for name in names for user in _users(model, name)})
    return Unit(
        name=unit,
        packed=sum(it.extent.size for it in stored.values()),
        plain=sum(weights.values()),
        index=EXPERT_BYTES * experts
        + sum(align(RECORD_BYTES * it.chunks, ALIGN) + TABLES_BYTES + DESCRIPTOR_BYTES for it in headers),
        rows=all(_is_rows(model, it) for it in users),
        tile=_tile(model, users),
        resident=any(it.codec not in (CODEC_PREFIX, CODEC_CONSTANT) for it in headers),
    )


def _header(stored: Stored) -> BlobHeader:
    """A blob's header, without its index map."""
    extent = stored.extent
    head = read(extent.source, extent.offset, min(MAX_FIXED_BYTES, extent.size))
    try:
        return parse_blob_header(head, extent.size)
    except Corrupt as error:
        raise Corrupt(f"tensor `{stored.name}`: {error}", tensor=stored.name) from None
    except (Truncated, UnsupportedVersion) as error:
        raise type(error)(f"tensor `{stored.name}`: {error}") from None


def _tile(model: Any, names: Sequence[str]) -> int:
    """The least room for tiles of the rows of a linear layer; 0 for anything else."""
    path, _, leaf = names[0].rpartition(".")
    module = model.get_submodule(path)
    if len(names) > 1 or not isinstance(module, nn.Linear) or block_path(model, path) is not None:
        return 0
    size = getattr(module, leaf).element_size()
    return align(max(TILE_BYTES, least_tile_bytes(module.in_features, size, MAX_PREFIX_CHUNK_WORDS)), ALIGN)


def plan_streaming(
    model: Any,
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    vram: int,
    ram: int | None,
    max_tokens: int,
    rates: Rates = TYPICAL,
    only: Collection[str] | None = None,
) -> StreamPlan:
    """Decide where the packed weights of a model are kept. Nothing but headers is read.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    checkpoint : Checkpoint
        Its files.
    plan : Plan
        Which of their tensors make up its parameters.
    vram, ram : int
        Bytes of the device and of the host; None for `ram` means as much as is needed.
    max_tokens : int
        Sequences times length, at most.
    rates : Rates
        Of the machine.
    only : collection of str, optional
        Packed parameters that are on this device; by default all.

    Raises
    ------
    OutOfMemory
        If a budget cannot work; its `least` is one that does.
    Truncated, Corrupt, UnsupportedVersion
        If the header of a packed tensor is damaged.
    """
    units = units_of(model, plan, only)
    demand = demand_of(model, plan.runs, max_tokens, activation_dtype(model.parameters()))
    tables = TABLES_BYTES * len(checkpoint.packed)  # of tensors on the device; those of others are in `index`
    experts = cache_least(model, plan, only)
    demand = replace(demand, plain=demand.plain + tables, experts=experts)
    return make_plan(units, demand, vram, ram, rates, calls=module_calls(model))
