"""Kernels that are compiled several at a time, and ahead, while weights are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple

from tpde.cuda import window_encode
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


def compile_in_thread(work: Callable[..., None], shape: tuple[int, ...], device: int) -> None:
    """Compile what weights of a shape take in another thread, while they are read: encoding, and `work`.

    The first model of an architecture on a machine takes some 6 s of compiling. What fails there fails again
    where a weight is encoded or prepared, and is told.

    Parameters
    ----------
    work : callable
        Compiles the rest: of a back end, the numbers of the shape, and the device.
    shape : tuple of int
        What is compiled for.
    device : int
        The device's number.

    Raises
    ------
    MissingDependency, UnsupportedDevice
        If there is no driver, no such device, or it cannot run our kernels.
    """
    backend = current()
    backend.facts(device)
    _begin(backend, work, shape, device)


@functools.cache
def _begin(backend: Backend, work: Callable[..., None], shape: tuple[int, ...], device: int) -> None:
    """Once for a shape: of kernels that are refused, each layer of a model would try all again."""
    _ahead.submit(window_encode.prepare, device)
    _ahead.submit(work, backend, *shape, device)
