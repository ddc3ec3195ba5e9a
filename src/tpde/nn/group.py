"""Weights that are decoded together, and the buffer in which the groups of a model take turns."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled

from tpde.errors import InvalidInput
from tpde.format.blob_header import align
from tpde.memory.device_memory import allocate
from tpde.nn.saved import saves
from tpde.nn.slot import ALIGN, Slot
from tpde.nn.waiting import acquire
from tpde.weights import operators as ops
from tpde.weights.launch import capturing, stream_handle
from tpde.weights.readonly import refuse_change
from tpde.weights.source import decoder

log = logging.getLogger("tpde")


def _nothing(out: Tensor) -> None:
    """Decode no weights."""


class Workspace:
    """A buffer on one device that holds the weights of one group at a time.

    Attributes
    ----------
    lock : RLock
        Held while a scope is open.
    depth : int
        How many are, one inside the other.
    thread : int
        Who holds it, 0 if nobody does.
    group : Group or None
        Whose weights the open scope may put here.
    filled : Group or None
        `group`, if all of its weights are here.
    some : set of Slot
        Those of its weights that are here, if not all.
    made : int
        How many buffers there have been: views of another than the last are invalid.
    recorded : bool
        A CUDA graph was recorded that will write here again.
    beside : set of int
        Threads that decode copies of their own, and leave this to another one: see `enter`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: Tensor | None = None
        self.start = self.end = 0  # addresses
        self.lock = threading.RLock()
        self.thread = 0
        self.group: Group | None = None
        self.filled: Group | None = None
        self.some: set[Slot] = set()
        self.depth = 0
        self._on_gpu = device.type == "cuda"  # kept: a device makes a string of its type each time
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1  # of the stream
        self._several = False  # streams
        self.recorded = False
        self._size = ALIGN
        self._storage: Any = None  # of the buffer
        self._known = 0  # how many tensors of ours are in it
        self._viewed: set[Slot] = set()
        self._told = False  # that weights are kept
        self._waited_for = False  # by a thread that waits for another, which was told
        self.made = 0  # buffers so far
        self.beside: set[int] = set()
        # The buffer's memory, of which all views are made: its version says whether one was written to.
        self._written: Tensor | None = None

    def enter(self) -> bool:
        """Take the lock.

        Returns
        -------
        bool
            False if the thread that has it waits for this one, which must then do without.
        """
        if self.lock.acquire(blocking=False):
            return True
        if get_ident() in self.beside or not acquire(self.lock, lambda: self.thread):
            if not self._waited_for:
                self._waited_for = True
                log.warning(
                    "the forward pass of `%s` waits for a thread that needs packed weights, too: that one "
                    "decodes copies of its own",
                    self.group.name if self.group is not None else "a packed model",
                )
            return False
        return True

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least so large. Views of it become invalid if it was smaller.

        Raises
        ------
        OutOfMemory
            If there is no room for it. Whoever needs the buffer next tries again.
        """
        self._size = max(nbytes, self._size)
        if self.buffer is None or self.buffer.numel() < self._size:
            self._drop()  # two of them need not fit
            self.buffer = allocate(self._size, self.device, "the workspace that weights are decoded to")
            self.made += 1
            self._storage = self.buffer.untyped_storage()
            with torch.inference_mode(False):
                self._written = self.buffer.data
            self.note_uses()
            self.start = self.buffer.data_ptr()
            self.end = self.start + self.buffer.numel()
            self.order()  # to this stream the memory goes back, whoever uses it

    def _drop(self) -> None:
        for slot in self._viewed:
            if slot.view_of is self.buffer:  # else it has moved to another device since, and is viewed there
                slot.view = slot.view_of = None
        self._viewed.clear()
        self._storage = None
        if self.buffer is not None and self._several and self._stream is not None:
            self.buffer.record_stream(self._stream)
        self.buffer = self.filled = self._written = None
        self.start = self.end = 0

    def check(self) -> None:
        """Refuse what wrote to a weight, now that the group's forward pass has ended.

        Raises
        ------
        PackedWeight
            Naming the weight.
        """
        if self._written is None or not self._written._version:
            return
        assert self.group is not None
        found = next((slot for slot in self._viewed if self._is_other(slot)), None)
        name = self.group.name if found is None else found.packed.name
        self._drop()
        raise refuse_change(name, "an in-place operation of a forward pass")

    def _is_other(self, slot: Slot) -> bool:
        """Whether a weight in the buffer is not what it is decoded to."""
        if slot.group is not self.group or slot.view is None or slot.experts is not None:
            return False
        if capturing(self.device):
            return False
        mine, theirs = (it.detach().view(-1).view(torch.uint8) for it in (slot.packed.decoded(), slot.view))
        return not torch.equal(mine, theirs)

    def _uses(self) -> int:
        """How many tensors are in the buffer's memory, and how many hold it without one."""
        # All who ask for the storage are given the same object.
        return int(torch._C._storage_Use_Count(self._storage._cdata)) + sys.getrefcount(self._storage)

    def note_uses(self) -> None:
        """Take the tensors that are in the buffer's memory now for ours."""
        if self._storage is not None:
            self._known = self._uses()

    def give_up_kept(self) -> None:
        """Leave the buffer to whoever has kept a weight in it, such as a hook: the next one gets new memory.

        Called when a scope is closed, for each block of each token.
        """
        if self._storage is None or self.recorded or self._uses() <= self._known:
            return
        if not self._told:
            self._told = True
            log.warning(
                "a weight of `%s` was kept after its forward pass: the memory of all weights decoded with it "
                "is kept, too; keep `weight.clone()` instead",
                self.group.name if self.group is not None else "a packed model",
            )
        self._drop()

    def release(self) -> int:
        """Give the buffer up for one that compiled code or the backward pass needs for a moment.

        Returns
        -------
        int
            How large to make that one, so that the allocator gives it the same memory; 0 if the buffer stays:
            a scope is open, or a CUDA graph writes to it.
        """
        if self.recorded or not self.lock.acquire(blocking=False):
            return 0
        try:
            if self.depth or capturing(self.device):
                return 0
            self._drop()
            return self._size
        finally:
            self.lock.release()

    def views(self, slot: Slot) -> Tensor:
        """A weight in the buffer."""
        if slot.view is None or slot.view_of is not self.buffer:
            assert self._written is not None
            before = self._uses()
            slot.view, slot.view_of = slot.viewed(self._written), self.buffer
            self._viewed.add(slot)
            self._known += self._uses() - before
        return slot.view

    def order(self) -> None:
        """Make the current stream wait for the last one that used the buffer, if that was another."""
        if not self._on_gpu:
            return
        if torch.cuda.is_current_stream_capturing():
            self.recorded = True
            return
        handle = stream_handle(self.device)
        if handle != self._handle:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                self._several = True
                stream.wait_stream(self._stream)
            self._stream, self._handle = stream, handle


