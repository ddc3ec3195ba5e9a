"""Opening packed tensors that stay in host memory, or in their files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from tpde.format.source import Extent, FileSource
from tpde.integrations.checkpoint import Stored
from tpde.streaming.device import CudaDevice
from tpde.streaming.disk import ReadAhead
from tpde.streaming.host import HostMemory
from tpde.streaming.plan import StreamPlan
from tpde.streaming.stream import Streamer
from tpde.streaming.tensor import StreamedTensor

READ_THREADS = 8  # between the 4 and 16 at which disks reach their rate


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
        streamer = Streamer(CudaDevice(device, plan.ring), plan.slots, plan.piece)
        tensors: dict[str, StreamedTensor] = {}

        def open_all() -> None:
            for it, extent in zip((*host, *disk), own((*host, *disk)), strict=True):
                tensors[it.name] = it.checked(StreamedTensor(extent, streamer, device, None))

        # Headers and index maps are read and checked, 0.2 ms for each tensor, while pages are locked; what
        # supplies the chunks is known when all are.
        with ThreadPoolExecutor(1, "tpde-open") as pool:
            opening = pool.submit(open_all)
            supplies: list[tuple[Any, Sequence[Stored]]] = []
            if host:
                memory = HostMemory(own(host), index, progress=progress)
                owned.insert(0, memory)
                supplies.append((memory, host))
            if disk:
                ahead = ReadAhead(plan.staging // plan.piece, plan.piece, READ_THREADS, index)
                owned.insert(0, ahead)
                supplies.append((ahead, disk))
            opening.result()
        for supply, stored in supplies:
            for it in stored:
                tensors[it.name].supply = supply
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
