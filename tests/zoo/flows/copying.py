"""Copies of models and of their state: dicts, files, averages, other processes' memory."""

from __future__ import annotations

import copy
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..bits import Differs
from .tools import Bits, Flow, Made, Pack, as_plain, said


def _keys(pack: Pack) -> Bits:
    model = pack(Made()())
    parameters = ((name, tuple(it.shape), it.dtype) for name, it in model.named_parameters())
    return said("state dict", model.state_dict()) | said("parameter", parameters)


def _reloaded(pack: Pack, way: Any) -> Bits:
    """Into another model of the same shape, whose weights are others."""
    made = Made()
    state = way(pack(made()).state_dict())
    other = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other = pack(other)
    other.load_state_dict(state)
    return made.outputs(other)


def _itself(state: Any) -> Any:
    return state


def _through_torch(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _through_safetensors(state: Any) -> Any:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(state), Path(folder) / "state.safetensors")
        return load_file(Path(folder) / "state.safetensors")


def _plain_state(pack: Pack) -> Bits:
    """A plain model's state into a packed one."""
    made = Made()
    state = made().state_dict()
    other = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other = pack(other)
    other.load_state_dict(state)
    return made.outputs(other)


def _plain_names(pack: Pack) -> Bits:
    """`plain_state_dict` loads into a plain model."""
    from tpde.nn import plain_state_dict

    made = Made()
    state = plain_state_dict(pack(made()))
    other = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(state)
    return made.outputs(other)


def _averaged(pack: Pack) -> Bits:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    made = Made()
    model = pack(made())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    average.update_parameters(model)
    average.update_parameters(model)
    return made.outputs(average)


def _footprint(pack: Pack) -> Bits:
    plain = Made()()
    model = pack(Made()())
    if pack is not as_plain:
        less, full = model.get_memory_footprint(), plain.get_memory_footprint()
        if not 0.3 * full < less < full:
            raise Differs(f"get_memory_footprint() is {less}, of the plain model {full}")
    return {}


def _shared(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    return made.outputs(model.share_memory())


def _copied_tied(pack: Pack) -> Bits:
    made = Made("qwen2_tied")
    model = copy.deepcopy(pack(made()))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return made.outputs(model) | {"tied": torch.tensor(tied)}


def _kept_weights(pack: Pack) -> Bits:
    """A hook that keeps every weight it sees."""
    made = Made()
    model = pack(made())
    weights: Bits = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight"):

            def note(module: Any, args: Any, out: Any, name: str = name) -> None:
                weights[name] = module.weight

            module.register_forward_hook(note)
    made.outputs(model)
    return {name: weight.detach().clone() for name, weight in weights.items()}


def _read_outside(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    found = {name: it.weight.detach().clone() for name, it in model.named_modules() if hasattr(it, "weight")}
    return found | {f"T {name}": weight.t().clone() for name, weight in found.items() if weight.dim() == 2}


def _vector(pack: Pack) -> Bits:
    model = pack(Made()())
    return {"vector": torch.nn.utils.parameters_to_vector(model.parameters()).detach()}


COPYING: dict[str, Flow] = {
    "names_and_shapes": _keys,
    "load_state_dict": lambda pack: _reloaded(pack, _itself),
    "deepcopy_state_dict": lambda pack: _reloaded(pack, copy.deepcopy),
    "torch_save_state_dict": lambda pack: _reloaded(pack, _through_torch),
    "safetensors_state_dict": lambda pack: _reloaded(pack, _through_safetensors),
    "load_plain_state_dict": _plain_state,
    "plain_state_dict": _plain_names,
    "averaged_model": _averaged,
    "get_memory_footprint": _footprint,
    "share_memory": _shared,
    "deepcopy_tied": _copied_tied,
    "hooks_that_keep_weights": _kept_weights,
    "weights_read_outside": _read_outside,
    "parameters_to_vector": _vector,
}
