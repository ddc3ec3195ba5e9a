"""Choosing a model for the changes of tensors (docs/delta.md 2), by the C core."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tpde.codec.delta import CHUNK_WORDS, MAX_CLASSES, chunk_count, chunk_range
from tpde.codec.native import Bytes, Error, address, check, core
from tpde.codec.pool import each

# Of each state, what a model is made from; less where there is one table to make. On pycode-19m's chains a
# third of the chunks costs at most 0.2 %, a ninth 0.9 %.
SAMPLE_BYTES, FAST_SAMPLE_BYTES = 16 << 20, 8 << 20
_MAX_MODEL = 20480
# Looking at a chunk takes some 0.1 ms; a fork takes memory that the system must provide, about 1 ms.
_PART_SECONDS, _LEAST_PARTS = 1e-4, 32


class Planner:
    """Chooses a model for the changes of all tensors of one kind of words.

    Every chunk of the sample is surveyed, then the classes are chosen, then every chunk is counted, then the
    model is written.

    Parameters
    ----------
    word_bytes, rotate : int
        The kind of words (format.md 2.1).
    fast : bool
        One class: larger deltas, which are made and applied faster.
    """

    def __init__(self, word_bytes: int, rotate: int, *, fast: bool = False) -> None:
        self._word_bytes = word_bytes
        self._handle = self._made(core().tpde_delta_plan_new(word_bytes, rotate, 1 if fast else MAX_CLASSES))

    @staticmethod
    def _made(handle: int | None) -> int | None:
        if not handle:
            raise MemoryError("the native core has no memory for a plan of changes")
        return handle

    def fork(self) -> Planner:
        """Another planner of the same classes, which has counted nothing: for another thread."""
        made = Planner.__new__(Planner)
        made._word_bytes, made._handle = self._word_bytes, None
        made._handle = self._made(core().tpde_delta_plan_fork(self._handle))
        return made

    def add(self, other: Planner) -> None:
        """Add what a fork has counted."""
        error = Error()
        check(core().tpde_delta_plan_add(self._handle, other._handle, ctypes.byref(error)), error)

    def _chunk(self, base: Bytes, target: Bytes) -> tuple[int, int, int]:
        if base.size != target.size or base.size % self._word_bytes:
            raise ValueError(f"{base.size} and {target.size} bytes are no two states of a chunk")
        return address(base), address(target), base.size // self._word_bytes

    def survey(self, base: Bytes, target: Bytes) -> None:
        """Count which words of a chunk change, and how far."""
        error = Error()
        arguments = *self._chunk(base, target), ctypes.byref(error)
        check(core().tpde_delta_plan_survey(self._handle, *arguments), error)

    def choose(self, scale: int = 1) -> None:
        """Choose the classes. There are `scale` times as many words as were surveyed."""
        error = Error()
        check(core().tpde_delta_plan_classes(self._handle, scale, ctypes.byref(error)), error)

    def count(self, base: Bytes, target: Bytes) -> None:
        """Count the tokens of a chunk."""
        error = Error()
        arguments = *self._chunk(base, target), ctypes.byref(error)
        check(core().tpde_delta_plan_count(self._handle, *arguments), error)

    def model(self, scale: int = 1) -> bytes:
        """Write the model."""
        out, size, error = np.empty(_MAX_MODEL, np.uint8), ctypes.c_uint32(), Error()
        code = core().tpde_delta_plan_model(
            self._handle, scale, address(out), ctypes.byref(size), ctypes.byref(error)
        )
        check(code, error)
        return out[: size.value].tobytes()

    def __del__(self) -> None:
        # `sys` is None once the interpreter has cleared this module.
        if getattr(self, "_handle", None) and sys is not None and not sys.is_finalizing():
            core().tpde_delta_plan_free(self._handle)
            self._handle = None


def sample_step(chunks: int, word_bytes: int, *, fast: bool = False) -> int:
    """Of so many chunks in all tensors, every which one is looked at to choose a model."""
    most = (FAST_SAMPLE_BYTES if fast else SAMPLE_BYTES) // (CHUNK_WORDS * word_bytes)
    return -(-chunks // most) or 1


def choose(
    parts: Sequence[tuple[Bytes, Bytes]],
    word_bytes: int,
    rotate: int,
    *,
    step: int = 1,
    fast: bool = False,
    threads: int = 1,
) -> bytes:
    """Choose a model from a sample.

    Parameters
    ----------
    parts : sequence of (ndarray of uint8, ndarray of uint8)
        Chunks in both states.
    word_bytes, rotate : int
        Their kind of words (format.md 2.1).
    step : int
        How many chunks there are for each of the sample.
    fast : bool
        One class.
    threads : int
        How many threads look at chunks. The model does not depend on it.

    Returns
    -------
    bytes
        The model (delta.md 2).
    """
    planner = Planner(word_bytes, rotate, fast=fast)
    workers = max(1, min(threads, len(parts) // _LEAST_PARTS))

    def look(how: Callable[[Planner, Bytes, Bytes], None]) -> None:
        planners = [planner, *(planner.fork() for _ in range(workers - 1))]

        def share(number: int) -> None:
            for old, new in parts[number::workers]:
                how(planners[number], old, new)

        each(share, range(workers), seconds=len(parts) * _PART_SECONDS, threads=workers)
        for it in planners[1:]:
            planner.add(it)

    if not fast:
        look(Planner.survey)
        planner.choose(step)
    look(Planner.count)
    return planner.model(step)


def plan(pairs: Iterable[tuple[Bytes, Bytes]], word_bytes: int, rotate: int, *, fast: bool = False) -> bytes:
    """Choose a model for tensors that are in memory.

    Parameters
    ----------
    pairs : iterable of (ndarray of uint8, ndarray of uint8)
        The tensors' bytes in both states.
    word_bytes, rotate : int
        Their kind of words (format.md 2.1).
    fast : bool
        One class.

    Returns
    -------
    bytes
        The model (delta.md 2).
    """
    parts = [
        (old[begin:end], new[begin:end])
        for old, new in pairs
        for number in range(chunk_count(old.size // word_bytes))
        for begin, end in [chunk_range(number, old.size, word_bytes)]
    ]
    step = sample_step(len(parts), word_bytes, fast=fast)
    return choose(parts[::step], word_bytes, rotate, step=step, fast=fast)
