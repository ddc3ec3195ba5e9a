"""Modules with packed weights: subclasses, made as needed, of the modules' own classes.

A packed weight stays a parameter. Inside a forward pass, the module's attribute is the decoded tensor, a view
of the workspace; read from outside, it is the `PackedParameter`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tpde.errors import PackedWeight, TpdeError
from tpde.nn.group import Group, Pool
from tpde.nn.routed import arguments_of, from_windows, routed
from tpde.nn.routing import fused, needed
from tpde.nn.scope import Scope, first_tensor, is_open
from tpde.nn.slot import Slot
from tpde.weights.frozen import CONTIGUOUS
from tpde.weights.launch import capturing
from tpde.weights.lent import lend
from tpde.weights.parameter import PackedParameter
from tpde.weights.product import casts, linear
from tpde.weights.transforms import transformed

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
        The packed weights by the names of their parameters.
    """

    tpde_base: type[nn.Module]  # the class that the module had
    tpde_slots: dict[str, Slot]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the plain class: some code makes others of a module's class, as adapters do."""
        return cls.tpde_base(*args, **kwargs)

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
            result = self._tpde_routed(group, args, kwargs)
            scope.check()
            return result
        except Exception:
            scope.check()
            raise
        finally:
            scope.close()

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
        weights = {name: slot.materialize(after) for name, slot in self.tpde_slots.items()}
        return self.tpde_base.forward(_Twin(self, weights), *args, **kwargs)

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
        weight = slot.formatted(group.view(slot)) if here else slot.parameter.plain()
        return lend(weight, slot.packed.name)

    def __setattr__(self, name: str, value: Any) -> None:
        slots = self.__dict__.get("tpde_slots", {})
        if name == "qconfig" and slots:
            raise PackedWeight(
                f"`{next(iter(slots.values())).packed.name}` is packed, and cannot be quantized",
                hint="call `tpde.unpack_module(model)` first",
            )
        slot = slots.get(name)
        if slot is not None:
            if isinstance(value, PackedParameter) and value.packed is slot.packed:
                return  # tying what is tied
            raise PackedWeight(
                f"`{slot.packed.name}`, the `{name}` of a {type(self).__name__}, is packed and cannot be "
                "replaced",
                hint="call `tpde.unpack_module(module)` first",
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        slot = self.__dict__.get("tpde_slots", {}).get(name)
        if slot is not None:
            raise PackedWeight(
                f"`{slot.packed.name}`, the `{name}` of a {type(self).__name__}, is packed and cannot be "
                "removed, or parametrized",
                hint="call `tpde.unpack_module(module)` first",
            )
        super().__delattr__(name)

    def register_parameter(self, name: str, param: Any) -> None:
        """As before, but for what is to take a packed weight's place: see `torch.nn.utils.weight_norm`.

        Raises
        ------
        PackedWeight
            If a packed weight was taken out, or is to be registered again. It is where it was then.
        """
        for leaf, slot in self.tpde_slots.items():
            if name.startswith(f"{leaf}_") and (leaf not in self._parameters or param is slot.parameter):
                self._put_back()
                raise PackedWeight(
                    f"`{slot.packed.name}`, the `{leaf}` of a {type(self).__name__}, is packed and cannot be "
                    f"computed from a `{name}`",
                    hint="call `tpde.unpack_module(module)` first to prune or to normalize it",
                )
        super().register_parameter(name, param)

    def _put_back(self) -> None:
        """Give the module the packed weights again that were taken out of it; they come first."""
        held = self._parameters
        both = {name: slot.parameter for name, slot in self.tpde_slots.items() if name not in held} | held
        held.clear()
        held.update(both)

    @contextmanager
    def _without_packed(self) -> Iterator[None]:
        """PyTorch's own code passes over packed weights meanwhile."""
        held = self._parameters  # maybe others by now: `register_parameter` replaces what is there
        packed = {
            name: it.parameter for name, it in self.tpde_slots.items() if held.get(name) is it.parameter
        }
        self._parameters.update(dict.fromkeys(packed))
        try:
            yield
        finally:
            self._parameters.update(packed)

    def tpde_check(self, fn: Any) -> None:
        """Refuse what would cast a packed weight, put it in another memory format, or lose its bytes.

        Raises
        ------
        PackedWeight
            Naming the weight.
        """
        for slot in self.tpde_slots.values():
            found = fn(torch.empty(0, dtype=slot.dtype, device=slot.device)).dtype
            if found is not slot.dtype:
                raise PackedWeight(
                    f"`{slot.packed.name}` is packed as {slot.dtype} and cannot be cast to {found}",
                    hint="call `tpde.unpack_module(model)` first, cast, and pack again",
                )
            if self._tpde_format(slot, fn) is None:
                raise PackedWeight(
                    f"`{slot.packed.name}` is packed, and cannot be put in another memory format",
                    hint="call `tpde.unpack_module(model)` first; inputs can be in any format",
                )
            slot.packed.check(fn)

    def _tpde_format(self, slot: Slot, fn: Any) -> torch.memory_format | None:
        """The memory format that a function puts a weight in; None if the weight cannot be in it."""
        before, shape = slot.parameter.memory_format, [min(size, 2) for size in slot.shape]
        small = torch.empty(shape, dtype=slot.dtype, device=slot.device).to(memory_format=before)
        found = fn(small)
        if found.stride() == small.stride():
            return before
        formats = {4: (CONTIGUOUS, torch.channels_last), 5: (CONTIGUOUS, torch.channels_last_3d)}
        for it in formats.get(len(shape), ()) if isinstance(self, CONVOLUTIONS) else ():
            # A streamed one is decoded under a budget, in which there is no room for a second copy.
            if slot.packed.settled and found.stride() == torch.empty(shape).to(memory_format=it).stride():
                return it
        return None

    def tpde_check_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Refuse other values for a packed weight.

        Raises
        ------
        PackedWeight, InvalidInput
            Naming the weight.
        """
        for name, slot in self.tpde_slots.items():
            if prefix + name in state_dict and not slot.parameter.takes(state_dict[prefix + name]):
                raise PackedWeight(
                    f"`{slot.packed.name}` is packed, and the state dict has other values for it; nothing "
                    "was loaded",
                    hint="call `tpde.unpack_module(model)` first, load, and pack again",
                )

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As before, if it has no other values for packed weights."""
        if not self._load_state_dict_pre_hooks:  # which may make another one of it
            self.tpde_check_state(state_dict, "")
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move. Blobs move once for all modules that share them."""
        self.tpde_check(fn)
        formats = {slot: self._tpde_format(slot, fn) for slot in self.tpde_slots.values()}
        with self._without_packed():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for slot, memory_format in formats.items():
            slot.packed.apply(fn)
            slot.parameter.memory_format = memory_format or CONTIGUOUS
            slot.parameter.sync()
        for slot in self.tpde_slots.values():
            if (group := slot.group) is not None:
                group.prepare()
            elif isinstance(self, PackedEmbedding):
                slot.packed.prepare_rows()
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
        """Take other packed weights, whose sizes may differ, and plain ones that have the same values."""
        with self._without_packed():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        for name, slot in self.tpde_slots.items():
            key = prefix + name
            if key not in state_dict:
                if strict:
                    missing_keys.append(key)
                continue
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            value = state_dict[key]
            try:
                if isinstance(value, PackedParameter) and local_metadata.get("assign_to_params_buffers"):
                    slot.packed.load(value.packed, assign=True)
                    slot.parameter.sync()
                else:
                    with torch.no_grad():
                        slot.parameter.copy_(value)
            except TpdeError as error:
                error_msgs.append(f"{key}: {error}")

    def __prepare_scriptable__(self) -> Any:
        slot = next(iter(self.tpde_slots.values()))
        raise PackedWeight(
            f"`{slot.packed.name}` is packed, and `torch.jit.script` would compile modules without it",
            hint="call `tpde.unpack_module(model)` first, or use `torch.compile`",
        )

    def extra_repr(self) -> str:
        """As before, and how large the packed weights are."""
        plain = sum(slot.nbytes for slot in self.tpde_slots.values())
        packed = sum(slot.packed.packed_bytes for slot in self.tpde_slots.values())
        return f"{super().extra_repr()}, packed={packed / max(plain, 1):.3f}".removeprefix(", ")

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return (_new, (self.tpde_base, tuple(self.tpde_slots)), *reduced[2:])


class PackedLinear(PackedModule):
    """A linear layer whose forward pass is `nn.Linear`'s, on the shortest way: models have hundreds."""

    def forward(self, input: Tensor) -> Any:
        """As before, with the weight at hand."""
        slot = self.tpde_slots["weight"]
        if slot.packed.tile_bytes:
            return self._tpde_tiled(input)
        if slot.packed.multiplies:
            return self._tpde_product(input)
        if is_compiling():
            return super().forward(input)
        group, parameters = slot.group, self._parameters
        if group is None or parameters.get("weight") is not slot.parameter:  # `torch.func.functional_call`
            return super().forward(input)
        bias: Any = parameters.get("bias", self)  # `self.bias` takes as long as all the rest
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

    def _tpde_product(self, input: Tensor) -> Tensor:
        """The forward pass of a layer whose weight is multiplied as it is."""
        slot, parameters = self.tpde_slots["weight"], self._parameters
        bias: Any = parameters.get("bias", self)  # as in `forward`
        if bias is self:
            bias = self.bias
        if not is_compiling():
            made = None
            if parameters.get("weight") is slot.parameter:
                made = linear(slot.packed, input, bias, slot.parameter.plain_requires_grad)
            return functional.linear(input, cast(Tensor, self.weight), bias) if made is None else made
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type) and casts(input):
            dtype = torch.get_autocast_dtype(input.device.type)  # casts where the compiler sees them
            input, bias = input.to(dtype), bias if bias is None else bias.to(dtype)
        if dtype is slot.dtype:
            return cast(Tensor, torch.ops.tpde.linear(input, bias, slot.key, slot.shape[0], False))
        return functional.linear(input, slot.materialize(input), bias)

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


class PackedExperts(PackedModule):
    """Experts that are multiplied as they are, where that is faster: see `tpde.nn.routed`."""

    tpde_arguments: tuple[str, str, str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As before, or from windows."""
        call = routed(self, args, kwargs)
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
        if self._parameters.get("weight") is not slot.parameter or transformed():
            return super().forward(input)
        return slot.rows(input)


def _weight(name: str) -> property:
    def read(self: PackedModule) -> Tensor:
        slot = self.tpde_slots[name]
        held = self._parameters.get(name)
        if held is None and name not in self._parameters:
            raise AttributeError(f"`{slot.packed.name}` was taken out of its {type(self).__name__}")
        if held is not None and held is not slot.parameter and not is_compiling():
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
    members = {name: _weight(name) for name in names} | {"tpde_base": base, "__module__": __name__}
    if PackedExperts in bases:
        members["tpde_arguments"] = arguments_of(base)  # type: ignore[arg-type]
    return type(f"Packed{base.__name__}", bases, members)


def _new(base: type[nn.Module], names: tuple[str, ...]) -> PackedModule:
    kind = packed_class(base, names)  # type: ignore[arg-type]
    return object.__new__(kind)
