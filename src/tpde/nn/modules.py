"""Modules with packed weights: subclasses, made as needed, of the modules' own classes.

A packed weight stays a parameter. Inside a forward pass, the module's attribute is the decoded tensor, a view
of the workspace; read from outside, it is the `PackedParameter`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tpde.errors import PackedWeight
from tpde.nn.embedding import PackedEmbedding, gathers, sets_attributes, unpatched, uses_super
from tpde.nn.group import Group, GroupSlot
from tpde.nn.module_state import PackedState
from tpde.nn.owner import rebuilds
from tpde.nn.routed import arguments_of, from_windows, routed
from tpde.nn.routing import fused, needed
from tpde.nn.scope import Scope, first_tensor, is_open, within
from tpde.nn.workspace import Pool
from tpde.weights import frozen
from tpde.weights.launch import capturing
from tpde.weights.lent import lend
from tpde.weights.product import casts, linear
from tpde.weights.transforms import forward_mode, refuse_export, untransformed

_LINEAR_FORWARD = unpatched(nn.Linear)


def is_conv1d(kind: type) -> bool:
    """Whether a class is transformers' `Conv1D`, a linear layer whose weight is transposed."""
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


class PackedModule(PackedState):
    """What all packed modules have in common; first among the bases of each.

    Attributes
    ----------
    tpde_base : type
        The class that the module had.
    tpde_sets : bool
        Its forward pass sets attributes of the module.
    tpde_known : callable
        Of experts and of `Conv1D`, the forward pass that they are multiplied for: their class's own.
    """

    tpde_base: type[nn.Module]
    tpde_sets: bool
    tpde_known: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """A module of the plain class: some code makes others of a module's class, as adapters do."""
        object.__setattr__(self, "__class__", self.tpde_base)
        self.__init__(*args, **kwargs)  # type: ignore[misc]  # that of its class by now

    def __setattr__(self, name: str, value: Any) -> None:
        """As before; a module that is given another class stays packed."""
        if name != "__class__" or issubclass(value, PackedModule):
            super().__setattr__(name, value)
            return
        super().__setattr__(name, packed_class(value, tuple(self.tpde_slots)))
        self.__dict__["tpde_base"] = value  # now, when no error leaves the module between two classes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before, with the weights at hand."""
        if not isinstance(self, PackedModule):  # unpacked since somebody took this method
            return type(self).forward(self, *args, **kwargs)
        if isinstance(self, PackedEmbedding):  # has no group: only rows of it are decoded
            return super().forward(*args, **kwargs)
        if is_compiling():
            return self._tpde_traced(args, kwargs)
        group = self.tpde_group()
        if group.live() or is_open(group):
            return self._tpde_routed(group, args, kwargs)
        return within(group, lambda _: self._tpde_routed(group, args, kwargs))

    def _tpde_routed(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass with a scope open; of experts, those that the router chose are decoded first."""
        if not group.routed or (space := group.open_workspace()) is None or space.group is not group:
            return super().forward(*args, **kwargs)
        slots = [slot for slot in fused(self) if slot.experts is not None]
        if not slots:
            return super().forward(*args, **kwargs)
        # A CUDA graph is replayed with other choices of the router, and has all.
        recorded = slots[0].packed.multiplies and capturing(slots[0].device)
        group.fetch(slots, range(slots[0].shape[0]) if recorded else needed(self, args, kwargs))
        try:
            return super().forward(*args, **kwargs)
        finally:
            group.forget(slots)

    def tpde_group(self) -> Group:
        """The group of the module's weights; a module copied out of its block gets one of its own."""
        for slot in self.tpde_slots.values():
            if (group := slot.group) is not None:
                return group
        slots = list(self.tpde_slots.values())
        made = self.__dict__["tpde_own_group"] = Group(slots[0].packed.name, slots, Pool())
        return made

    def _tpde_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass as the compiler sees it."""
        own = [slot for name, slot in self.tpde_slots.items() if self.tpde_holds(name)]
        if not own or (forward_mode() and is_grad_enabled()):  # then each weight is decoded where it is read
            return super().forward(*args, **kwargs)
        device = own[0].device
        if is_grad_enabled():
            slot = self.tpde_slots.get("weight")
            plain_linear = self.tpde_base.forward is _LINEAR_FORWARD
            # Compiled code has casts where the compiler saw them, and it sees none inside of an operator.
            autocast = torch.is_autocast_enabled(device.type)
            conv1d = is_conv1d(self.tpde_base) and self.tpde_base.forward is self.tpde_known
            if slot in own and (plain_linear or conv1d) and not autocast:
                width = slot.shape[0 if plain_linear else 1]
                x = (*args, *kwargs.values())
                return torch.ops.tpde.linear(*x, self.bias, slot.key, width, not plain_linear)
            if not (uses_super(self.tpde_base.forward) or self.tpde_sets):  # which the twin would lose
                # What is computed inside, weights included, is computed again for the backward pass.
                return checkpoint(self._tpde_twin, *args, use_reentrant=False, **kwargs)
        group = self.tpde_group()
        if group.flat is not None:  # the block did it
            return super().forward(*args, **kwargs)
        group.flat = group.materialize(first_tensor(args, kwargs, device))
        result = super().forward(*args, **kwargs)
        group.flat = None
        return result

    def _tpde_twin(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's own class, on an object that has its weights as attributes."""
        weights = {
            name: slot.materialize(first_tensor(args, kwargs, slot.device))
            for name, slot in self.tpde_slots.items()
            if self.tpde_holds(name)
        }
        return self.tpde_base.forward(_Twin(self, weights), *args, **kwargs)

    def tpde_holds(self, name: str) -> bool:
        """Whether the module has a packed weight, no other in its place, as `torch.func.functional_call`."""
        return self._parameters.get(name) is self.tpde_slots[name].parameter

    def tpde_weight(self, name: str) -> Tensor:
        """A packed weight, for whoever asks: decoded within a forward pass, else the parameter."""
        slot = self.tpde_slots[name]
        if is_compiling():
            alone = isinstance(self, PackedEmbedding) or (slot.packed.multiplies and slot.experts is None)
            group = None if alone else self.tpde_group()
            if group is None or group.flat is None:  # read by other code, often only for its dtype: then it
                nothing = torch.empty(0, device=slot.device)  # is never computed
                return slot.materialize(nothing)
            return slot.in_buffer(group.flat)
        group = slot.group  # none of embeddings
        if group is None:
            return slot.parameter
        space = None if group.beside else group.open_workspace()
        if space is None and not group.beside:
            return slot.parameter
        here = space is not None and space.group is group
        if not here:
            return lend(slot.parameter.plain(), slot.packed.name)
        with untransformed():
            weight = slot.formatted(group.view(slot))
        return lend(weight, slot.packed.name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        if rebuilds(reduced):
            return reduced
        return (_new, (self.tpde_base, tuple(self.tpde_slots)), *reduced[2:])


class PackedLinear(PackedModule):
    """A linear layer whose forward pass is `nn.Linear`'s, on the shortest way: models have hundreds."""

    def forward(self, input: Tensor) -> Any:
        """As before, with the weight at hand."""
        if not isinstance(self, PackedModule):  # see there
            return type(self).forward(self, input)
        slot, parameters = self.tpde_slots["weight"], self._parameters
        if self.tpde_base.forward is not _LINEAR_FORWARD:  # patched, maybe since
            return super().forward(input)
        if parameters.get("weight") is not slot.parameter:  # `torch.func.functional_call`
            return super().forward(input)
        if slot.packed.tile_bytes:
            return self._tpde_tiled(input)
        if slot.packed.multiplies:
            return self._tpde_product(input)
        if is_compiling():
            return super().forward(input)
        group = slot.group
        if group is None:
            return super().forward(input)
        bias: Any = parameters.get("bias", self)  # `self.bias` takes as long as all the rest
        if bias is self:  # not where layers have it
            bias = self.bias
        if group.live():
            return frozen.linear(input, slot.view, slot.bare, bias)  # type: ignore[arg-type]
        if len(group.slots) > 1 or is_open(group):
            return super().forward(input)
        # The layer is a block of its own, such as a model's last.
        return within(group, functools.partial(self._tpde_alone, group, input, bias))

    def _tpde_alone(self, group: Group, input: Tensor, bias: Any, scope: Scope) -> Any:
        """The forward pass of a layer outside of blocks."""
        if not scope.outermost:
            return super().forward(input)
        group.fill()
        slot = group.slots[0]
        return frozen.linear(input, slot.view, slot.bare, bias)  # type: ignore[arg-type]

    def _tpde_product(self, input: Tensor) -> Tensor:
        """The forward pass of a layer whose weight is multiplied as it is."""
        slot, parameters = self.tpde_slots["weight"], self._parameters
        bias: Any = parameters.get("bias", self)  # as in `forward`
        if bias is self:
            bias = self.bias
        if not is_compiling():
            made = linear(slot.packed, input, bias, slot.parameter.plain_requires_grad)
            return functional.linear(input, cast(Tensor, self.weight), bias) if made is None else made
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type) and casts(input):
            dtype = torch.get_autocast_dtype(input.device.type)  # casts where the compiler sees them
            input, bias = input.to(dtype), bias if bias is None else bias.to(dtype)
        if dtype is slot.dtype and not forward_mode():
            return cast(Tensor, torch.ops.tpde.linear(input, bias, slot.key, slot.shape[0], False))
        return functional.linear(input, slot.materialize(input.detach()), bias)

    def _tpde_tiled(self, input: Tensor) -> Tensor:
        """The forward pass of a layer larger than any buffer."""
        slot, bias, device = self.tpde_slots["weight"], self.bias, input.device.type
        if forward_mode():
            raise PackedWeight(
                f"`{slot.packed.name}` is packed and larger than any buffer: of the tiles it is multiplied "
                "in there are no forward-mode derivatives",
                hint="use reverse mode (`backward`, `torch.func.vjp`), or load the model with more `vram`",
            )
        # What autocast would do inside of the operator, but where the compiler sees it.
        lower = torch.is_autocast_enabled(device) and input.dtype is not torch.float64
        if lower:
            dtype = torch.get_autocast_dtype(device)
            input, bias = input.to(dtype), bias if bias is None else bias.to(dtype)
        work = functools.partial(torch.ops.tpde.tiled_linear, input, bias, slot.key, slot.shape[0], lower)
        if is_compiling() or is_open(group := self.tpde_group()):
            return cast(Tensor, work())
        return within(group, lambda _: cast(Tensor, work()))  # for the workspace


class PackedExperts(PackedModule):
    """Experts that are multiplied as they are, where that is faster: see `tpde.nn.routed`."""

    tpde_arguments: tuple[str, str, str]  # of that forward pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before, or from windows."""
        if not isinstance(self, PackedModule):  # see there
            return type(self).forward(self, *args, **kwargs)
        known = self.tpde_base.forward is self.tpde_known and not forward_mode()
        known = known and all(map(self.tpde_holds, self.tpde_slots))
        call = routed(self, args, kwargs) if known else None
        return super().forward(*args, **kwargs) if call is None else from_windows(self, call)


class _Twin:
    """Stands in for a module: has its attributes, but other weights.

    Setting weights of the module itself would be a side effect, which checkpointed code may not have.
    """

    def __init__(self, module: PackedModule, weights: dict[str, Tensor]) -> None:
        self.tpde_module, self.tpde_weights = module, weights

    def __getattr__(self, name: str) -> Any:
        weights = self.__dict__["tpde_weights"]
        return weights[name] if name in weights else getattr(self.__dict__["tpde_module"], name)


def _refuse_compiled(slot: GroupSlot) -> None:
    """Refuse, of programs, those with another tensor in a weight's place that would not be right.

    Raises
    ------
    PackedWeight
        In `torch.export`, which puts stand-ins there, and of a tied weight.
    """
    refuse_export()
    if slot.tied:  # an embedding that has it, too, would not see: see `PackedEmbedding`
        raise PackedWeight(
            f"`{slot.packed.name}` is packed and tied, and another tensor is in its place in compiled code",
            hint="call the model without `torch.compile`, or call `tpde.unpack_module(model)` first",
        )


def _weight(name: str) -> property:
    def read(self: PackedModule) -> Tensor:
        slot = self.tpde_slots[name]
        held = self._parameters.get(name)
        if held is None and name not in self._parameters:
            raise AttributeError(f"`{slot.packed.name}` was taken out of its {type(self).__name__}")
        if held is not None and held is not slot.parameter:
            if is_compiling():
                _refuse_compiled(slot)
            return held  # somebody has put it there for a moment, as `torch.func.functional_call` does
        if not is_compiling():
            group = slot.group
            if group is not None and group.live() and slot.experts is None:
                return lend(slot.formatted(cast(Tensor, slot.view)), slot.packed.name)
        return self.tpde_weight(name)

    return property(read, doc=f"The packed `{name}`: see `PackedModule`.")


@functools.cache
def packed_class(base: type[nn.Module], names: tuple[str, ...]) -> type[PackedModule]:
    """The subclass of a module's class whose parameters of these names are packed."""
    bases: tuple[type, ...] = (PackedModule, base)
    if base.forward is nn.Linear.forward:
        bases = (PackedLinear, base)
    elif gathers(base):
        bases = (PackedModule, PackedEmbedding) if base is nn.Embedding else (*bases, PackedEmbedding)
    elif arguments_of(base) is not None:  # type: ignore[arg-type]
        bases = (PackedExperts, base)
    members: dict[str, Any] = {name: _weight(name) for name in names}
    members |= {"tpde_base": base, "tpde_sets": sets_attributes(base.forward), "__module__": __name__}
    if PackedExperts in bases:
        members["tpde_arguments"] = arguments_of(base)  # type: ignore[arg-type]
        members["tpde_known"] = staticmethod(base.forward)
    elif is_conv1d(base):
        members["tpde_known"] = staticmethod(unpatched(base))
    return type(f"Packed{base.__name__}", bases, members)


def _new(base: type[nn.Module], names: tuple[str, ...]) -> PackedModule:
    kind = packed_class(base, names)  # type: ignore[arg-type]
    return object.__new__(kind)
