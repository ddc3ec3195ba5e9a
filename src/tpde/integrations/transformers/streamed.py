"""Packed models under a budget of device memory: some weights plain, some packed, the others streamed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch

from tpde.errors import OutOfMemory, PackedWeight
from tpde.format.blob import align
from tpde.format.constants import ALIGN_BLOB
from tpde.format.source import Extent, FileSource
from tpde.integrations.allowance import Allowance
from tpde.integrations.checkpoint import Checkpoint, Stored
from tpde.integrations.reading import fill, gib
from tpde.integrations.transformers.budget import plan_streaming, unit_of
from tpde.integrations.transformers.decode import place
from tpde.integrations.transformers.experts import cache_size, routed_modules
from tpde.integrations.transformers.plan import Plan
from tpde.integrations.transformers.runs import Run
from tpde.integrations.transformers.tokens import TokenLimit
from tpde.materialize import Materializer, PackedTensor
from tpde.nn import packed_modules, route_experts
from tpde.nn.experts import fused
from tpde.nn.modules import PackedModule
from tpde.streaming.device import CudaDevice
from tpde.streaming.disk import ReadAhead
from tpde.streaming.experts import ExpertStore
from tpde.streaming.host import HostMemory
from tpde.streaming.plan import StreamPlan
from tpde.streaming.stats import Summary, summarize_spans
from tpde.streaming.stream import Streamer
from tpde.streaming.tensor import StreamedTensor
from tpde.streaming.trace import Trace, start_trace, write_trace
from tpde.streaming.units import Placement

READ_THREADS = 8  # between the 4 and 16 at which disks reach their rate
# Of the plan's fixed part what PyTorch does not allocate, 70 MiB on an H200; the rest is cuBLAS's workspace.
OUTSIDE_BYTES = 80 << 20
SCRATCH_LEAST = 20 << 20  # smaller memory shares a segment of the caching allocator, and does not go back


class Budget(NamedTuple):
    """What `tpde.from_pretrained` was allowed.

    Attributes
    ----------
    vram : int
        Bytes of each device.
    ram : int or None
        Bytes of host memory that weights may be locked in; None for what the machine has free.
    max_tokens : int
        Sequences times length.
    progress : callable or None
        Called with numbers of bytes read.
    """

    vram: int
    ram: int | None
    max_tokens: int
    progress: Callable[[int], None] | None = None


class Streaming:
    """What brings a model's weights to its devices, under its budget: `model.tpde_streamer`.

    Attributes
    ----------
    budget : Budget
        As asked for.
    plans : dict of torch.device to StreamPlan
        Where weights are.
    streamers : dict of torch.device to Streamer
        Of the devices that any weights are streamed to.
    experts : dict of torch.device to ExpertStore
        Of the devices that routed experts are fetched to.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.plans: dict[torch.device, StreamPlan] = {}
        self.streamers: dict[torch.device, Streamer] = {}
        self.experts: dict[torch.device, ExpertStore] = {}
        self._readers: dict[torch.device, list[Any]] = {}
        self._traces: dict[torch.device, Trace] = {}
        self._finalizers: list[Any] = []

    # ---- loading ----

    def plan(self, model: Any, checkpoint: Checkpoint, plan: Plan, where: Mapping[str, torch.device]) -> None:
        """Take the budget of each device, and decide where its weights go. Nothing is read.

        Raises
        ------
        OutOfMemory
            If a budget is not free, or too small, or holds no model such as this one.
        """
        devices = sorted({*where.values()}, key=str)
        budget = self.budget
        ram = None if budget.ram is None else budget.ram // len(devices)
        for device in devices:
            only = [name for name in plan.runs if where[name] == device]

            def decide(vram: int, only: list[str] = only) -> StreamPlan:
                return plan_streaming(
                    model, checkpoint, plan, vram=vram, ram=ram, max_tokens=budget.max_tokens, only=only
                )

            self.decide(device, decide)

    def decide(self, device: torch.device, planner: Callable[[int], StreamPlan]) -> None:
        """Plan for a device, and hold the process to the budget there, until this is closed or collected.

        Parameters
        ----------
        device : torch.device
            With its number.
        planner : callable
            Makes the plan for so many bytes of device memory.

        Raises
        ------
        OutOfMemory
            If the budget is not free, or cannot work.
        """
        vram = self.budget.vram
        if device.type != "cuda":
            self.plans[device] = planner(vram)
            return
        allowance = Allowance(device, vram, OUTSIDE_BYTES)
        try:
            self.plans[device] = planner(max(vram - allowance.others, 0))
        except OutOfMemory as error:
            if error.least is None or not allowance.others:
                raise
            least = error.least + allowance.others
            raise OutOfMemory(
                f"this process has {gib(allowance.others)} allocated on {device}, which count towards "
                f"`vram`: without them {error}; and as much more as is allocated, or free that",
                least=least,
            ) from None
        allowance.start()
        self._finalizers.append(weakref.finalize(self, allowance.close))
        self._finalizers[-1].atexit = False

    def load(
        self, model: Any, checkpoint: Checkpoint, plan: Plan, where: Mapping[str, torch.device]
    ) -> dict[str, list[tuple[PackedTensor, int]]]:
        """Bring all weights to where they were planned to be.

        Plain ones come first, the largest of them at the start: while they are decoded, their packed form is
        on the device as well, and then there is room for it.

        Returns
        -------
        dict of str to list of (PackedTensor, int)
            The parts of those parameters that are packed. The others are plain parameters of the model now.
        """
        parts: dict[str, list[tuple[PackedTensor, int]]] = {}
        for device, made in self.plans.items():
            here = {name: run for name, run in plan.runs.items() if where[name] == device}
            chosen = {name: made.placements[unit_of(model, name)] for name in here}
            plain = {name: here[name] for name, it in chosen.items() if it is Placement.PLAIN}
            decode_runs(model, plain, device, self.budget.progress)
            stored: dict[Placement, dict[str, Stored]] = {it: {} for it in Placement}
            for name, run in here.items():
                stored[chosen[name]].update({part.name: part for part in run.parts})
            found: dict[str, PackedTensor] = {}
            if stored[Placement.HOST] or stored[Placement.DISK]:
                found.update(self._open(device, made, stored[Placement.HOST], stored[Placement.DISK]))
            resident = list(stored[Placement.PACKED].values())
            for tensor, it in zip(checkpoint.read(resident, device), resident, strict=True):
                found[it.name] = tensor
                self._read(it.extent.size)
            parts |= {name: run.placed(found) for name, run in here.items() if name not in plain}
        return parts

    def cut(self, model: torch.nn.Module) -> None:
        """Let weights that are larger than the workspace be used in it tile by tile."""
        for plan in self.plans.values():
            for unit in plan.tiled:
                module = model.get_submodule(unit)
                assert isinstance(module, PackedModule)
                for slot in module.tpde_slots.values():
                    slot.tile_bytes = plan.workspace

    def route(self, model: torch.nn.Module) -> None:
        """Let experts in host memory be fetched as routed to, through what memory is left for a cache."""
        for device, streamer in self.streamers.items():
            plan, modules = self.plans[device], routed_modules(model, streamer)
            if not modules:
                continue
            size, room = cache_size(modules, plan.piece, plan.parts["experts"], plan.vram - plan.used)
            if not size:
                continue  # not even one fits: they come with their blocks
            cache = CudaDevice(device, size, beside=cast(CudaDevice, streamer.device))
            streamer.own(cache)
            store = self.experts[device] = ExpertStore(cache, 0, size, room, plan.piece)
            for module in modules:
                route_experts(module, store.module(fused(module)))

    def attach(self, model: Any) -> None:
        """Belong to a model that is loaded, and hold it to its number of tokens."""
        model.tpde_streamer = self
        model.register_forward_pre_hook(
            TokenLimit(model, self.budget.max_tokens), with_kwargs=True, prepend=True
        )

    def _read(self, nbytes: int) -> None:
        if self.budget.progress is not None:
            self.budget.progress(nbytes)

    def _open(
        self,
        device: torch.device,
        made: StreamPlan,
        host: Mapping[str, Stored],
        disk: Mapping[str, Stored],
    ) -> dict[str, PackedTensor]:
        streamer, tensors = open_streamed(
            device, made, list(host.values()), list(disk.values()), progress=self.budget.progress
        )
        self.streamers[device] = streamer
        supplies = {id(it.supply): it.supply for it in tensors.values()}
        self._readers[device] = [it for it in supplies.values() if hasattr(it, "trace")]
        return {**tensors}

    # ---- looking at it ----

    def record(self) -> None:
        """Start to note when things happen, for `trace` and `stats`. Waits for the devices."""
        for device, streamer in self.streamers.items():
            trace = self._traces[device] = streamer.device.trace = start_trace(device)
            if device in self.experts:
                self.experts[device].device.trace = trace
            for reader in self._readers[device]:
                reader.trace = trace

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what was noted since `record` as a timeline for https://ui.perfetto.dev.

        Raises
        ------
        InvalidDestination
            If it cannot be written.
        """
        write_trace(path, list(self._traces.values()))

    def stats(self) -> dict[str, Any]:
        """For each device, what was copied so far; with `record`, how much of it was hidden as well."""
        found: dict[str, Any] = {}
        for device, streamer in self.streamers.items():
            found[str(device)] = dict(streamer.stats())
            if device in self.experts:
                found[str(device)] |= self.experts[device].stats()
            if device in self._traces:
                found[str(device)] |= self.summary(device).as_dict()
        return found

    def summary(self, device: torch.device) -> Summary:
        """How well a device's copies were hidden since `record`."""
        return summarize_spans(self._traces[device].spans(), self.streamers[device].dropped_pieces)

    # ---- the end ----

    def close(self) -> None:
        """Give locked memory, files and the budget back. The model cannot be used any more."""
        for streamer in self.streamers.values():
            streamer.close()
        for finalizer in self._finalizers:
            finalizer()

    def __getstate__(self) -> dict[str, Any]:
        raise PackedWeight(
            "the model streams its weights from files, which cannot be copied or pickled; load it again"
        )


