"""What stands in for devices, memory and disks where feeds are opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpde.streaming.trace import COPY, Trace, TraceSpan

SECOND = torch.device("cuda", 1)


class Feed:
    """One that is made for some arguments."""

    def __init__(self, log: list[Any], name: str, ahead: int, given: tuple[Any, ...]) -> None:
        self.log, self.name, self.ahead, self.given = log, name, ahead, given

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


class Traced(Trace):
    """What has seen one copy."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(None, 0)  # type: ignore[arg-type]
        self.nbytes = nbytes

    def spans(self) -> list[TraceSpan]:
        return [TraceSpan(COPY, "w", 0, 1000, self.nbytes, 0)]


class World:
    """What stands in for devices, memory and disks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.ring = 0
        self.placed: list[int] = []  # bytes that were allocated on a device
        empty = torch.empty

        def placed(size: Any, *args: Any, device: Any = None, **options: Any) -> Any:
            if device == SECOND:
                self.placed.append(size)
                device = None
            return empty(size, *args, device=device, **options)

        monkeypatch.setattr(torch, "empty", placed)

    # ---- a machine ----

    def memory(self, extents: Any, device: Any, progress: Any) -> Any:
        return Feed(self.log, "memory", 0, ([it.name for it in extents], device, progress))

    def disk(self, *given: Any) -> Any:
        return Feed(self.log, "disk", 1, given)

    def device(self, device: Any, size: int, beside: Any = None) -> Any:
        self.ring = size
        return SimpleNamespace(wait=lambda: self.log.append("waited"))

    def start_trace(self, device: Any) -> Any:
        return Traced(100 + device.index)
