"""Putting packed weights in the places of a model's parameters, tied ones included."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tpde.integrations.transformers.internals import tied_weights
from tpde.integrations.transformers.weight_map import same_bytes
from tpde.loading.checkpoint_files import Stored
from tpde.loading.runs import Run
from tpde.nn import PackedParameter, PackedTensor, replace_parameter

log = logging.getLogger("tpde")


def tie(model: Any, runs: Mapping[str, Run[Stored]], parts: dict[str, PackedTensor]) -> None:
    """Have tied parameters share their packed weight.

    Where the files have two that differ, as transformers does: both are kept, and are tied no more.

    Parameters
    ----------
    model : PreTrainedModel
        Which says what is tied.
    runs : mapping of str to Run
        Its packed parameters in the files.
    parts : dict of str to PackedTensor
        Those of them that stay packed; changed in place.
    """
    tied = tied_weights(model)
    for target, source in list(tied.items()):
        if target in runs and source in runs:
            if same_bytes(runs[target], runs[source]):
                parts.pop(target, None)
                if source in parts:  # else it is plain, and tied as plain ones are
                    parts[target] = parts[source]
            else:
                log.warning(
                    "`%s` and `%s` are tied by the model, but differ in the files: they are not tied",
                    target,
                    source,
                )
                del tied[target]


def install(model: Any, parts: Mapping[str, PackedTensor]) -> None:
    """Turn the placeholders into packed parameters, those that were tied into the same one."""
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    done = set[str]()
    made: dict[int, PackedParameter] = {}  # by packed weights
    for name, packed in parts.items():
        path, _, leaf = name.rpartition(".")
        if name in done:
            continue
        held = getattr(model.get_submodule(path), leaf)
        parameter = made.setdefault(id(packed), PackedParameter(packed, held.requires_grad))
        for use in uses[id(held)]:
            owner, _, key = use.rpartition(".")
            there = model.get_submodule(owner)._parameters
            if key in there:  # not a second path to the same module
                if held.is_meta:  # of the model's dtype, though transformers may keep this weight in float32
                    like = torch.empty_like(held, dtype=packed.dtype)
                    there[key] = nn.Parameter(like, held.requires_grad)
                replace_parameter(model, use, parameter)
            done.add(use)
