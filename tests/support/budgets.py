"""Loading under a budget without a GPU: the simulated device, and placements as a test wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.models import torch
from support.simulated import MemoryFeed, SimulatedDevice
from tpde.errors import OutOfMemory
from tpde.host.feed import Filled
from tpde.host.page_lock import PageLock
from tpde.host.pinned import HostMemory
from tpde.io.sources import Extent
from tpde.loading.machine import loading_on
from tpde.streaming.trace import Trace

PIECE = 64 << 10
SLOTS = 4
MIXED = ("host", "packed", "disk", "plain")


class Device(SimulatedDevice):
    """One that may be asked to wait when it is closed, as by what a model that is dropped leaves behind."""

    closed = False

    def wait(self) -> None:
        if not self.closed:
            super().wait()

    def close(self) -> None:
        self.closed = True
        super().close()


class Opened:
    """What loading has opened so far.

    Attributes
    ----------
    devices, memory, disks : list
        In the order of their making.
    wanted : list of Extent
        What host memory was asked for.
    noted : list of str
        Devices of which times are noted.
    rooms : int
        How many devices have room; opening one more fails.
    """

    rooms = 1000

    def __init__(self) -> None:
        self.devices: list[SimulatedDevice] = []
        self.memory: list[MemoryFeed] = []
        self.disks: list[MemoryFeed] = []
        self.wanted: list[Extent] = []
        self.noted: list[str] = []

    def close(self) -> None:
        """End the threads of the devices."""
        for device in self.devices:
            device.close()


class SimulatedMachine:
    """A machine whose devices are simulated, and whose files are in memory.

    Parameters
    ----------
    opened : Opened
        Notes what is opened.
    page_lock : PageLock, optional
        Lets host memory be real; what locks it.
    """

    def __init__(self, opened: Opened, page_lock: PageLock | None = None) -> None:
        self._opened, self._page_lock = opened, page_lock

    def gpu(self, number: int | None = None) -> torch.device:
        return torch.device("cpu")

    def device(self, device: torch.device, size: int, beside: Any = None) -> Device:
        if len(self._opened.devices) == self._opened.rooms:
            raise OutOfMemory("no room")
        self._opened.devices.append(Device(size))
        return self._opened.devices[-1]

    def memory(
        self, extents: Sequence[Extent], device: torch.device, progress: Callable[[int], None] | None
    ) -> Filled:
        self._opened.wanted += extents
        if self._page_lock is not None:
            return HostMemory(extents, self._page_lock, progress=progress)
        self._opened.memory.append(MemoryFeed())
        if progress is not None:
            progress(sum(it.size for it in extents))
        return self._opened.memory[-1]

    def disk(self, buffers: int, piece: int, device: torch.device) -> MemoryFeed:
        self._opened.disks.append(MemoryFeed(ahead=4 * PIECE))
        return self._opened.disks[-1]

    def start_trace(self, device: torch.device) -> Trace:
        self._opened.noted.append(str(device))
        return Trace(None, 0)  # type: ignore[arg-type]


def every(*kinds: str) -> Callable[[Sequence[str]], dict[str, str]]:
    """Placements that units take in turn; embeddings, which are read from files by nobody, apart."""
    return lambda names: {name: kinds[i % len(kinds)] for i, name in enumerate(names)}


def placed(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[Sequence[str]], dict[str, str]], **fields: Any
) -> None:
    """Let a test say where units go, and what other fields of plans are; of `parts`, the others are 0."""
    from tpde.integrations.transformers import streamed
    from tpde.planning.units import Placement

    plan = streamed.plan_streaming

    def planned(*args: Any, **kwargs: Any) -> Any:
        made = plan(*args, **kwargs)
        chosen = {name: Placement(kind) for name, kind in choose(list(made.placements)).items()}
        ring = {"slots": SLOTS, "piece": PIECE, "staging": 4 * PIECE}
        more = {"parts": dict.fromkeys(made.parts, 0) | fields["parts"]} if "parts" in fields else {}
        return dataclasses.replace(made, placements=chosen, **(ring | fields | more))

    monkeypatch.setattr(streamed, "plan_streaming", planned)


@contextmanager
def simulated(
    monkeypatch: pytest.MonkeyPatch,
    choose: Callable[[Sequence[str]], dict[str, str]] | None = None,
    *,
    page_lock: PageLock | None = None,
    **fields: Any,
) -> Iterator[Opened]:
    """Let models load under a budget to the CPU, which stands for a GPU; `fields` are those of plans."""
    opened = Opened()
    if choose is not None:
        placed(monkeypatch, choose, **fields)
    try:
        with loading_on(SimulatedMachine(opened, page_lock)):
            yield opened
    finally:
        opened.close()


def load(
    path: Any,
    *,
    max_tokens: int = 256,
    max_batch: int = 8,
    vram: int = 1 << 30,
    ram: int | None = None,
    **options: Any,
) -> Any:
    """Load a packed model as `tpde.from_pretrained` would to a GPU with a budget."""
    from tpde.integrations.transformers.load_model import model_class_of
    from tpde.integrations.transformers.load_target import loading_to
    from tpde.loading.collection import collecting_later
    from tpde.planning.budget import Budget

    progress = options.pop("progress", None)
    kernels = options.pop("kernels", "exact")
    kind = options.pop("model_class", None) or model_class_of(path)
    budget = Budget(vram, ram, max_tokens, max_batch=max_batch)
    with collecting_later(), loading_to(torch.device("cpu"), budget, progress, None, kernels):
        return kind.from_pretrained(path, **({"dtype": "auto"} | options))


def only_stats(model: Any) -> dict[str, int]:
    """Give what a model that streams to one device has counted."""
    (found,) = model.tpde_streamer.stats().values()
    return dict(found)
