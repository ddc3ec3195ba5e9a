"""Weights that models change in their own forward pass, or choose kernels by: they stay plain."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tpde.nn.replace import block_path

# By the class that changes them, relative to it.
_CHANGED = {
    "SwitchTransformersTop1Router": ("classifier.weight",),  # cast to the router's dtype
    "NllbMoeTop2Router": ("classifier.weight",),  # likewise
    "RwkvBlock": ("attention.output.weight", "feed_forward.value.weight"),  # divided, by the layer's number
}

_ATTENTION = ("out_proj.weight",)
_LAYER = ("linear1.weight", "linear2.weight")


def _looked_at(model: nn.Module) -> Iterator[str]:
    """Weights that PyTorch's own transformers look at where no block is open, which has them plain.

    Their fast paths, which give other bits, are for ordinary tensors only.
    """
    for path, module in model.named_modules():
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            continue
        if block_path(model, path) is not None:
            continue
        names: tuple[str, ...] = _ATTENTION if isinstance(module, nn.MultiheadAttention) else _LAYER
        if isinstance(module, nn.TransformerEncoder):  # which asks the first layer for all
            names = tuple(f"layers.0.{it}" for it in ("self_attn.out_proj.weight", *_LAYER))
        for name in names:
            yield f"{path}.{name}".lstrip(".")


def kept_plain(model: nn.Module) -> dict[str, str]:
    """The parameters of a model that must stay plain, by name, each with what it is that says so.

    Parameters
    ----------
    model : nn.Module
        Whose modules' classes are looked at.

    Examples
    --------
    >>> list(kept_plain(nn.MultiheadAttention(8, 2)))
    ['out_proj.weight']
    """
    looked_at = dict.fromkeys(_looked_at(model), "is what PyTorch's own transformers choose kernels by")
    return looked_at | {
        f"{path}.{name}".lstrip("."): "is changed by the model itself, when it is called"
        for path, module in model.named_modules()
        for kind in type(module).__mro__
        for name in _CHANGED.get(kind.__name__, ())
    }
