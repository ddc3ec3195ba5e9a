"""Weights that are decoded together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, is_grad_enabled

from tpde.errors import InvalidInput
from tpde.format.blob_header import align
from tpde.nn.saved import saves
from tpde.nn.slot import ALIGN, Slot
from tpde.nn.workspace import Pool, Workspace
from tpde.weights import operators as ops
from tpde.weights.source import decoder


def _nothing(out: Tensor) -> None:
    """Decode no weights."""


class Group:
    """The packed weights of one transformer block, or of one module outside of blocks.

    Parameters
    ----------
    name : str
        What errors call it.
    slots : sequence of Slot
        Its weights.
    pool : Pool
        Of the model.
    """

    _workspace: Workspace | None = None

    def __init__(self, name: str, slots: Sequence[GroupSlot], pool: Pool) -> None:
        self.name, self.slots, self.pool = name, list(slots), pool
        at = 0
        for slot in self.slots:
            if not slot.packed.tile_bytes:
                slot.offset = at
                at += align(slot.nbytes, ALIGN)
        self.tiles_at = at  # those too large to be here whole take turns in the same room
        at += max(align(slot.packed.tile_bytes, ALIGN) for slot in self.slots)
        self.nbytes = at
        pool.capacity = max(pool.capacity, at)
        self._adopt()

    def _adopt(self) -> None:
        self.whole = [slot for slot in self.slots if not slot.packed.tile_bytes]
        self.routed = [slot for slot in self.whole if slot.experts is not None]
        dtypes = {slot.dtype for slot in self.slots}
        # A buffer of the weights' own dtype needs no casts in compiled code.
        self.flat_dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        for slot in self.slots:
            slot.group = self
        self.changed()

    def materialize(self, after: Tensor) -> Tensor:
        """The weights in a buffer of their own, for compiled code: as many bytes for all groups."""
        count = self.pool.capacity // self.flat_dtype.itemsize
        return cast(Tensor, torch.ops.tpde.materialize(after, self.key, count, self.flat_dtype))

    def changed(self) -> None:
        """Forget what was derived from the blobs: some are others, or elsewhere."""
        self._materializer: Callable[[Tensor], None] | None = None
        if self._workspace is not None and self._workspace.filled is self:
            self._workspace.filled = None  # in a forward pass: what comes has views made anew
        self._workspace = None
        self._viewed = 0  # the buffer, by its number, that all weights have views of
        self.flat: Tensor | None = None  # the weights, while a block is being compiled
        self.key = ops.register(self)

    def updated(self) -> None:
        """Be other weights to compiled code."""
        self.key = ops.renew(self, self.key)

    def frozen(self) -> None:
        """Make views anew: what they say of gradients has changed."""
        self._viewed = 0
        if self._workspace is not None and self._workspace.filled is self:
            self._workspace.filled = None

    def prepare(self) -> None:
        """Put on the device what decoding needs, if all blobs are on one device by now."""
        if self._materializer is not None or not self.slots:
            return
        device = self.slots[0].device
        if not all(slot.packed.together and slot.device == device for slot in self.slots):
            return
        always = [slot for slot in self.whole if slot not in self.routed]
        items = [(source, slot.offset + at) for slot in always for source, at in slot.packed.parts]
        decode = decoder(items) if items else _nothing
        self._workspace = self.pool.workspace(device, self.nbytes)
        self._materializer = decode  # last: without room for the workspace, the next call tries again
        for slot in self.slots:
            if slot.packed.tile_bytes:
                slot.prepare_tiles()
            elif slot.packed.settled:  # a graph may record it; what streams, none can
                slot.packed.prepare()

    @property
    def workspace(self) -> Workspace:
        """The workspace of the device that the blobs are on."""
        if self._workspace is None:
            self.prepare()
        if self._workspace is None:
            devices = sorted({str(source.device) for slot in self.slots for source in slot.packed.sources})
            raise InvalidInput(
                f"the packed weights of `{self.name}` are on {', '.join(devices)}",
                hint="move the whole block to one device that holds data",
            )
        return self._workspace

    @property
    def recorded(self) -> bool:
        """Whether a CUDA graph was recorded that decodes into the workspace."""
        return self._workspace is not None and self._workspace.recorded

    @property
    def beside(self) -> bool:
        """Whether this thread is in a forward pass that leaves the workspace alone."""
        return self._workspace is not None and get_ident() in self._workspace.beside

    def open_workspace(self) -> Workspace | None:
        """The workspace, if this thread has a scope of any group open there."""
        space = self._workspace
        return space if space is not None and space.thread == get_ident() else None

    def decode_into(self, out: Tensor) -> None:
        """Decode all weights, but those in tiles, into a buffer of bytes, on the current stream."""
        self._decode_always(out)
        for slot in self.routed:
            slot.decode_into(out[slot.offset : slot.offset + align(slot.nbytes, ALIGN)])

    def _decode_always(self, out: Tensor) -> None:
        """Decode what every call needs: not experts, before it is known which."""
        if self._materializer is None:
            self.prepare()
        assert self._materializer is not None
        self._materializer(out)

    def _room(self) -> tuple[Workspace, Tensor]:
        """The workspace, and its memory, taken again if it was given up."""
        space = self.workspace
        if space.buffer is None:
            space.reserve(0)
        assert space.buffer is not None
        return space, space.buffer

    def fill(self) -> None:
        """Decode into the workspace, which the caller has locked for this group, what every call needs.

        Called for each block of each token: what it calls is cold by then, and takes 1 us a function.
        """
        space, decode = self._workspace, self._materializer
        if space is None or decode is None or space.buffer is None:
            space, _ = self._room()
            decode = self._materializer
            assert space.buffer is not None
            assert decode is not None
        space.filled = None
        if space.some:
            space.some.clear()
        space.order()
        decode(space.buffer)
        if self._viewed != space.made:
            for slot in self.whole:
                space.views(slot)
            self._viewed = space.made
        space.filled = self

    def fetch(self, slots: Sequence[GroupSlot], numbers: Sequence[int]) -> None:
        """Decode some experts into the workspace, which the caller has locked for this group.

        Until `forget`, the fused weights are taken to be here.
        """
        space, buffer = self._room()
        space.order()
        for source in dict.fromkeys(slot.experts for slot in slots):
            assert source is not None
            source.fetch(numbers, buffer)
        space.some.update(slots)

    def forget(self, slots: Sequence[GroupSlot]) -> None:
        """Undo `fetch`: other experts may be wanted next."""
        self.workspace.some.difference_update(slots)

    def tile_room(self) -> Tensor | None:
        """Where tiles go in the workspace; None if this thread has no scope of this group open."""
        space = self._workspace
        if space is None or space.thread != get_ident() or space.group is not self:
            return None
        _, buffer = self._room()
        space.order()
        return buffer[self.tiles_at : self.nbytes]

    def view(self, slot: GroupSlot) -> Tensor:
        """A weight in the workspace, which the caller has locked for this group; decoded if need be."""
        space, buffer = self._room()
        if slot not in space.some and (space.filled is not self or slot.experts is not None):
            space.order()
            slot.decode_into(buffer[slot.offset : slot.offset + align(slot.nbytes, ALIGN)])
            space.some.add(slot)
        return space.views(slot)

    def release(self) -> int:
        """Give the workspace up for a moment: see `Workspace.release`."""
        return 0 if self._workspace is None else self._workspace.release()

    def live(self) -> bool:
        """Whether this thread's scope has all of the group's weights at hand, as the slots' `view`.

        Called for each weight: nothing on the way is a property.
        """
        space = self._workspace
        return (
            space is not None
            and space.filled is self
            and space.thread == get_ident()
            and (not is_grad_enabled() or saves(space))
        )

    def at(self, offset: int) -> tuple[GroupSlot, int] | None:
        """The slot whose place in the buffer holds a byte, and the byte's offset in the weight."""
        for slot in self.whole:
            if slot.offset <= offset < slot.offset + slot.nbytes:
                return slot, offset - slot.offset
        return None

    def __getstate__(self) -> dict[str, Any]:
        keep = ("name", "slots", "pool", "nbytes", "tiles_at")
        return {name: getattr(self, name) for name in keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt()


GroupSlot: TypeAlias = Slot[Group]
"""A weight in a group."""
