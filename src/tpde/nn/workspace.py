"""The buffer in which the groups of a model take turns to be decoded."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tpde.errors import TpdeError
from tpde.memory.device_memory import allocate
from tpde.memory.forks import renew_in_forks
from tpde.nn.slot import ALIGN, Slot
from tpde.nn.waiting import acquire
from tpde.weights.frozen import without_gradient
from tpde.weights.launch import capturing, stream_handle
from tpde.weights.readonly import refuse_change

log = logging.getLogger("tpde")


class Occupant(Protocol):
    """Whose weights are in a workspace: a group.

    Attributes
    ----------
    name : str
        What errors call it.
    """

    name: str

    def at(self, offset: int) -> tuple[Slot[Any], int] | None:
        """The slot whose place in the buffer holds a byte, and the byte's offset in the weight."""


class _Left(NamedTuple):
    """A buffer that was left to whoever has kept a weight in it, and what weights were decoded to it."""

    storage: StorageWeakRef
    start: int
    group: weakref.ref[Occupant]
    states: dict[int, tuple[int, str | None]]  # by ids of slots, which the group keeps


def _state(slot: Slot[Any]) -> tuple[int, str | None]:
    """What a weight is decoded to: updates until then, and the name that it goes by."""
    active_delta = slot.packed.active_delta
    return slot.packed.updates, None if active_delta is None else active_delta.now()


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
    group : Occupant or None
        Whose weights the open scope may put here.
    filled : Occupant or None
        `group`, if all of its weights are here.
    some : set of Slot
        Those of its weights that are here, if not all.
    made : int
        The number of the buffer: views of another than the last are invalid.
    recorded : bool
        A CUDA graph was recorded that will write here again.
    beside : set of int
        Threads that decode copies of their own, and leave this to another one: see `enter`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: Tensor | None = None
        self.start = self.end = 0  # addresses
        self.lock: Any = threading.RLock()
        self.thread = 0
        self.group: Occupant | None = None
        self.filled: Occupant | None = None
        self.some: set[Slot[Any]] = set()
        self.depth = 0
        self._on_gpu = device.type == "cuda"  # kept: a device makes a string of its type each time
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1  # of the stream
        self._several = False  # streams
        self.recorded = False
        self._size = ALIGN
        self._storage: Any = None  # of the buffer
        self._known = 0  # how many tensors of ours are in it
        self._viewed: set[Slot[Any]] = set()
        self._told = False  # that weights are kept
        self._left: list[_Left] = []
        self._waited_for = False  # by a thread that waits for another, which was told
        self.made = 0  # buffers so far
        self.beside: set[int] = set()
        # The buffer's memory, of which all views are made: its version says whether one was written to.
        self._written: Tensor | None = None
        renew_in_forks(self)

    def renew(self) -> None:
        """Take the lock, after a fork, from a thread that is not here: not from this one."""
        self.beside &= {get_ident()}
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return
        self.lock = threading.RLock()
        self.thread = self.depth = 0
        self.group, self._several = None, False  # no stream is told: a forked process cannot use its device
        self.some.clear()
        self._drop()

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
            buffer = allocate(self._size, self.device, "the workspace that weights are decoded to")
            self._storage = buffer.untyped_storage()
            with torch.inference_mode(False):
                self._written = buffer.data
            self.note_uses()
            self.start = buffer.data_ptr()
            self.end = self.start + buffer.numel()
            self.order()  # to this stream the memory goes back, whoever uses it
            self.buffer = buffer  # last: what Ctrl-C keeps from it is done again

    def _drop(self) -> None:
        self.filled = None
        self.made += 1  # first: whatever Ctrl-C leaves of the rest, views are made anew
        for slot in self._viewed:
            if slot.view_of is self.buffer:  # else it has moved to another device since, and is viewed there
                slot.view = slot.bare = slot.view_of = None
        self._viewed.clear()
        if self.buffer is not None and self._several and self._stream is not None:
            self.buffer.record_stream(self._stream)
        self.buffer = self._storage = self._written = None
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

    def _is_other(self, slot: Slot[Any]) -> bool:
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

        Called when a scope is closed, for each block of each token. What an error holds on its way out is not
        told of: the error is.
        """
        if self._storage is None or self.recorded or self._uses() <= self._known:
            return
        if not self._told and sys.exc_info()[0] is None:
            self._told = True
            log.warning(
                "a weight of `%s` was kept after its forward pass: the memory of all weights decoded with it "
                "is kept, too; keep `weight.clone()` instead",
                self.group.name if self.group is not None else "a packed model",
            )
        if self.group is not None:
            storage = StorageWeakRef(self._storage)  # type: ignore[no-untyped-call]
            alive = [it for it in self._left if not it.storage.expired()]  # type: ignore[no-untyped-call]
            states = dict[int, tuple[int, str | None]]()
            with contextlib.suppress(TpdeError):  # each row of a batch goes by a name of its own
                states = {id(slot): _state(slot) for slot in self._viewed if slot.group is self.group}
            self._left = [*alive, _Left(storage, self.start, weakref.ref(self.group), states)]
        self._drop()

    def whose(self, tensor: Tensor) -> tuple[Slot[Any], int] | None:
        """The weight that a tensor is a view of, and at which of its bytes it begins.

        Of the open scope's weights, or of those that somebody has kept, such as selective checkpointing: in
        the second pass it gives the views of the first one. What was written to since, or is a weight of
        before an update, is a tensor like others.
        """
        address = tensor.data_ptr()
        if self.start <= address < self.end and self.group is not None:
            return self.group.at(address - self.start)
        if self._left and not tensor._version:
            storage = tensor.untyped_storage()._cdata
            for it in self._left:
                if it.storage.cdata == storage and (group := it.group()) is not None:
                    found = group.at(address - it.start)
                    then = None if found is None else it.states.get(id(found[0]))
                    if found is not None and then is not None and then == _state(found[0]):
                        return found
        return None

    def release(self) -> int:
        """Give the buffer up for one that compiled code or the backward pass needs for a moment.

        Returns
        -------
        int
            How large to make that one, so that the allocator gives it the same memory; 0 if the buffer stays:
            a scope is open, or a CUDA graph writes to it.
        """
        if self.recorded or self.thread == get_ident():
            return 0
        try:
            if not self.lock.acquire(blocking=False) or capturing(self.device):
                return 0
            self._drop()
            return self._size
        finally:
            while self.lock._is_owned():
                self.lock.release()

    def views(self, slot: Slot[Any]) -> Tensor:
        """A weight in the buffer."""
        if slot.view is None or slot.view_of is not self.buffer:
            assert self._written is not None
            before = self._uses()
            view = slot.viewed(self._written)
            slot.bare = without_gradient(view) if view.requires_grad else None
            slot.view, slot.view_of = view, self.buffer
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
