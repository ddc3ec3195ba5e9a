"""A GPU that is pretended: what PyTorch is asked to do there happens on the host, kernels are emulated."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from support.backends import MadeBackend
from support.emulated import kernel_on_cpu, on_cpu  # noqa: F401
from support.kernels import Card
from tpde.codec import windows
from tpde.cuda import decode

ALIGNED = 512  # bytes of which addresses on a GPU are multiples


class OnHost(TorchFunctionMode):
    """Makes tensors of `cuda` on the host; what is copied to and from there is a copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        given.pop("pin_memory", None)
        given.pop("non_blocking", None)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0].clone()
        if func is torch.empty and given.get("dtype") == torch.uint8:
            room = func(args[0] + ALIGNED, **given)
            at = -room.data_ptr() % ALIGNED
            return room[at : at + args[0]]
        return func(*args, **given)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * max(end._at - self._at, 1e-9)


class _Stream:
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()


class Product:
    """Stands in for `DeviceWindow`: products from the window layout, in float64, at the same addresses."""

    def __init__(self, window: Any, at: int, device: int) -> None:
        self._shape = window.rows, window.columns
        words = windows.decode(_memory(at, window.nbytes).copy())
        self._plain = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).double()

    def takes(self, count: int) -> bool:
        return count <= 64

    def room(self, count: int) -> int:
        return 16 * count

    def product(
        self, x: int, x_stride: int, count: int, y: int, y_stride: int, bias: int, stream: int, room: int
    ) -> None:
        _memory(room, 16 * count)[:] = 7
        rows, columns = self._shape
        assert (x_stride, y_stride, bias, stream) == (columns, rows, 0, 0)
        given = torch.from_numpy(_memory(x, 2 * count * columns).copy().view(np.int16)).view(torch.bfloat16)
        made = (given.view(count, columns).double() @ self._plain.T).bfloat16()
        _memory(y, 2 * count * rows)[:] = made.view(torch.uint8).numpy().reshape(-1)

    def rows(self, out: int, stride: int, stream: int) -> None:
        rows, columns = self._shape
        assert (stride, stream) == (columns, 0)
        words = self._plain.bfloat16().view(torch.uint8).numpy()
        _memory(out, 2 * rows * columns)[:] = words.reshape(-1)


def _memory(address: int, size: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


@pytest.fixture
def pretended(
    monkeypatch: pytest.MonkeyPatch,
    launch_on: Callable[[Any], Any],
    on_cpu: None,  # noqa: F811
) -> Iterator[None]:
    """All of it, for this thread."""
    cuda, patch, real = torch.cuda, monkeypatch.setattr, torch.Generator
    card = Card(monkeypatch, launch_on)  # which decodes

    def kernel(source: str, *rest: Any, **more: Any) -> Any:
        return (card.kernel if source == decode.SOURCE else kernel_on_cpu)(source, *rest, **more)

    launch_on(MadeBackend(kernel, kind="cpu"))
    for name, value in {
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda *_: _Stream(),
        "Stream": lambda *_, **__: _Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "Event": _Event,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda *_, **__: contextlib.nullcontext(),
        "get_device_properties": lambda _: SimpleNamespace(
            name="Pretended", total_memory=1 << 30, major=9, minor=0
        ),
    }.items():
        patch(cuda, name, value)
    patch(torch, "Generator", lambda *_: real())
    with OnHost():
        yield
