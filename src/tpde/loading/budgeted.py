"""Pinning a model's weights to its devices under a budget: some plain, some packed, the others streamed."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch

from tpde.errors import OutOfMemory, PackedWeight
from tpde.host.feed import Feed, Filled
from tpde.loading.checkpoint_files import Checkpoint, Stored
from tpde.loading.collection import collect_first
from tpde.loading.feeds import Feeds
from tpde.loading.footprint import OUTSIDE_BYTES
from tpde.loading.homes import homes_of
from tpde.loading.machine import current
from tpde.loading.runs import Run
from tpde.loading.window_weights import settle, strip_room
from tpde.memory.allowance import Allowance, describe
from tpde.memory.device_memory import gib
from tpde.nn.modules import PackedModule
from tpde.nn.replace import prepare_rows
from tpde.planning.budget import Budget
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.units import Placement
from tpde.streaming.stats import StreamingTimes, summarize_spans
from tpde.streaming.streamer import Streamer
from tpde.streaming.trace import Trace, write_trace
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Source

log = logging.getLogger("tpde")


def _one_at_a_time(progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """What any thread may call."""
    if progress is None:
        return None
    lock, told = threading.Lock(), progress

    def tell(nbytes: int) -> None:
        with lock:
            told(nbytes)

    return tell


class Streaming:
    """What brings a model's weights to its devices, under its budget: `model.tpde_streamer`.

    Parameters
    ----------
    budget : Budget
        Of each device.
    progress : callable, optional
        Called with numbers of bytes read, in several threads, by one at a time.
    whole : bool
        The whole process is held to the budget; otherwise what it takes beside this model comes on top.
    fused : collection of str
        Parameters that go to the window layout where a plan says so of their units.

    Attributes
    ----------
    budget : Budget
        The same.
    machine : Machine
        What it opens devices, host memory and disks of.
    plans : dict of torch.device to StreamPlan
        Where weights are.
    streamers : dict of torch.device to Streamer
        Of the devices that any weights are streamed to.
    feeds : dict of torch.device to list of Feed
        What brings bytes to where those devices copy from.
    """

    def __init__(
        self,
        budget: Budget,
        progress: Callable[[int], None] | None = None,
        *,
        whole: bool = True,
        fused: Collection[str] = (),
    ) -> None:
        self.budget, self.machine = budget, current()
        self.plans: dict[torch.device, StreamPlan] = {}
        self.streamers: dict[torch.device, Streamer] = {}
        self._progress, self._whole, self._fused = _one_at_a_time(progress), whole, fused
        self._windows: dict[torch.device, dict[str, int]] = {}  # how many weights are there, and their bytes
        self.feeds: dict[torch.device, list[Feed]] = {}
        self._traces: dict[torch.device, Trace] = {}
        self._dropped: dict[torch.device, int] = {}  # pieces, before recording began
        self._finalizers: list[weakref.finalize[..., Any]] = []
        self._closed = False

    # ---- loading ----

    def decide(
        self, device: torch.device, planner: Callable[[int], StreamPlan], reserved: int | None = None
    ) -> None:
        """Plan for a device, and take the budget there, until this is closed or collected.

        Parameters
        ----------
        device : torch.device
            With its number.
        planner : callable
            Makes the plan for so many bytes of device memory.
        reserved : int, optional
            What PyTorch's allocator held before anything was done for this model; by default what it holds.

        Raises
        ------
        OutOfMemory
            If the budget is not free, or cannot work.
        """
        vram = self.budget.vram
        if device.type != "cuda":
            self.plans[device] = planner(vram)
            return
        allowance = Allowance(device, vram, OUTSIDE_BYTES, whole=self._whole, reserved=reserved)
        try:
            self.plans[device] = planner(max(vram - allowance.others, 0))
        except OutOfMemory as error:
            if error.least is None or error.budget != "vram" or not allowance.others:
                raise
            least = error.least + allowance.others
            raise OutOfMemory(
                f"PyTorch holds {describe(allowance.held)}, on {device} for this process, of which "
                f"{gib(allowance.others)} count towards `vram`: without them {error.message}",
                hint=f"{error.hint}; and as much more as counts, or delete what is in them",
                where="vram",
                found=vram,
                needed=least,
                least=least,
            ) from None
        allowance.start(self.plans[device].parts["pages"])
        self._finalizers.append(weakref.finalize(self, allowance.close))
        self._finalizers[-1].atexit = False

    def load(
        self,
        model: Any,
        checkpoint: Checkpoint,
        runs: Mapping[str, Run[Stored]],
        where: Mapping[str, torch.device],
    ) -> dict[str, PackedTensor]:
        """Bring all weights to where they were planned to be.

        All but what stays in host memory, which comes from `begin` on.

        Parameters
        ----------
        model : nn.Module
            On the `meta` device.
        checkpoint : Checkpoint
            Its files.
        runs : mapping of str to Run
            Its packed parameters, as runs of `Stored`.
        where : mapping of str to torch.device
            The device of each.

        Returns
        -------
        dict of str to PackedTensor
            Those parameters that are packed. The others are plain parameters of the model now.
        """
        parts: dict[str, PackedTensor] = {}
        homes = homes_of(model, runs, where, self.plans, self._fused)
        with ExitStack() as undo:
            opened: dict[torch.device, Feeds] = {}
            for device, home in homes.items():
                host, disk = (list(home.stored[it].values()) for it in (Placement.HOST, Placement.DISK))
                if host or disk:
                    made = Feeds(
                        device, self.plans[device], host, disk, self.machine, progress=self._progress
                    )
                    opened[device] = undo.enter_context(closing(made))
            for device, home in homes.items():
                home.bring(model, checkpoint, device, self.plans[device], self._progress)
            for device, feeds in opened.items():
                homes[device].found.update(self._open(device, feeds))
            for home in homes.values():
                plain = home.plain
                parts |= {name: it.opened(home.found) for name, it in home.runs.items() if name not in plain}
            for device, home in homes.items():
                strips = {name: strip_room(it) for name, it in home.windows.items()}
                if strips:
                    self._windows[device] = settle({name: parts[name] for name in strips}, strips)
        return parts

    def cut(self, model: torch.nn.Module) -> None:
        """Let weights that are larger than the workspace be used in it tile by tile."""
        for plan in self.plans.values():
            for unit in plan.tiled:
                module = model.get_submodule(unit)
                assert isinstance(module, PackedModule)
                for slot in module.tpde_slots.values():
                    slot.packed.tile_bytes = plan.workspace

    def attach(self, model: Any) -> None:
        """Belong to a model that is loaded: while it lives, so does this."""
        model.tpde_streamer = self
        weakref.finalize(self, collect_first).atexit = False

    def _open(self, device: torch.device, feeds: Feeds) -> Mapping[str, Source]:
        self.streamers[device], tensors = feeds.open()
        self.feeds[device] = feeds.feeds
        return tensors

    def begin(self, model: torch.nn.Module) -> None:
        """Fill and lock host memory from now on, in the background; wait for embeddings that stay there.

        Not before the rest is done: meanwhile, calls of the driver take several times as long, and so does
        whatever reads files.

        Parameters
        ----------
        model : nn.Module
            With all of its weights.

        Raises
        ------
        Truncated, ReadError, OutOfMemory, UnsupportedDevice
            If an embedding cannot be brought there.
        """
        for memory in self._memories():
            memory.begin()
        prepare_rows(model)

    def wait(self) -> None:
        """Wait until all weights are where they stay: host memory is filled and locked in the background.

        Nobody needs to: a forward pass waits for the weights that it wants.

        Raises
        ------
        Truncated, ReadError, OutOfMemory, UnsupportedDevice
            If something cannot be brought there.
        """
        for memory in self._memories():
            memory.complete()

    def _memories(self) -> list[Filled]:
        owned = (thing for streamer in self.streamers.values() for thing in streamer.owned)
        return [thing for thing in owned if isinstance(thing, Filled)]

    # ---- looking at it ----

    def tell_if_no_windows(self) -> None:
        """Warn if no weight of those that could be is in the window layout."""
        if not self._windows:
            log.warning(
                "no weight is multiplied as it is packed: under this budget, tokens come as fast or faster "
                "if those that stay on the device are kept otherwise; `tpde plan --kernels fused` shows what "
                "more `vram` gives"
            )

    def record(self) -> None:
        """Start to note when things happen, for `trace` and `stats`. Waits for the devices.

        Another thread may be in a forward pass: what is noted of it begins with one of its copies or decodes.
        """
        for device, streamer in self.streamers.items():
            trace = self._traces[device] = self.machine.start_trace(device)
            streamer.record(trace)
            self._dropped[device] = streamer.dropped_pieces
            for feed in self.feeds[device]:
                feed.trace = trace

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what was noted since `record` as a timeline for https://ui.perfetto.dev.

        Raises
        ------
        InvalidDestination
            If it cannot be written.
        """
        write_trace(path, list(self._traces.values()))

    def stats(self) -> dict[str, Any]:
        """For each device, what was copied so far; with `record`, how much of it was hidden as well.

        Where weights are in the window layout, `window_weights` of them, they take `window_bytes`.
        """
        found: dict[str, Any] = {str(device): dict(it) for device, it in self._windows.items()}
        for device, streamer in self.streamers.items():
            found[str(device)] = found.get(str(device), {}) | streamer.stats()
            if device in self._traces:
                found[str(device)] |= self.summary(device).as_dict()
        return found

    def summary(self, device: torch.device) -> StreamingTimes:
        """How well a device's copies were hidden since `record`."""
        dropped = self.streamers[device].dropped_pieces - self._dropped[device]
        return summarize_spans(self._traces[device].spans(), dropped)

    # ---- the end ----

    def check(self) -> None:
        """Make sure that all weights that were used so far were sound; waits for the devices.

        At its first use a weight is waited for, and damage raised before anything is computed with it. After
        that, damage by a file that is overwritten, or a disk that returns other bytes, is raised when the
        weight is used next, one forward pass later at the earliest. This raises it now: when it returns, all
        results so far are right.

        Raises
        ------
        Corrupt
            Naming tensor and chunk. Calling again raises what else was found.
        """
        for streamer in self.streamers.values():
            streamer.check()

    def close(self) -> None:
        """Give locked memory, files and the budget back. The model cannot be used any more.

        Closing again does nothing.

        Raises
        ------
        Corrupt
            What `check` finds, when all has been given back.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:  # all of it, whatever fails on the way, such as a device that has crashed
            for finalizer in self._finalizers:
                rest.callback(finalizer)
            for streamer in self.streamers.values():
                rest.callback(streamer.close)
            self.check()

    def __getstate__(self) -> dict[str, Any]:
        raise PackedWeight(
            "the model streams its weights from files, which cannot be copied or pickled",
            hint="load it again",
        )
