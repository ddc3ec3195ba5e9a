"""Kernels that are compiled several at a time, and ahead, while weights are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple

from tpde.cuda.backend import Backend, current

_AT_A_TIME = 4
_ahead = ThreadPoolExecutor(1, thread_name_prefix="tpde-compile")


class Asked(NamedTuple):
    """A kernel, as `Backend.kernel` is asked for it."""

    source: str
    name: str
    defines: dict[str, int]
    own: bool = False


def compile_all(backend: Backend, asked: Iterable[Asked], device: int) -> None:
    """Have kernels compiled and loaded: one takes 0.3 to 0.9 s.

    Raises
    ------
    MissingDependency, UnsupportedDevice, CompileError
        Of the first that fails; what has not begun by then is left.
    """
    threads = ThreadPoolExecutor(_AT_A_TIME)
    try:
        made = [threads.submit(backend.kernel, *it[:3], device, own=it.own) for it in asked]
        done = wait(made, return_when=FIRST_EXCEPTION).done
    finally:
        threads.shutdown(cancel_futures=True)
    for it in done:
        it.result()


def submit(work: Callable[..., None], arguments: tuple[Hashable, ...], device: int) -> None:
    """Compile in another thread.

    The first model of an architecture on a machine takes some 6 s of compiling. What fails there fails again
    where a weight is packed, decoded or multiplied, and is told.

    Parameters
    ----------
    work : callable
        Compiles: of a back end, the arguments, and the device.
    arguments : tuple
        What is compiled for.
    device : int
        The device's number.
    """
    _begin(current(), work, arguments, device)


@functools.cache
def _begin(backend: Backend, work: Callable[..., None], arguments: tuple[Hashable, ...], device: int) -> None:
    """Once for the same: of kernels that are refused, each layer of a model would try all again."""
    _ahead.submit(work, backend, *arguments, device)
