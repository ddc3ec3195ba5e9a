"""Mixture-of-experts modules of which only those experts are decoded that the router chose.

The fused weights keep their full size in the workspace; what lies in the places of the others is left as it
was. So the module must not touch it, and whether it does is known for transformers' own modules only.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput
from tpde.nn.group import GroupSlot
from tpde.nn.slot import ExpertSource

log = logging.getLogger("tpde")

# What transformers' modules call the router's choice. All that take one by these names look each expert up,
# in a loop or by an index, and none computes with the others.
CHOICE = ("top_k_index", "router_indices")
# Implementations that do so too; others, such as kernels from a hub, are given all experts.
KNOWN = (None, "eager", "batched_mm", "grouped_mm")


class HoldsExperts(Protocol):
    """A module whose fused weights are packed: `tpde.nn.modules.PackedModule` is one.

    Attributes
    ----------
    tpde_base : type
        The class that it had.
    tpde_slots : dict of str to Slot
        Its packed weights by the names of their parameters.
    """

    tpde_base: type[nn.Module]
    tpde_slots: dict[str, GroupSlot]


def route_experts(module: HoldsExperts, source: ExpertSource) -> None:
    """Have the fused weights of a module decoded expert by expert, as routed to. Call `finish` afterwards.

    Raises
    ------
    InvalidInput
        If the module has no fused weights, or they differ in the number of experts.
    """
    slots = fused(module)
    if len({slot.shape[0] for slot in slots}) != 1:
        raise InvalidInput(
            f"the fused weights of a {type(module).__name__} are of {[slot.shape[0] for slot in slots]} "
            "experts",
            hint="one number, the same for all, is needed",
        )
    for slot in slots:
        slot.experts = source


def fused(module: HoldsExperts) -> list[GroupSlot]:
    """The fused weights of a module: those of three dimensions, the first of which counts experts."""
    return [slot for slot in module.tpde_slots.values() if len(slot.shape) == 3]


@functools.cache
def _place(kind: type[nn.Module]) -> tuple[str, int] | None:
    """Name and position of the argument that holds the router's choice."""
    if not kind.__module__.startswith("transformers."):
        return None
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return next(((name, names.index(name)) for name in CHOICE if name in names), None)


def routes(kind: type[nn.Module]) -> bool:
    """Whether it is known of a class which of its experts a call needs."""
    return _place(kind) is not None  # type: ignore[arg-type]


def chosen(module: HoldsExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """The experts that a call needs, ascending; None if that is not known. Waits for the router."""
    place = _place(module.tpde_base)  # type: ignore[arg-type]
    config = getattr(module, "config", None)
    if place is None or getattr(config, "_experts_implementation", None) not in KNOWN:
        return None
    name, position = place
    index = args[position] if position < len(args) else kwargs.get(name)
    if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype is torch.bool:
        return None
    count = fused(module)[0].shape[0]
    with torch.no_grad():
        hit = torch.zeros(count, dtype=torch.bool, device=index.device)
        # Numbers beyond the last stand for experts of other devices, or none; some clamp them as here.
        hit[index.reshape(-1).long().clamp(0, count - 1)] = True
    return [number for number, needed in enumerate(hit.tolist()) if needed]


_told: set[type] = set()


def needed(module: HoldsExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The experts that a call of a module needs: all, after one line in the log, if that is not known."""
    found = chosen(module, args, kwargs)
    if found is not None:
        return found
    kind = module.tpde_base
    if kind not in _told:
        _told.add(kind)
        log.warning(
            "which experts a `%s` needs is not known: all of them are fetched for each call", kind.__name__
        )
    return list(range(fused(module)[0].shape[0]))
