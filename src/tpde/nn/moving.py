"""Moving a model whose packed weights refuse some of it: all of it, or nothing."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from tpde.nn.modules import PackedModule


class CheckedApply:
    """`nn.Module._apply` of a model, which moves and casts it, after all packed modules in it were asked.

    It takes the place of the method in the model's own attributes: PyTorch applies a function to one module
    after the other, and a cast that the last one refuses would be half done.

    Parameters
    ----------
    model : nn.Module
        Not held: were it, a model that nobody uses would stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a function to all parameters and buffers.

        Raises
        ------
        PackedWeight
            If it would cast a packed weight, or put it in another memory format; then nothing is changed.
        """
        model = self._model()
        assert model is not None
        for module in model.modules():
            if isinstance(module, PackedModule):
                module.tpde_check(fn)
        return type(model)._apply(model, fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])
