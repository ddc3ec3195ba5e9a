"""Loading under a budget without a GPU: the simulated device, and placements as a test wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.models import torch
from support.simulated import MemoryFeed, SimulatedDevice

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
    """What loading has opened so far."""

    def __init__(self) -> None:
        self.devices: list[SimulatedDevice] = []
        self.memory: list[MemoryFeed] = []
        self.disks: list[MemoryFeed] = []

    def close(self) -> None:
        """End the threads of the devices."""
        for device in self.devices:
            device.close()


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
    **fields: Any,
) -> Iterator[Opened]:
    """Let models load under a budget to the CPU, which stands for a GPU; `fields` are those of plans."""
    from tpde.integrations.transformers import streamed
    from tpde.loading import budgeted, feeds

    opened = Opened()

    def device(_: torch.device, ring: int, *, beside: Any = None) -> SimulatedDevice:
        opened.devices.append(Device(ring))
        return opened.devices[-1]

    def memory(extents: Sequence[Any], device: int, *, progress: Any = None) -> MemoryFeed:
        opened.memory.append(MemoryFeed())
        if progress is not None:
            progress(sum(it.size for it in extents))
        return opened.memory[-1]

    def disk(*_: Any) -> MemoryFeed:
        opened.disks.append(MemoryFeed(ahead=4 * PIECE))
        return opened.disks[-1]

    monkeypatch.setattr(feeds, "CudaDevice", device)
    monkeypatch.setattr(streamed, "CudaDevice", device)
    monkeypatch.setattr(feeds, "HostMemory", memory)
    monkeypatch.setattr(budgeted, "HostMemory", MemoryFeed)
    monkeypatch.setattr(feeds, "ReadAhead", disk)
    if choose is not None:
        placed(monkeypatch, choose, **fields)
    try:
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