def decode_runs(
    model: Any,
    runs: Mapping[str, Run[Stored]],
    device: torch.device,
    progress: Callable[[int], None] | None,
) -> None:
    """Put parameters into a model plain, one tensor of the files at a time.

    Raises
    ------
    Corrupt
        Naming tensor and chunk.
    """
    if not runs:
        return
    order = sorted(runs.items(), key=lambda item: -item[1].nbytes)
    left = [max(part.extent.size for part in run.parts) for _, run in order]
    left = list(accumulate(reversed(left), max))[::-1]  # the largest blob from each on
    # One buffer for all blobs, in a segment of its own that goes back whole. It shrinks with them: at the end
    # all plain weights are there, and maybe no more room than for these.
    scratch = torch.empty(0, dtype=torch.uint8, device=device)
    with torch.inference_mode(False):
        for largest, (name, run) in zip(left, order, strict=True):
            if scratch.numel() < largest or scratch.numel() >= max(2 * largest, SCRATCH_LEAST):
                scratch = blob = packed = None  # type: ignore[assignment]
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                scratch = torch.empty(largest, dtype=torch.uint8, device=device)
            flat = torch.empty(align(max(run.nbytes, 1), ALIGN_BLOB), dtype=torch.uint8, device=device)
            at = 0
            for part in run.parts:
                blob = scratch[: part.extent.size]
                fill([blob], [part.extent])
                packed = part.checked(PackedTensor(blob, part.name))
                Materializer([(packed, at)], device)(flat)
                at += part.nbytes
                if progress is not None:
                    progress(part.extent.size)
            place(model, name, flat[: run.nbytes].view(run.dtype).view(run.shape))
        del scratch, blob, packed
    if device.type == "cuda":
        torch.cuda.empty_cache()


