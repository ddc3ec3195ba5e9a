"""Opening packed tensors that stay in host memory, or in their files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from tpde.host.feed import Feed
from tpde.io.sources import FileSource
from tpde.loading.checkpoint_files import Stored
from tpde.loading.machine import Machine
from tpde.planning.stream_plan import StreamPlan
from tpde.streaming.cuda_device import Device
from tpde.streaming.damage import DecodedPieces
from tpde.streaming.retained import Retained
from tpde.streaming.streamed_source import Streamed, put_on_device
from tpde.streaming.streamer import Closing, Streamer


class Feeds:
    """Files of packed tensors that are not kept on the device, and what brings their bytes from there.

    Reads headers, tables and index maps; device memory has room for the last two.

    Parameters
    ----------
    device : torch.device
        That they are copied to.
    plan : StreamPlan
        How large pieces and buffers are.
    host, disk : sequence of Stored
        Tensors that go to locked host memory, and those that are read each time.
    machine : Machine
        What has devices, host memory and disks.
    progress : callable, optional
        Called with numbers of bytes that were locked, in the background.

    Attributes
    ----------
    owned : list
        What is to be closed, in this order.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If a file ends before a tensor does, or a header, tables or an index map are damaged.
    OutOfMemory, UnsupportedDevice
        If there is no memory to read to, or no room on the device.
    """

    def __init__(
        self,
        device: torch.device,
        plan: StreamPlan,
        host: Sequence[Stored],
        disk: Sequence[Stored],
        machine: Machine,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._device, self._plan, self._machine = device, plan, machine
        self.owned: list[Closing] = []
        self._tensors: dict[str, Streamed] = {}
        self._feeds: list[tuple[Feed, list[Streamed]]] = []  # each with those whose chunks it brings
        try:
            files: dict[str, FileSource] = {}
            for it in (*host, *disk):
                path = it.extent.source.name
                if path not in files:
                    files[path] = FileSource(path)
                    self.owned.append(files[path])

            def opened(stored: Sequence[Stored]) -> dict[str, Streamed]:
                extents = [it.extent._replace(source=files[it.extent.source.name]) for it in stored]
                return {
                    it.name: it.checked(Streamed(extent, None, device, None))
                    for it, extent in zip(stored, extents, strict=True)
                }

            kept, read = opened(host), opened(disk)
            self._tensors = kept | read
            if device.type == "cuda":
                put_on_device(self._tensors.values())
            if kept:
                memory = machine.memory([it.extent for it in kept.values()], device, progress)
                self.owned.insert(0, memory)
                self._feeds += [(memory, list(kept.values()))]
            if read:
                ahead = machine.disk(plan.staging // plan.piece, plan.piece, device)
                self.owned.insert(0, ahead)
                self._feeds += [(ahead, list(read.values()))]
        except BaseException:
            self.close()
            raise

    @property
    def feeds(self) -> list[Feed]:
        """What brings bytes."""
        return [feed for feed, _ in self._feeds]

    def open(self) -> tuple[Streamer, dict[str, Streamed]]:
        """Take the room on the device that pieces are copied to.

        Returns
        -------
        streamer : Streamer
            Owns files and host memory from now on.
        tensors : dict of str to Streamed
            By their names in the files.

        Raises
        ------
        OutOfMemory
            If there is no room for the ring.
        """
        plan = self._plan
        from_disk = next((it for it in self.feeds if it.ahead), None)  # what takes longest is retained first
        wanted = plan.retained + (plan.work.disk if from_disk else plan.work.copied)
        retained: Retained[DecodedPieces] = Retained(plan.ring, plan.retained, wanted, from_disk)
        device = self._machine.device(self._device, plan.ring + plan.retained)
        streamer = Streamer(device, plan.slots, plan.piece, retained)
        for feed, tensors in self._feeds:
            for tensor in tensors:
                tensor.bind(streamer, feed)
        streamer.own(*self.owned)
        self.owned = []
        weakref.finalize(streamer, _give_back, streamer.device, streamer.owned).atexit = False
        return streamer, self._tensors

    def close(self) -> None:
        """Give back what no streamer owns."""
        while self.owned:
            self.owned.pop(0).close()


def _give_back(device: Device, owned: Sequence[Closing]) -> None:
    """What a streamer that nobody has closed leaves: copies may still read the host's memory."""
    with suppress(Exception):
        device.wait()
    for thing in owned:
        with suppress(Exception):  # the others are closed all the same
            thing.close()
