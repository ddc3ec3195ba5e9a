"""A card that is made up: what the driver and PyTorch's allocator say of it, and what they were told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tpde.memory import allowance

MIB, GIB = 1 << 20, 1 << 30
OUTSIDE = GIB // 8  # of a budget, for what is not PyTorch's
DEVICE = torch.device("cuda", 0)


class Card:
    """The first CUDA device, of 16 GiB.

    Attributes
    ----------
    free : int
        Bytes that nobody has.
    reserved, allocated : int
        Of PyTorch in this process.
    fraction : float
        What PyTorch may allocate.
    segments : list of dict
        PyTorch's, as `torch.cuda.memory_snapshot` gives them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.free, self.reserved, self.allocated = 16 * GIB, 15 * GIB, 0, 0
        self.fraction = 1.0
        self.segments: list[dict[str, Any]] = []
        cuda = torch.cuda
        monkeypatch.setattr(allowance, "_budgets", {})  # those of a real device stay its own
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(cuda, "memory_reserved", lambda _: self.reserved)
        monkeypatch.setattr(cuda, "memory_allocated", lambda _: self.allocated)
        monkeypatch.setattr(cuda, "memory_snapshot", lambda: self.segments)
        monkeypatch.setattr(cuda, "current_stream", lambda _: type("S", (), {"cuda_stream": 0}))
        monkeypatch.setattr(cuda, "mem_get_info", lambda _: (self.free, self.total))
        properties = type("P", (), {"total_memory": self.total})
        monkeypatch.setattr(cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(cuda.memory, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(
            cuda.memory, "get_per_process_memory_fraction", lambda _: self.fraction, raising=False
        )

    def keep(self, tensors: int, *holes: int, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> None:
        """Let PyTorch keep a segment with a tensor and some holes."""
        blocks = [{"size": tensors, "state": "active_allocated"}]
        blocks += [{"size": it, "state": "inactive"} for it in holes]
        segment = {"device": 0, "stream": stream, "segment_pool_id": pool, "blocks": blocks}
        self.segments.append(segment)
        self.allocated += tensors
        self.reserved += tensors + sum(holes)
        self.free -= tensors + sum(holes)

    def limit(self, fraction: float, _: Any = None) -> None:
        """As PyTorch does, keep whole bytes."""
        self.fraction = int(fraction * self.total) / self.total

    @property
    def allowed(self) -> int:
        """Bytes that PyTorch may allocate."""
        return round(self.fraction * self.total)

    def exhaust(self, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
        """Let allocations of so many bytes and more fail, on any device."""
        empty = torch.empty

        def fail(size: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(size, int) and size >= least:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
            return empty(size, *args, **kwargs)

        monkeypatch.setattr(torch, "empty", fail)
