"""What `save_pretrained` writes of a packed model: its blobs as they are, under the source's names."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from tpde.format.constants import SUFFIX
from tpde.integrations.transformers.internals import (
    WeightConverter,
    conversion_mapping,
    revert,
    tied_weights,
)
from tpde.loading.runs import NotARun, Run, decoded
from tpde.nn import pack_tensor, packed_modules
from tpde.weights.source import Source

log = logging.getLogger("tpde")


def state_to_save(model: Any, conversions: list[Any] | None) -> dict[str, torch.Tensor]:
    """The state dict of a packed model under the names of its checkpoint.

    Parameters
    ----------
    model : PreTrainedModel
        Some of whose weights are packed.
    conversions : list of WeightTransform, optional
        Those that were used when it was loaded; they are undone. None for those of its class.

    Returns
    -------
    dict of str to torch.Tensor
        Blobs, their names ending in `_tpde`, and plain tensors.
    """
    state = _revert(model, _with_runs(model), conversions)
    out: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Run):
            out[name] = value
            continue
        only = value.parts[0] if value.whole and len(value.parts) == 1 else None
        if only is not None and only.shape == value.shape:
            out[name + SUFFIX] = only.blob
            continue
        plain = _decoded(value)
        packed = pack_tensor(plain, name)
        if packed is None:
            out[name] = plain
        else:
            out[name + SUFFIX] = packed.sources[0].blob
    return out


def _with_runs(model: nn.Module) -> dict[str, Any]:
    """The model's state dict with runs in the place of blobs; of tied weights, the one they are tied to."""
    state: dict[str, Any] = model.state_dict()
    tied = tied_weights(model)
    kept: dict[int, str] = {}
    for path, module in packed_modules(model):
        prefix = f"{path}." if path else ""
        for name, slot in module.tpde_slots.items():
            key, full = id(slot.packed), prefix + name
            state.pop(full, None)
            before = kept.get(key)
            if before is not None and before not in tied:
                continue
            if before is not None:
                del state[before]
            kept[key] = full
            state[full] = Run(slot.shape, slot.dtype, slot.packed.sources)
    return state


def _revert(model: Any, state: dict[str, Any], conversions: list[Any] | None) -> dict[str, Any]:
    """Undo transformers' conversions; on plain weights where they cut through blobs."""
    try:
        return revert(model, dict(state), conversions)
    except NotARun:
        log.warning("a conversion cuts through blobs: these weights are decoded and packed again")
        used = conversion_mapping(model) if conversions is None else conversions
        cut = [n for n, it in state.items() if isinstance(it, Run) and _is_converted(n, used)]
        plain = state | {name: _decoded(state[name]) for name in cut}
        made = revert(model, plain, conversions)
        for name in [name for name in made if name not in plain and isinstance(made[name], torch.Tensor)]:
            packed = pack_tensor(made[name].contiguous(), name)
            if packed is not None:
                made[name] = Run(made[name].shape, made[name].dtype, packed.sources)
        return made


def _is_converted(name: str, conversions: list[Any]) -> bool:
    converters = [it.reverse_transform() for it in conversions if isinstance(it, WeightConverter)]
    return any(it.rename_source_key(name)[1] is not None for it in converters)


def _decoded(run: Run[Source]) -> torch.Tensor:
    """A run as a plain tensor."""
    device = run.spans[0].tensor.device if run.spans else torch.device("cpu")
    return decoded([run], device, lambda source: source)[0]
