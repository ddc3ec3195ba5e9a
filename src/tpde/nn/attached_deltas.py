"""Giving a model deltas, and taking them away."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn.model_deltas import NAME, Deltas, deltas_of
from tpde.nn.no_deltas import has_use
from tpde.nn.owner import Owner
from tpde.nn.passes import ModelForward
from tpde.weights.active_delta import ALWAYS, WHOLE, ActiveDelta
from tpde.weights.changed import Variant
from tpde.weights.source import Source


def attach(
    model: nn.Module,
    names: Sequence[str],
    variants: Mapping[Source, Mapping[str, Variant]],
    plain: Mapping[str, Mapping[str, Tensor]],
) -> Deltas:
    """Let a model have deltas, and `use` them.

    Parameters
    ----------
    model : nn.Module
        After `finish`.
    names : sequence of str
        What they are called.
    variants : mapping of Source to mapping of str to Variant
        What they make of the sources of its packed weights.
    plain : mapping of str to mapping of str to torch.Tensor
        What they make of plain parameters and buffers, by their names in the model.

    Raises
    ------
    InvalidInput
        If the model has deltas already, or a method `use` of its own; if it is a ScriptModule, or deltas
        change parameters of one in it.
    """
    require_none(model)
    _require_no_script(model, plain)
    made = Deltas(names, ActiveDelta(), Owner(model))
    made.copy(model, plain)
    made.put(model, variants)
    model.__dict__[NAME], model.__dict__["use"] = made, made.use
    model.__dict__["tpde_counted"] = model.__dict__["forward"] = ModelForward(made, model)
    return made


def leave_deltas(model: nn.Module, choices: Collection[ActiveDelta]) -> None:
    """Let a model whose weights become plain have no deltas any longer: they are under the one in use.

    Parameters
    ----------
    model : nn.Module
        All that becomes plain.
    choices : collection of Choice
        By which its weights go.

    Raises
    ------
    PackedWeight
        If they go by those of a model of which this one is a part.
        If `use` was interrupted.
    InvalidInput
        If each row of a batch has its own.
    """
    own = deltas_of(model)
    for it in choices:
        if it is not ALWAYS and (own is None or own.active_delta is not it):
            raise PackedWeight(
                "the weights are a part of a model with deltas, and would no longer go by its `use`",
                hint="unpack that model",
            )
    if own is None:
        return
    own.require_settled()
    if isinstance(own.active, tuple):
        raise InvalidInput(f"each of {len(own.active)} rows has a delta of its own", hint=WHOLE)
    own.close()
    counted: ModelForward = model.__dict__.pop("tpde_counted")
    for name in (NAME, "use"):
        del model.__dict__[name]
    counted.leave(model)


def require_none(model: nn.Module) -> None:
    """Refuse a model that has deltas, or a method `use` of its own."""
    if has_use(model):
        has = "deltas already" if deltas_of(model) is not None else "a `use` of its own"
        raise InvalidInput(
            f"the {type(model).__name__} has {has}", hint="load it anew, with all deltas at once"
        )


def _require_no_script(model: nn.Module, names: Collection[str]) -> None:
    """Refuse parameters, of these names, of ScriptModules, which hold them where Python cannot reach them."""
    for path, it in model.named_modules():
        if isinstance(it, torch.jit.ScriptModule) and (
            not path or any(name.startswith(f"{path}.") for name in names)
        ):
            what = f"`{path}`" if path else "the model"
            raise InvalidInput(
                f"{what} is a ScriptModule, and has no deltas",
                hint="add them to the module that it was made of",
                where=path or None,
            )
