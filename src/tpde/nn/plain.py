"""Copies of packed weights for code that reads them outside of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpde.errors import PackedWeight
from tpde.nn.slot import Slot
from tpde.weights.source import Source


class PlainWeight(Tensor):
    """A plain copy of a packed weight, made when it was read.

    Results of operations are ordinary tensors. Operations that would change it raise `PackedWeight`: the
    change would be lost, and whoever merges an adapter must not believe that it worked.
    """

    _is_param = True  # `isinstance(module.weight, nn.Parameter)` holds, as it did before
    _is_hf_initialized = True  # transformers leaves it alone
    tpde_parts: list[tuple[Source, int]]

    @classmethod
    def of(cls, slot: Slot) -> PlainWeight:
        """A copy of a slot's weight."""
        if slot.device.type == "meta":
            plain = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        else:
            with torch.no_grad():
                plain = slot.fresh()
        weight = plain.as_subclass(cls)
        weight.tpde_parts = slot.parts
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run anything that does not change the copy, on the tensor beneath."""
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        kwargs = kwargs or {}
        setting = name == "__set__" and owner not in _HARMLESS
        inplace = (name.endswith("_") and not name.endswith("__")) or name in _INPLACE
        target = kwargs.get("out")
        if setting or inplace:  # functions such as `nn.init.normal_` pass all they got by name
            target = next(iter((*args, *kwargs.values())), None)
        if isinstance(target, PlainWeight) and name not in _ALLOWED:
            part = target.tpde_parts[0][0]
            raise PackedWeight(
                f"`{part.name}` is packed, and `{name}` would change a copy of it that is then lost; call "
                "`tpde.unpack_module(module)` first. (Adapters cannot be merged into packed weights.)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if owner is Tensor.data and name == "__get__":  # so that `weight.data += x` is refused too
            copy = result.as_subclass(cls)
            copy.tpde_parts = args[0].tpde_parts
            return copy
        return result.as_subclass(Tensor) if type(result) is cls else result


_HARMLESS = {Tensor.grad, Tensor.requires_grad}
_ALLOWED = {"requires_grad_", "retain_grad_", "detach_"}
_INPLACE = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "concat")),
}
