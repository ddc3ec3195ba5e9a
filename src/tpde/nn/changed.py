"""Weights that models change in their own forward pass: they stay plain."""

from __future__ import annotations

from torch import nn

# By the class that changes them, relative to it.
_CHANGED = {
    "SwitchTransformersTop1Router": ("classifier.weight",),  # cast to the router's dtype
    "NllbMoeTop2Router": ("classifier.weight",),  # likewise
    "RwkvBlock": ("attention.output.weight", "feed_forward.value.weight"),  # divided, by the layer's number
}


def changed_weights(model: nn.Module) -> set[str]:
    """The names of the parameters that a model changes itself when it is called.

    Parameters
    ----------
    model : nn.Module
        Whose modules' classes are looked at.
    """
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for kind in type(module).__mro__
        for name in _CHANGED.get(kind.__name__, ())
    }
