"""Modules with packed weights: subclasses, made as needed, of the modules' own classes.

A weight is a property. Inside a forward pass it is a view of the workspace; read from outside, it is a fresh
copy that refuses to be changed.
"""

from __future__ import annotations

import functools
import inspect
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tpde.errors import PackedWeight, TpdeError
from tpde.nn.experts import fused, needed
from tpde.nn.group import Group, Pool
from tpde.nn.plain import PlainWeight
from tpde.nn.scope import Scope, first_tensor, is_open
from tpde.nn.slot import Slot
from tpde.weights.source import Source

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


def is_conv1d(kind: type) -> bool:
    """Whether a class is transformers' `Conv1D`, a linear layer whose weight is transposed."""
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def uses_super(function: Any) -> bool:
    """Whether a method calls the same one of its parent class."""
    return "__class__" in inspect.unwrap(function).__code__.co_freevars


def gathers(kind: type) -> bool:
    """Whether a class is an embedding that looks rows up as `nn.Embedding` does."""
    if not issubclass(kind, nn.Embedding):
        return False
    before = kind.__mro__[: kind.__mro__.index(nn.Embedding)]
    return all(uses_super(vars(it)["forward"]) for it in before if "forward" in vars(it))


class PackedModule(_Base):
    """What all packed modules have in common; first among the bases of each.

    Attributes
    ----------
    tpde_slots : dict of str to Slot
        The packed weights by the names of the parameters they replace.
    tpde_order : list of str
        The names of all of the module's parameters, in the order in which unpacking restores them.
    """

    tpde_base: type[nn.Module]  # the class that the module had
    tpde_slots: dict[str, Slot]
    tpde_order: list[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before, with the weights at hand."""
        if isinstance(self, PackedEmbedding):  # has no group: only rows of it are decoded
            return super().forward(*args, **kwargs)
        if is_compiling():
            return self._tpde_traced(args, kwargs)
        group = self.tpde_group()
        if group.live() or is_open(group):
            return self._tpde_routed(group, args, kwargs)
        scope = Scope(group)
        try:
            return self._tpde_routed(group, args, kwargs)
        finally:
            scope.close()

    def _tpde_routed(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass with a scope open; of experts, those that the router chose are decoded first."""
        if not group.routed or group.workspace.group is not group:
            return super().forward(*args, **kwargs)
        slots = [slot for slot in fused(self) if slot.experts is not None]
        if not slots:
            return super().forward(*args, **kwargs)
        group.fetch(slots, needed(self, args, kwargs))
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
        made = self.__dict__["tpde_own_group"] = Group(slots[0].parts[0][0].name, slots, Pool())
        return made

    def _tpde_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward pass as the compiler sees it."""
        if is_grad_enabled():
            slot = self.tpde_slots.get("weight")
            plain_linear = self.tpde_base.forward is nn.Linear.forward
            # Compiled code has casts where the compiler saw them, and it sees none inside of an operator.
            autocast = torch.is_autocast_enabled(first_tensor(args, kwargs).device.type)
            if slot is not None and (plain_linear or is_conv1d(self.tpde_base)) and not autocast:
                width = slot.shape[0 if plain_linear else 1]
                x = (*args, *kwargs.values())
                return torch.ops.tpde.linear(*x, self.bias, slot.key, width, not plain_linear)
            if not uses_super(self.tpde_base.forward):
                # What is computed inside, weights included, is computed again for the backward pass.
                return checkpoint(self._tpde_twin, *args, use_reentrant=False, **kwargs)
        group = self.tpde_group()
        if group.flat is not None:  # the block did it
            return super().forward(*args, **kwargs)
        group.flat = group.materialize(first_tensor(args, kwargs))
        result = super().forward(*args, **kwargs)
        group.flat = None
        return result

    def _tpde_twin(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module's own class, on an object that has its weights as attributes."""
        after = first_tensor(args, kwargs)
        weights = {name: slot.materialize(after).view(slot.shape) for name, slot in self.tpde_slots.items()}
        return self.tpde_base.forward(_Twin(self, weights), *args, **kwargs)

    def tpde_weight(self, name: str) -> Tensor:
        """A packed weight, for whoever asks."""
        slot = self.tpde_slots[name]
        if isinstance(self, PackedEmbedding):
            return PlainWeight.of(slot)
        group = self.tpde_group()
        if is_compiling():
            if group.flat is None:  # read by other code, often only for its dtype: then it is never computed
                nothing = torch.empty(0, device=slot.device)
                return slot.materialize(nothing).view(slot.shape)
            return slot.in_buffer(group.flat)
        if slot.together:
            space = group.workspace
            if space.thread == get_ident():
                return group.view(slot) if space.group is group else slot.fresh()
        return PlainWeight.of(slot)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("tpde_slots", ()):
            if isinstance(value, PlainWeight) and value.tpde_parts == self.tpde_slots[name].parts:
                return  # tying what is tied
            raise PackedWeight(
                f"`{name}` of {type(self).__name__} is packed and cannot be replaced; call "
                "`tpde.unpack_module(module)` first"
            )
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse to train a packed weight."""
        if requires_grad:
            raise PackedWeight(
                f"the weights of {type(self).__name__} are packed and cannot be trained; call "
                "`tpde.unpack_module(module)` first, or train an adapter"
            )
        return super().requires_grad_(False)

    def _packed(self) -> dict[str, Source]:
        """Packed tensors by the names of the buffers that hold their blobs."""
        return {
            name: part
            for slot in self.tpde_slots.values()
            for name, (part, _) in zip(slot.buffer_names(), slot.parts, strict=True)
        }

    def tpde_sync(self) -> None:
        """Name the blobs in the buffers, after the packed tensors got new ones."""
        for name, packed in self._packed().items():
            self._buffers[name] = packed.blob

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move. Blobs move once for all modules that share them; casts are refused."""
        for slot in self.tpde_slots.values():
            found = fn(torch.empty(0, dtype=slot.dtype, device=slot.device)).dtype
            if found is not slot.dtype:
                raise PackedWeight(
                    f"`{slot.parts[0][0].name}` is packed as {slot.dtype} and cannot be cast to {found}; "
                    "call `tpde.unpack_module(model)` first, cast, and pack again"
                )
        blobs = {name: self._buffers.pop(name) for name in self._packed()}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers.update(blobs)
        for packed in self._packed().values():
            packed.apply(fn)
        self.tpde_sync()
        for slot in self.tpde_slots.values():
            slot.refresh()
            if (group := slot.group) is not None:
                group.prepare()
            elif isinstance(self, PackedEmbedding):
                slot.prepare_rows()
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take other blobs, whose sizes may differ."""
        packed = self._packed()
        blobs = {name: self._buffers.pop(name) for name in packed}
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._buffers.update(blobs)
        for name, tensor in packed.items():
            key = prefix + name
            if key not in state_dict:
                if strict:
                    missing_keys.append(key)
                continue
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            try:
                tensor.load(
                    state_dict[key], assign=bool(local_metadata.get("assign_to_params_buffers", False))
                )
            except TpdeError as error:
                error_msgs.append(str(error))
        for name, slot in self.tpde_slots.items():
            if prefix + name in state_dict:
                error_msgs.append(
                    f"`{prefix}{name}` is plain, the model's is packed: call `tpde.unpack_module(model)` "
                    "before loading, or load a packed state dict"
                )
            slot.refresh()
        self.tpde_sync()

    def extra_repr(self) -> str:
        """As before, and how large the packed weights are."""
        plain = sum(slot.nbytes for slot in self.tpde_slots.values())
        packed = sum(part.blob.numel() for part in self._packed().values())
        return f"{super().extra_repr()}, packed={packed / max(plain, 1):.3f}".removeprefix(", ")

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        state = dict(reduced[2])
        blobs = self._packed()  # which the slots bring along
        state["_buffers"] = {name: value for name, value in self._buffers.items() if name not in blobs}
        return (_new, (self.tpde_base, tuple(self.tpde_slots)), state, *reduced[3:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.tpde_sync()


class PackedLinear(PackedModule):
    """A linear layer whose forward pass is `nn.Linear`'s, on the shortest way: models have hundreds."""

    def forward(self, input: Tensor) -> Any:
        """As before, with the weight at hand."""
        slot = self.tpde_slots["weight"]
        if slot.tile_bytes:
            return self._tpde_tiled(input)
        if is_compiling():
            return super().forward(input)
        group = slot.group
        if group is None:
            return super().forward(input)
        bias: Any = self._parameters.get("bias", self)  # `self.bias` takes as long as all the rest
        if bias is self:  # not where layers have it
            bias = self.bias
        if group.live():
            return functional.linear(input, slot.view, bias)  # type: ignore[arg-type]
        if len(group.slots) > 1 or is_open(group):
            return super().forward(input)
        scope = Scope(group)  # the layer is a block of its own, such as a model's last
        try:
            if not scope.outermost:
                return super().forward(input)
            group.fill()
            return functional.linear(input, slot.view, bias)  # type: ignore[arg-type]
        finally:
            scope.close()

    def _tpde_tiled(self, input: Tensor) -> Tensor:
        """The forward pass of a layer larger than any buffer."""
        slot, bias, device = self.tpde_slots["weight"], self.bias, input.device.type
        # What autocast would do inside of the operator, but where the compiler sees it.
        lower = torch.is_autocast_enabled(device) and input.dtype is not torch.float64
        if lower:
            dtype = torch.get_autocast_dtype(device)
            input, bias = input.to(dtype), bias if bias is None else bias.to(dtype)
        work = functools.partial(torch.ops.tpde.tiled_linear, input, bias, slot.key, slot.shape[0], lower)
        if is_compiling() or is_open(group := self.tpde_group()):
            return cast(Tensor, work())
        scope = Scope(group)  # for the workspace
        try:
            return cast(Tensor, work())
        finally:
            scope.close()


class _Twin:
    """Stands in for a module: has its attributes, but other weights.

    Setting weights of the module itself would be a side effect, which checkpointed code may not have.
    """

    def __init__(self, module: PackedModule, weights: dict[str, Tensor]) -> None:
        self.tpde_module, self.tpde_weights = module, weights

    def __getattr__(self, name: str) -> Any:
        weights = self.__dict__["tpde_weights"]
        return weights[name] if name in weights else getattr(self.__dict__["tpde_module"], name)


class PackedEmbedding(nn.Embedding):
    """Decodes the rows asked for.

    Last among the bases, so that classes that wrap `nn.Embedding.forward` keep what they do with its result.
    """

    tpde_slots: dict[str, Slot]

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the packed weight."""
        slot = self.tpde_slots["weight"]
        if is_compiling():
            return cast(Tensor, torch.ops.tpde.embedding(input, slot.key, slot.shape[1], slot.dtype))
        return slot.rows(input)


def _weight(name: str) -> property:
    def read(self: PackedModule) -> Tensor:
        if not is_compiling():
            slot = self.tpde_slots[name]
            group = slot.group
            if group is not None and group.live() and slot.experts is None:
                return cast(Tensor, slot.view)
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
    members = {name: _weight(name) for name in names} | {"tpde_base": base, "__module__": __name__}
    return type(f"Packed{base.__name__}", bases, members)


def _new(base: type[nn.Module], names: tuple[str, ...]) -> PackedModule:
    kind = packed_class(base, names)  # type: ignore[arg-type]
    return kind.__new__(kind)