def open_streamed(
    device: torch.device,
    plan: StreamPlan,
    host: Sequence[Stored],
    disk: Sequence[Stored],
    *,
    progress: Callable[[int], None] | None = None,
) -> tuple[Streamer, dict[str, StreamedTensor]]:
    """Open packed tensors that stay in host memory, or in their files.

    Parameters
    ----------
    device : torch.device
        Where they are decoded.
    plan : StreamPlan
        How large ring and pieces are.
    host, disk : sequence of Stored
        Tensors that go to locked host memory, and those that are read each time.
    progress : callable, optional
        Called with numbers of bytes that were locked.

    Returns
    -------
    streamer : Streamer
        Owns files and host memory.
    tensors : dict of str to StreamedTensor
        By their names in the files.
    """
    owned: list[Any] = []
    try:
        files: dict[str, FileSource] = {}
        for it in (*host, *disk):
            path = it.extent.source.name
            if path not in files:
                files[path] = FileSource(path)
        owned += files.values()

        def own(stored: Iterable[Stored]) -> list[Extent]:
            return [it.extent._replace(source=files[it.extent.source.name]) for it in stored]

        index = device.index or 0
        supplies: list[tuple[Any, Sequence[Stored], list[Extent]]] = []
        if host:
            memory = HostMemory(own(host), index, progress=progress)
            owned.insert(0, memory)
            supplies.append((memory, host, own(host)))
        if disk:
            ahead = ReadAhead(plan.staging // plan.piece, plan.piece, READ_THREADS, index)
            owned.insert(0, ahead)
            supplies.append((ahead, disk, own(disk)))
        streamer = Streamer(CudaDevice(device, plan.ring), plan.slots, plan.piece)
        tensors: dict[str, StreamedTensor] = {}
        for supply, stored, extents in supplies:
            for it, extent in zip(stored, extents, strict=True):
                tensors[it.name] = it.checked(StreamedTensor(extent, streamer, device, supply))
    except BaseException:
        for thing in owned:
            thing.close()
        raise
    streamer.own(*owned)
    weakref.finalize(streamer, _give_back, streamer.device, streamer.owned).atexit = False
    return streamer, tensors


def _give_back(device: Any, owned: Sequence[Any]) -> None:
    """What a streamer that nobody has closed leaves: copies may still read the host's memory."""
    with suppress(Exception):
        device.wait()
    for thing in owned:
        with suppress(Exception):  # the others are closed all the same
            thing.close()


def hide_blobs(model: torch.nn.Module) -> None:
    """Take the blobs of streamed weights out of a model's buffers.

    They have no data, and nothing to move: where a model is spread over devices, accelerate would try to.
    """
    for _, module in packed_modules(model):
        for key, packed in module._packed().items():
            if packed.streams is not None:
                module._buffers.pop(key, None)


def show_blobs(model: torch.nn.Module) -> None:
    """Put them back."""
    for _, module in packed_modules(model):
        module.tpde_sync()
