"""What modules hold packed weights by: attributes, moves and state dicts, with what is refused of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tpde.errors import PackedWeight, TpdeError
from tpde.nn.embedding import PackedEmbedding
from tpde.nn.group import GroupSlot
from tpde.weights.frozen import CONTIGUOUS
from tpde.weights.parameter import PackedParameter

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class PackedState(_Base):
    """A module's packed weights as parameters, which stay what they are.

    Attributes
    ----------
    tpde_slots : dict of str to Slot
        The packed weights by the names of their parameters.
    """

    tpde_slots: dict[str, GroupSlot]

    def __setattr__(self, name: str, value: Any) -> None:
        slots = self.__dict__.get("tpde_slots", {})
        if name == "qconfig" and slots:
            raise PackedWeight(
                f"`{next(iter(slots.values())).packed.name}` is packed, and cannot be quantized",
                hint="call `tpde.unpack_module(model)` first",
            )
        slot = slots.get(name)
        if slot is not None:
            self._refuse_others(slot, name, value)
            return  # tying what is tied
        super().__setattr__(name, value)

    def _refuse_others(self, slot: GroupSlot, name: str, value: Any) -> None:
        """Refuse anything but the same packed weight in its place."""
        if not (isinstance(value, PackedParameter) and value.packed is slot.packed):
            raise PackedWeight(
                f"`{slot.packed.name}`, the `{name}` of a {type(self).__name__}, is packed and cannot be "
                "replaced",
                hint="call `tpde.unpack_module(module)` first",
            )

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
            If it is to be replaced, was taken out, or is to be registered again. It is where it was then.
        """
        if (slot := self.tpde_slots.get(name)) is not None:
            self._refuse_others(slot, name, param)
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
        held = self._parameters  # maybe others by now: anybody may write to it
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

    def _tpde_format(self, slot: GroupSlot, fn: Any) -> torch.memory_format | None:
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

    def tpde_check_state(self, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
        """Refuse other values for a packed weight.

        Raises
        ------
        PackedWeight, InvalidInput
            Naming the weight.
        """
        for name, slot in self.tpde_slots.items():
            if prefix + name not in state_dict:
                continue
            value = state_dict[prefix + name]
            if not slot.parameter.takes(value):
                raise PackedWeight(
                    f"`{slot.packed.name}` is packed, and the state dict has other values for it; nothing "
                    "of the packed model was loaded",
                    hint="call `tpde.unpack_module(model)` first, load, and pack again",
                )
            if assign:
                _refuse_elsewhere(slot, value)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As before, if it has no other values for packed weights."""
        if not self._load_state_dict_pre_hooks:  # which may make another one of it
            self.tpde_check_state(state_dict, "", assigns(*args, **kwargs))
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
            value, assign = state_dict[key], local_metadata.get("assign_to_params_buffers")
            try:
                if isinstance(value, PackedParameter) and assign:
                    slot.packed.load(value.packed, assign=True)
                    slot.parameter.sync()
                else:
                    if assign:
                        _refuse_elsewhere(slot, value)
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

    def _replicate_for_data_parallel(self) -> NoReturn:
        slot = next(iter(self.tpde_slots.values()))
        raise PackedWeight(
            f"`{slot.packed.name}` is packed, and `torch.nn.DataParallel` would copy it plain to each GPU in "
            "each call",
            hint="call `tpde.unpack_module(model)` first, or use `DistributedDataParallel`",
        )

    def extra_repr(self) -> str:
        """As before, and how large the packed weights are."""
        plain = sum(slot.nbytes for slot in self.tpde_slots.values())
        packed = sum(slot.packed.packed_bytes for slot in self.tpde_slots.values())
        return f"{super().extra_repr()}, packed={packed / max(plain, 1):.3f}".removeprefix(", ")


def assigns(strict: bool = True, assign: bool = False, **_: Any) -> bool:
    """Whether `load_state_dict` is to take the state dict's tensors themselves, by its other arguments."""
    return assign


def _refuse_elsewhere(slot: GroupSlot, value: Any) -> None:
    """Refuse to be assigned plain values of another dtype, or elsewhere: what is not packed would be theirs.

    Raises
    ------
    PackedWeight
        Naming the weight.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, PackedParameter):
        return
    if (value.dtype, value.device) != (slot.dtype, slot.device):
        raise PackedWeight(
            f"`{slot.packed.name}` is packed as {slot.dtype} on {slot.device}, and {value.dtype} on "
            f"{value.device} would be assigned to it",
            hint="leave out `assign=True`, or call `tpde.unpack_module(model)` first",
        )
