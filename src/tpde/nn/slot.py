"""One packed weight of a module, and its place in the buffer of its group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from tpde.nn.tiles import RowTiles
from tpde.weights import operators as ops
from tpde.weights.frozen import as_weight, aside, formatted
from tpde.weights.parameter import PackedParameter
from tpde.weights.source import ALIGN
from tpde.weights.user import User

__all__ = ["ALIGN", "ExpertSource", "FromWindows", "Slot", "SlotGroup"]


class ExpertSource(Protocol):
    """What decodes some experts of a module: see `tpde.streaming.experts`."""

    def fetch(self, numbers: Sequence[int], out: Tensor) -> None:
        """Decode these experts, of all the module's fused weights that it is set for, on the current stream.

        Parameters
        ----------
        numbers : sequence of int
            Ascending.
        out : torch.Tensor
            The workspace: each expert goes to its place in its slot, which starts at the slot's `offset`.
        """


class SlotGroup(User, Protocol):
    """What a weight tells the group that it is in, and asks it for: room to be decoded to."""

    def release(self) -> int:
        """Give the workspace up for a moment, and say how large it is."""

    def tile_room(self) -> Tensor | None:
        """Where tiles go in the workspace, if this thread has it."""


G = TypeVar("G", bound=SlotGroup)


def _no_group() -> None:
    """What a weight without a group is given for a reference to it."""


class Slot(Generic[G]):
    """One packed weight of a module, and where it goes in its group's buffer.

    Parameters
    ----------
    name : str
        The parameter's name in its module.
    parameter : PackedParameter
        What the module holds.

    Attributes
    ----------
    group : Group or None
        The weights decoded together with it. A copy of a single module has none, until one is made for it.
        The block, or the module, holds it: were it held here, a model that nobody uses would stay.
    offset : int
        Of its bytes in the group's buffer.
    experts : ExpertSource or None
        What decodes those experts that are routed to, if it is a fused tensor of them: see `route_experts`.
    tied : bool
        Other modules hold the weight, too, or did.
    view : torch.Tensor or None
        The weight in the workspace whose buffer is `view_of`.
    bare : torch.Tensor or None
        The same, which says that it requires no gradient, where `view` says otherwise.
    """

    def __init__(self, name: str, parameter: PackedParameter) -> None:
        self.name, self.offset = name, 0
        self.experts: ExpertSource | None = None
        self.tied = False
        self._take(parameter)

    def _take(self, parameter: PackedParameter) -> None:
        self.parameter, self.packed = parameter, parameter.packed
        self.dtype, self.shape, self.nbytes = self.packed.dtype, self.packed.shape, self.packed.nbytes
        self._group: Callable[[], G | None] = _no_group
        self.packed.watch(self)
        slots = [it for it in self.packed.users() if isinstance(it, Slot)]
        for it in slots:
            it.tied = len(slots) > 1
        self.changed()

    @property
    def group(self) -> G | None:
        """See `Slot`."""
        return self._group()

    @group.setter
    def group(self, group: G) -> None:
        self._group = weakref.ref(group)

    def leave(self) -> None:
        """Be in no group: the weight is not decoded together with others any more."""
        self._group = _no_group

    @property
    def device(self) -> torch.device:
        """Where the weight is decoded."""
        return self.packed.device

    def materialize(self, after: Tensor) -> Tensor:
        """The weight in a buffer of its own, for compiled code."""
        count = self.nbytes // self.dtype.itemsize
        flat = cast(Tensor, torch.ops.tpde.materialize(after, self.key, count, self.dtype))
        return flat.view(self.shape).to(memory_format=self.parameter.memory_format)

    def changed(self) -> None:
        """Forget what was derived from the blobs: they are others, or elsewhere."""
        self._tiles: RowTiles | None = None
        self.view: Tensor | None = None
        self.bare: Tensor | None = None
        self.view_of: Tensor | None = None
        self.key = ops.register(self)
        if self.packed.of_experts:
            self.experts = FromWindows(self)
        elif isinstance(self.experts, FromWindows):
            self.experts = None
        if (group := self.group) is not None:
            group.changed()

    @property
    def recorded(self) -> bool:
        """Whether a CUDA graph was recorded with it, or the weights of its group."""
        group = self.group
        return (group is not None and group.recorded) or any(it.recorded for it in self.packed.sources)

    def updated(self) -> None:
        """Be another weight to compiled code: it has other values, or is under another delta."""
        self.key = ops.renew(self, self.key)
        if (group := self.group) is not None:
            group.updated()

    def frozen(self) -> None:
        """Forget the view, which says that the weight requires a gradient."""
        self.view = self.bare = self.view_of = None
        if (group := self.group) is not None:
            group.frozen()

    def decode_into(self, out: Tensor) -> None:
        """Decode the weight to the start of a buffer of bytes."""
        self.packed.decode_into(out)

    def release(self) -> int:
        """Give the model's workspace up for a moment: see `Workspace.release`."""
        group = self.group
        return 0 if group is None else group.release()

    def instead(self) -> Tensor:
        """The weight in memory of its own, which takes the place of the workspace: for a moment."""
        self.packed.prepare()
        return self.parameter.plain(self.release())

    def product(self, x: Tensor, bias: Tensor | None, trained: bool = False) -> Tensor:
        """`x @ W.T + bias`; the parameter knows what the plain weight says of gradients."""
        fits = bias is None or (bias.shape == self.shape[:1] and bias.device == x.device)
        if self.packed.multiplies and fits and x.device == self.device:  # else PyTorch says what is wrong
            return self.packed.product(x, bias, self.parameter.plain_requires_grad)
        return functional.linear(x, self.instead(), bias)

    def experts_product(self, x: Tensor, ids: Tensor, per: int, bias: Tensor | None, tokens: int) -> Tensor:
        """Rows of x, times the experts that they are for: see `Experts.product`."""
        return self.packed.experts.product(x, ids, per, bias, tokens)

    def span_instead(self, begin: int, end: int) -> Tensor:
        """Bytes `begin` to `end` of the weight as `instead` gives them, at an address as round as there."""
        return self.packed.span(begin, end).decoded(self.release())

    def prepare_tiles(self) -> RowTiles:
        """Put on the device what `tiles` needs."""
        if self._tiles is None:
            self._tiles = RowTiles(self.packed)
        return self._tiles

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Tiles of a matrix, in turn in one buffer: first row, row after the last, and the rows."""
        made = self.prepare_tiles()
        group = self.group
        buffer = None if group is None else group.tile_room()
        if buffer is None:
            size = max(self.packed.tile_bytes, self.release())
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return made(buffer)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix, as `embedding` looks them up."""
        return self.parameter.rows(ids)

    def in_buffer(self, flat: Tensor) -> Tensor:
        """The weight in a buffer of its group, of bytes or of its own dtype, as the compiler sees it."""
        size = flat.dtype.itemsize
        part = flat[self.offset // size : (self.offset + self.nbytes) // size]
        typed = part if flat.dtype is self.dtype else part.view(self.dtype)
        return typed.view(self.shape).to(memory_format=self.parameter.memory_format)

    def formatted(self, weight: Tensor) -> Tensor:
        """The weight, decoded, in the memory format that the plain one has."""
        return formatted(weight, self.parameter.memory_format)

    def viewed(self, buffer: Tensor) -> Tensor:
        """The weight in a buffer of its group, of bytes, which says of gradients what the plain one says."""
        with aside():
            flat = buffer[self.offset : self.offset + self.nbytes]
        return as_weight(flat, self.dtype, self.shape, self.parameter.plain_requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        # Without its group, which holds a whole block: a copy of the group names itself to its slots.
        return {"name": self.name, "offset": self.offset, "parameter": self.parameter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.offset, self.experts = state["name"], state["offset"], None
        self.tied = False
        self._take(state["parameter"])


class FromWindows:
    """Decodes experts of one weight that is in the window layout, and on the device as it is multiplied.

    Parameters
    ----------
    slot : Slot
        The weight's, which holds this.
    """

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot[Any]) -> None:
        self._slot = weakref.ref(slot)

    def fetch(self, numbers: Sequence[int], out: Tensor) -> None:
        """See `ExpertSource`."""
        slot = self._slot()
        assert slot is not None
        slot.packed.experts.decode_some(numbers, out[slot.offset : slot.offset + slot.nbytes])
