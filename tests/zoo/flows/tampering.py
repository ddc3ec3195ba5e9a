"""What changes weights, dtypes or modules: as with a plain model, or refused with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..case import seeded
from .tools import Bits, Flow, Made, Pack, atomic, said, trained


def _atomic(act: Callable[[Any], Any], name: str = "llama", dtype: str = "bf16") -> Flow:
    return lambda pack: atomic(Made(name, dtype), pack, act)


def _first(model: Any) -> Any:
    return model.model.layers[0].self_attn.q_proj


def _inplace(model: Any) -> None:
    with torch.no_grad():
        _first(model).weight.mul_(2)


def _data(model: Any) -> None:
    _first(model).weight.data += 1


def _copied(model: Any) -> None:
    with torch.no_grad():
        _first(model).weight.copy_(torch.ones_like(_first(model).weight))


def _assigned(model: Any) -> None:
    _first(model).weight = nn.Parameter(torch.ones(64, 64, dtype=model.dtype))


def _init(model: Any) -> None:
    nn.init.zeros_(_first(model).weight)


def _trainable(model: Any) -> dict[str, torch.Tensor]:
    model.requires_grad_(True)
    return said("trained", (name for name, it in model.named_parameters() if it.requires_grad))


def _one_trainable(model: Any) -> dict[str, torch.Tensor]:
    _first(model).weight.requires_grad_(True)
    return said("trained", (name for name, it in model.named_parameters() if it.requires_grad))


def _reinitialized(model: Any) -> None:
    seeded()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and hasattr(module, "reset_parameters"):
            module.reset_parameters()


class _Double(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + x


def _parametrized(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(_first(model), "weight", _Double())


def _weight_normed(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(_first(model))


def _spectral(model: Any) -> None:
    seeded()
    nn.utils.parametrizations.spectral_norm(_first(model))


def _pruned(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(_first(model), "weight", amount=0.5)


def _resized(model: Any) -> None:
    seeded()
    model.resize_token_embeddings(330, mean_resizing=False)


def _replaced(model: Any) -> None:
    """A module that takes another's weight."""
    old = _first(model)
    new = nn.Linear(64, 64, bias=False, dtype=old.weight.dtype)
    new.weight = nn.Parameter(old.weight.detach().clone(), requires_grad=False)
    model.model.layers[0].self_attn.q_proj = new


def _swapped(model: Any) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def _fewer(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def _shared_weight(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.weight = _first(model).weight


def _vectorized(model: Any) -> None:
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def _optimized(pack: Pack) -> Bits:
    """An optimizer over all parameters of a model whose norms alone are trained, with weight decay."""
    made = Made()
    model = made()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    model = pack(model)
    bits = trained(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    from ..architecture import ids

    tokens = ids(length=8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    bits["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).detach()
    optimizer.step()
    return bits | made.outputs(model.eval())


def _functional(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    from ..architecture import ids

    changed = {"model.norm.weight": model.model.norm.weight.detach() * 2}
    with torch.no_grad():
        return {"logits": torch.func.functional_call(model, changed, (ids(),)).logits}


def _functional_weight(pack: Pack) -> Bits:
    """A weight that is packed is given from outside."""
    made = Made()
    model = pack(made())
    from ..architecture import ids

    name = "model.layers.0.mlp.up_proj.weight"
    changed = {name: torch.full((128, 64), 0.01, dtype=torch.bfloat16)}
    with torch.no_grad():
        return {"logits": torch.func.functional_call(model, changed, (ids(),)).logits}


def _functional_all(pack: Pack) -> Bits:
    """All parameters and buffers go out and in again."""
    made = Made()
    model = pack(made())
    from ..architecture import ids

    given = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        return {"logits": torch.func.functional_call(model, given, (ids(),)).logits}


def _functional_gradient(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    from ..architecture import ids

    tokens = ids()

    def loss(norm: Any) -> Any:
        return torch.func.functional_call(model, {"model.norm.weight": norm}, (tokens,)).logits.float().sum()

    return {"gradient": torch.func.grad(loss)(model.model.norm.weight.detach())}


TAMPERING: dict[str, Flow] = {
    "half": _atomic(lambda model: model.half()),
    "to_dtype": _atomic(lambda model: model.to(torch.float32)),
    "to_same_dtype": _atomic(lambda model: model.to(torch.bfloat16)),
    "double": _atomic(lambda model: model.double(), "bert", "fp32"),
    "to_cpu": _atomic(lambda model: model.to("cpu")),
    "to_channels_last": _atomic(lambda model: model.to(memory_format=torch.channels_last), "resnet", "fp32"),
    "requires_grad": _atomic(_trainable),
    "requires_grad_of_one": _atomic(_one_trainable),
    "weight_in_place": _atomic(_inplace),
    "weight_data": _atomic(_data),
    "weight_copy": _atomic(_copied),
    "weight_assigned": _atomic(_assigned),
    "weight_init": _atomic(_init),
    "init_weights": _atomic(_reinitialized),
    "tie_weights": _atomic(lambda model: model.tie_weights(), "qwen2_tied"),
    "resize_token_embeddings": _atomic(_resized),
    "parametrize": _atomic(_parametrized),
    "weight_norm": _atomic(_weight_normed),
    "spectral_norm": _atomic(_spectral),
    "prune": _atomic(_pruned),
    "module_replaced": _atomic(_replaced),
    "modules_swapped": _atomic(_swapped),
    "layers_cut": _atomic(_fewer),
    "weight_shared": _atomic(_shared_weight),
    "vector_to_parameters": _atomic(_vectorized),
    "optimizer_over_all": _optimized,
    "functional_call": _functional,
    "functional_call_weight": _functional_weight,
    "functional_call_all": _functional_all,
    "functional_grad": _functional_gradient,
}