class Pool:
    """The workspaces of a model, one for each device; groups keep them alive.

    Attributes
    ----------
    capacity : int
        Bytes of the largest group.
    spread : bool
        Groups are on several devices: each has a workspace as large as its own largest group.
    """

    def __init__(self) -> None:
        self._workspaces: weakref.WeakValueDictionary[torch.device, Workspace] = weakref.WeakValueDictionary()
        self.capacity = ALIGN
        self.spread = False

    def workspace(self, device: torch.device, nbytes: int) -> Workspace:
        """The workspace of a device, with room for so many bytes."""
        found = self._workspaces.get(device)
        if found is None:
            found = self._workspaces[device] = Workspace(device)
        found.reserve(nbytes if self.spread else self.capacity)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "spread": self.spread}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)


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

    def __init__(self, name: str, slots: Sequence[Slot], pool: Pool) -> None:
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
        self._workspace: Workspace | None = None
        self._viewed = 0  # the buffer, by its number, that all weights have views of
        self.flat: Tensor | None = None  # the weights, while a block is being compiled
        self.key = ops.register(self)

    def forget_views(self) -> None:
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

    def fetch(self, slots: Sequence[Slot], numbers: Sequence[int]) -> None:
        """Decode some experts into the workspace, which the caller has locked for this group.

        Until `forget`, the fused weights are taken to be here.
        """
        space, buffer = self._room()
        space.order()
        for source in dict.fromkeys(slot.experts for slot in slots):
            assert source is not None
            source.fetch(numbers, buffer)
        space.some.update(slots)

    def forget(self, slots: Sequence[Slot]) -> None:
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

    def view(self, slot: Slot) -> Tensor:
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

    def at(self, address: int) -> Slot | None:
        """The slot whose place in the workspace holds an address."""
        offset = address - self.workspace.start
        for slot in self.whole:
            if slot.offset <= offset < slot.offset + slot.nbytes:
                return slot
        return None

    def __getstate__(self) -> dict[str, Any]:
        keep = ("name", "slots", "pool", "nbytes", "tiles_at")
        return {name: getattr(self, name) for name in keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt()
