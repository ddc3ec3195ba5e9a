"""Views of decoded copies: what is computed from them is ordinary, what would change them is refused."""

from __future__ import annotations

from typing import Protocol, SupportsIndex, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tpde.errors import PackedWeight
from tpde.weights.transforms import is_transformed

R_co = TypeVar("R_co", covariant=True)


class Function(Protocol[R_co]):
    """A function of PyTorch, as `__torch_function__` gets it: called with whatever it was called with."""

    def __call__(self, *args: object, **kwargs: object) -> R_co:
        """Call it."""


def refuse_change(name: str, how: str) -> PackedWeight:
    """The error for a change that would be lost."""
    return PackedWeight(
        f"`{name}` is packed, and `{how}` would change a copy of it that is then lost",
        hint="call `tpde.unpack_module(module)` first. (Adapters cannot be merged into packed weights.)",
    )


def function_name(func: object) -> str:
    """What a function is called, for errors and rules."""
    owner = getattr(func, "__self__", None)
    name = str(getattr(func, "__name__", func))
    return f"{getattr(owner, '__name__', '')} =".strip() if name == "__set__" else name


def changes_first(func: object) -> bool:
    """Whether a function changes its first argument, by PyTorch's convention for names."""
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _DUNDERS or name == "__set__"


_DUNDERS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul")),
    *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "concat")),
}


class ReadOnly(Tensor):
    """Memory of a decoded copy: `weight[0]`, `weight.t()`.

    Attributes
    ----------
    tpde_name : str
        Of the weight.
    """

    tpde_name: str

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """A copy is an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).detach().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """What is saved is an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor).detach().clone()
            made: str | tuple[object, ...] = plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
            return made

    def __format__(self, format_spec: str) -> str:
        """As of an ordinary tensor, which asks for its very class."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__format__(format_spec)  # type: ignore[no-untyped-call, no-any-return]

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> ReadOnly:
        """A tensor that refuses to be changed."""
        made = tensor.as_subclass(cls)
        made.tpde_name = name
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Function[object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run what does not change the copy, on the tensor beneath."""
        kwargs = kwargs or {}
        ours = [it for it in tree_leaves((args, kwargs)) if isinstance(it, cls)]
        first = next(iter((*args, *kwargs.values())), None)
        if isinstance(first, cls) and changes_first(func) and func not in HARMLESS:
            raise refuse_change(first.tpde_name, function_name(func))
        out = kwargs.get("out")
        if isinstance(out, cls):
            raise refuse_change(out.tpde_name, function_name(func))
        with torch._C.DisableTorchFunctionSubclass():
            memory = {it.untyped_storage().data_ptr(): it.tpde_name for it in ours}
            versions = [] if func in HARMLESS else [it._version for it in ours]
            result = func(*args, **kwargs)
            for it, version in zip(ours, versions, strict=False):
                if it._version != version:
                    raise refuse_change(it.tpde_name, function_name(func))
            return guarded(result, memory)


def guarded(result: object, memory: dict[int, str]) -> object:
    """Results, those of them read-only that lie in memory of decoded copies, by address and name.

    Arrays of `numpy` that have no memory of their own can only be of such.
    """
    if isinstance(result, (tuple, list)):
        made = [guarded(it, memory) for it in result]
        if isinstance(result, tuple):
            kind = cast("Function[object]", type(result))  # which says itself what it is made of
            return kind(*made) if hasattr(result, "_fields") else kind(made)
        return made
    if isinstance(result, np.ndarray) and not result.flags.owndata:
        result.flags.writeable = False
    if not isinstance(result, Tensor):
        return result
    if type(result) is ReadOnly:
        result = result.as_subclass(Tensor)
    if type(result) is not Tensor or result.device.type == "meta" or result.layout is not torch.strided:
        return result
    if is_transformed(result):
        return result
    name = memory.get(result.untyped_storage().data_ptr())
    return result if name is None or not result.numel() else ReadOnly.of(result, name)


HARMLESS = {
    Tensor.grad.__set__,  # type: ignore[union-attr]
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad_,
    Tensor.retain_grad,
    Tensor.detach_,
}
