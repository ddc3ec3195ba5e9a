"""Kernels that are compiled several at a time, and ahead, while weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple, ParamSpec

from tpde.cuda.backend import Backend

P = ParamSpec("P")

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


def begin(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do some work in another thread, after all that was begun before.

    What fails there is told where it is asked for again.
    """
    _ahead.submit(work, *args, **kwargs)
