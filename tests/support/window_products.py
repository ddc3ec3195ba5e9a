"""Shared memory of blocks on three GPUs, a matrix in windows that lies on one, and what would be launched."""

from __future__ import annotations

import functools
from typing import Any

from support.backends import MadeBackend, MadeKernel
from tpde.codec.windows import Window
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.window_products import DeviceWindow

H200, AMPERE, ADA = 227 << 10, 163 << 10, 99 << 10


def there(matrix: Window) -> DeviceWindow:
    return DeviceWindow(matrix, 1 << 20, 0)


class Launches(list[tuple[Any, ...]]):
    """What would have been launched on an H200, and how."""

    def __init__(
        self, launch_on: Any, capability: tuple[int, int], clusters: int = 15, shared: int = H200
    ) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self._clusters = clusters
        launch_on(MadeBackend(self._kernel, DeviceFacts("GPU", capability, 132, shared)))

    def _kernel(self, source: str, name: str, *_: Any, **__: Any) -> MadeKernel:
        return MadeKernel(functools.partial(self._make, name), self._clusters)

    def _make(self, *given: Any, **more: Any) -> Any:
        self.made.append((*given, more))
        return lambda *arguments: self.append((given[0], *map(int, arguments)))
