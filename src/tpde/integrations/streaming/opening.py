"""Opening packed tensors that stay in host memory, or in their files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
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


class Supplies:
    """Files of packed tensors that are not kept on the device, and what brings their bytes from there.

    Takes no device memory. Host memory is filled, and locked, in the background from now on.

    Parameters
    ----------
    device : torch.device
        That they are copied to.
    plan : StreamPlan
        How large pieces and buffers are.
    host, disk : sequence of Stored
        Tensors that go to locked host memory, and those that are read each time.
    progress : callable, optional
        Called with numbers of bytes that were locked, in the background.

    Attributes
    ----------
    owned : list
        What is to be closed, in this order.

    Raises
    ------
    Truncated
        If a file ends before a tensor does.
    OutOfMemory, UnsupportedDevice
        If there is no memory to read to.
    """

    def __init__(
        self,
        device: torch.device,
        plan: StreamPlan,
        host: Sequence[Stored],
        disk: Sequence[Stored],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._device, self._plan = device, plan
        self.owned: list[Any] = []
        self._tensors: list[tuple[Stored, Extent, Any]] = []  # each with what supplies its chunks
        try:
            files: dict[str, FileSource] = {}
            for it in (*host, *disk):
                path = it.extent.source.name
                if path not in files:
                    files[path] = FileSource(path)
                    self.owned.append(files[path])

            def own(stored: Iterable[Stored]) -> list[Extent]:
                return [it.extent._replace(source=files[it.extent.source.name]) for it in stored]

            index = device.index or 0
            if host:
                extents = own(host)
                memory = HostMemory(extents, index, progress=progress)
                self.owned.insert(0, memory)
                self._tensors += [(it, extent, memory) for it, extent in zip(host, extents, strict=True)]
            if disk:
                ahead = ReadAhead(plan.staging // plan.piece, plan.piece, READ_THREADS, index)
                self.owned.insert(0, ahead)
                self._tensors += [(it, extent, ahead) for it, extent in zip(disk, own(disk), strict=True)]
        except BaseException:
            self.close()
            raise

    def open(self) -> tuple[Streamer, dict[str, StreamedTensor]]:
        """Take the memory on the device, and read headers and index maps.

        Returns
        -------
        streamer : Streamer
            Owns files and host memory from now on.
        tensors : dict of str to StreamedTensor
            By their names in the files.

        Raises
        ------
        Truncated, Corrupt, UnsupportedVersion
            If a header, tables or an index map are damaged.
        OutOfMemory
            If there is no room for the ring.
        """
        streamer = Streamer(CudaDevice(self._device, self._plan.ring), self._plan.slots, self._plan.piece)
        tensors = {
            it.name: it.checked(StreamedTensor(extent, streamer, self._device, supply))
            for it, extent, supply in self._tensors
        }
        streamer.own(*self.owned)
        self.owned = []
        weakref.finalize(streamer, _give_back, streamer.device, streamer.owned).atexit = False
        return streamer, tensors

    def close(self) -> None:
        """Give back what no streamer owns."""
        while self.owned:
            self.owned.pop(0).close()


def _give_back(device: Any, owned: Sequence[Any]) -> None:
    """What a streamer that nobody has closed leaves: copies may still read the host's memory."""
    with suppress(Exception):
        device.wait()
    for thing in owned:
        with suppress(Exception):  # the others are closed all the same
            thing.close()
