"""Back ends whose kernels are what a test makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tpde.cuda.backend import Backend
from tpde.cuda.capability import DeviceFacts

FACTS = DeviceFacts("simulated", (9, 0), 132, 227 << 10)

NO_NVCOMP = SimpleNamespace(available=lambda: False)

Make = Callable[..., Callable[..., Any]]


class MadeLaunch:
    """Stands in for `KernelLaunch`: calls a function with the stream and the arguments."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Launch it once."""
        self._run(stream, *arguments)

    def bind(self, stream: int, *arguments: Any) -> Callable[[], None]:
        """Launch it later."""
        return functools.partial(self._run, stream, *arguments)


class MadeKernel:
    """Stands in for `Kernel`.

    Parameters
    ----------
    make : callable
        Gets a launch's grid, block, shared bytes, and what else is not as usual; returns what runs it.
    clusters : int
        That the device runs at a time.
    """

    def __init__(self, make: Make, clusters: int = 15) -> None:
        self._make, self._clusters = make, clusters

    def launch(self, grid: int, block: int, shared: int, **more: Any) -> MadeLaunch:
        """Give it a grid."""
        return MadeLaunch(self._make(grid, block, shared, **more))

    def clusters_at_once(self, cluster: int, block: int, shared: int) -> int:
        """As many as were given."""
        return self._clusters


class MadeBackend:
    """Stands in for `Backend`.

    Parameters
    ----------
    kernel : callable, optional
        Its method; by default nothing can be launched.
    facts : DeviceFacts or Exception
        Of every device; or why nothing is known.
    kind : str
        Type of the devices.
    nvcomp : Nvcomp, optional
        By default none, of which nobody is warned.
    compiler : tuple of int or Exception
        CUDA version of what compiles kernels; or why there is none.

    Attributes
    ----------
    asked : list of int
        Devices whose facts were asked for.
    """

    def __init__(
        self,
        kernel: Callable[..., Any] | None = None,
        facts: DeviceFacts | Exception = FACTS,
        kind: str = "cuda",
        nvcomp: Any = NO_NVCOMP,
        compiler: tuple[int, int] | Exception = (13, 0),
    ) -> None:
        self._kernel, self._facts, self.kind, self.nvcomp = kernel, facts, kind, nvcomp
        self._compiler = compiler
        self.asked: list[int] = []

    def driver_version(self) -> tuple[int, int]:
        """Of CUDA 13.0."""
        return 13, 0

    def compiler_version(self) -> tuple[int, int]:
        """As it was given."""
        if isinstance(self._compiler, Exception):
            raise self._compiler
        return self._compiler

    def facts(self, device: int) -> DeviceFacts:
        """As they were given."""
        self.asked.append(device)
        if isinstance(self._facts, Exception):
            raise self._facts
        return self._facts

    def kernel(self, *given: Any, **more: Any) -> Any:
        """A kernel."""
        assert self._kernel is not None
        return self._kernel(*given, **more)


class NotingBackend(MadeBackend):
    """Another back end, of which it notes what is asked.

    Parameters
    ----------
    there : Backend
        What runs kernels.

    Attributes
    ----------
    names : list of str
        Of the kernels that were asked for.
    """

    def __init__(self, there: Backend) -> None:
        super().__init__(there.kernel, kind=there.kind)
        self.names: list[str] = []

    def kernel(self, source: str, name: str, *rest: Any, **more: Any) -> Any:
        """Its kernel."""
        self.names.append(name)
        return super().kernel(source, name, *rest, **more)
