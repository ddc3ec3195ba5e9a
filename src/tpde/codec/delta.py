"""What changed between two states of a tensor (docs/delta.md 1 to 4), by the C core."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.native import Bytes, Error, address, as_bytes, check, core
from tpde.codec.pool import each
from tpde.errors import Corrupt, NativeError

CHUNK_WORDS = 65536  # delta.md 3.1
MAX_CLASSES = 16  # delta.md 2.1
TOKENS = 1 << 14  # delta.md 1.3
# Of each state, what a model is made from; less where there is one table to make. On pycode-19m's chains a
# third of the chunks costs at most 0.2 %, a ninth 0.9 %.
SAMPLE_BYTES, FAST_SAMPLE_BYTES = 16 << 20, 8 << 20
_MAX_MODEL = 20480
# A chunk may take so much of its words' size before it is given up: other chunks may save what one costs.
_ROOM = 9 / 8
# Looking at a chunk takes some 0.1 ms; a fork takes memory that the system must provide, about 1 ms.
_PART_SECONDS, _LEAST_PARTS = 1e-4, 32
_TOGETHER = 256  # chunks that are encoded at a time
_ROOM_LEFT = 64  # bytes of a chunk beside, more than the core keeps free: `MOST_BYTES` and 16, and a change

Numbers = npt.NDArray[np.uint32]


def fingerprint(data: Any, offset: int = 0) -> bytes:
    """The fingerprint of a tensor's bytes, or the share that some of them have in it (delta.md 4).

    Parameters
    ----------
    data : bytes-like or ndarray
        Contiguous. A multiple of 8 bytes, unless the tensor's last ones are among them.
    offset : int
        Where they lie in the tensor: a multiple of 8.

    Returns
    -------
    bytes
        Two sums of 64 bits. Those of parts, added up, are the tensor's.
    """
    part, sums = as_bytes(data), (ctypes.c_uint64 * 2)()
    core().tpde_fingerprint(address(part), part.size, offset, sums)
    return bytes(sums)


def chunk_count(words: int) -> int:
    """Number of chunks of a tensor (delta.md 3.1)."""
    return -(-words // CHUNK_WORDS)


def chunk_room(nbytes: int, chunks: int) -> int:
    """What each chunk of a tensor may take: with more, the tensor is not worth a sparse change."""
    return int(nbytes * _ROOM) // max(chunks, 1)


class Sparse(NamedTuple):
    """The changes of a tensor: its chunks one after the other, and a record of each (delta.md 3)."""

    data: Bytes
    changes: Numbers
    sizes: Numbers
    check: int = 0
    """Of the changes, as they are encoded under a model of one class (4)."""


class Listed(NamedTuple):
    """Changes of a tensor: numbers of words, ascending, what they become, and their check (delta.md 4)."""

    positions: npt.NDArray[np.uint64]
    targets: npt.NDArray[Any]
    check: int


class Table(NamedTuple):
    """A class's table, as expanded: see `tpde_delta_model_table` in tpde.h."""

    bits: int
    escape: int
    decode: Numbers
    encode: Numbers


class Model:
    """A model of changes (delta.md 2), opened for applying, and for encoding if asked to.

    Parameters
    ----------
    data : bytes
        The model.
    encode : bool
        Expand the tables for encoding too: up to 1 MiB more.

    Raises
    ------
    Corrupt
        If it is damaged.
    """

    def __init__(self, data: bytes, *, encode: bool = False) -> None:
        self._handle = ctypes.c_void_p()
        error, buffer = Error(), as_bytes(data)
        code = core().tpde_delta_model_open(
            address(buffer) if buffer.size else None,
            buffer.size,
            int(encode),
            ctypes.byref(self._handle),
            ctypes.byref(error),
        )
        check(code, error)
        self.data = bytes(data)
        self.word_bytes, self.rotate, self.classes, self.folded = data[:4]

    def encode(self, base: Any, target: Any, threads: int = 1) -> Sparse | None:
        """Encode what changed.

        Parameters
        ----------
        base, target : bytes-like or ndarray
            The tensor's words in both states: contiguous, of one size.
        threads : int
            How many threads encode. The result does not depend on it.

        Returns
        -------
        Sparse or None
            None if it takes more than the words themselves, or nearly.
        """
        old, new = as_bytes(base), as_bytes(target)
        if old.size != new.size or old.size % self.word_bytes:
            raise ValueError(f"{old.size} and {new.size} bytes are no two states of a tensor")
        chunks = chunk_count(old.size // self.word_bytes)
        changes, sizes = np.empty(chunks, np.uint32), np.empty(chunks, np.uint32)
        # The least is for chunks of a few words. A system with large pages gives all of it memory.
        room = chunk_room(old.size, chunks) + _ROOM_LEFT
        check_sum = 0
        out, parts = np.empty(room * min(chunks, _TOGETHER), np.uint8), list[Bytes]()
        for first in range(0, chunks, _TOGETHER):
            last = min(first + _TOGETHER, chunks)
            begin = chunk_range(first, old.size, self.word_bytes)[0]
            end = chunk_range(last - 1, old.size, self.word_bytes)[1]
            used, part_check, error = ctypes.c_uint64(), ctypes.c_uint64(), Error()
            code = core().tpde_delta_encode(
                self._handle,
                address(old[begin:end]),
                address(new[begin:end]),
                (end - begin) // self.word_bytes,
                address(out),
                room * (last - first),
                ctypes.byref(used),
                address(changes[first:last].view(np.uint8)),
                address(sizes[first:last].view(np.uint8)),
                first * CHUNK_WORDS,
                ctypes.byref(part_check),
                threads,
                ctypes.byref(error),
            )
            if code == native.E_SPACE:
                return None
            check(code, error)
            parts.append(out[: used.value].copy())
            check_sum += part_check.value
        data: Bytes = np.concatenate(parts) if parts else out
        return Sparse(data, changes, sizes, check_sum % (1 << 64))

    def apply(self, sparse: Sparse, words: Bytes, threads: int = 1, *, dry: bool = False) -> None:
        """Turn a base into its target where it lies.

        Parameters
        ----------
        sparse : Sparse
            The changes.
        words : ndarray of uint8
            The base's words, which become the target's.
        threads : int
            How many threads decode.
        dry : bool
            Check that all chunks can be applied, and leave the words as they are.

        Raises
        ------
        Corrupt
            Naming a chunk that is damaged. Without a dry run before, words may be changed by then.
        """
        self._call("tpde_delta_apply", sparse, words, int(dry), threads)

    def _call(self, name: str, sparse: Sparse, words: Bytes, *how: Any) -> None:
        count, error = words.size // self.word_bytes, Error()
        chunks = chunk_count(count)
        if words.size % self.word_bytes or sparse.changes.size != chunks or sparse.sizes.size != chunks:
            raise ValueError(f"{words.size} bytes, with records of {sparse.changes.size} chunks")
        code = getattr(core(), name)(
            self._handle,
            address(sparse.data) if sparse.data.size else None,
            sparse.data.size,
            address(sparse.changes.view(np.uint8)),
            address(sparse.sizes.view(np.uint8)),
            address(words),
            count,
            *how,
            ctypes.byref(error),
        )
        check(code, error)

    def listed(self, sparse: Sparse, words: Bytes, threads: int = 1) -> Listed:
        """Tell which words change, and what they become, without a look at others.

        Parameters
        ----------
        sparse : Sparse
            The changes, under a model of one class.
        words : ndarray of uint8
            The base's words, which are left as they are.
        threads : int
            How many threads decode.

        Raises
        ------
        Corrupt
            Naming a chunk that is damaged; if there are more changes than words.
        """
        total, check_sum = int(sparse.changes.sum(dtype=np.uint64)), ctypes.c_uint64()
        if total > words.size // self.word_bytes:
            raise Corrupt(f"{total} changes of {words.size // self.word_bytes} words")
        positions = np.empty(max(total, 1), np.uint64)  # never of no address
        targets = np.empty(max(total, 1), f"<u{self.word_bytes}")
        places = address(positions.view(np.uint8)), address(targets.view(np.uint8))
        self._call("tpde_delta_list", sparse, words, *places, ctypes.byref(check_sum), threads)
        return Listed(positions[:total], targets[:total], check_sum.value)

    def tables(self) -> list[Table]:
        """Copies of the expanded tables of all classes, for decoders and encoders elsewhere."""
        return [self._table(number) for number in range(self.classes)]

    def _table(self, number: int) -> Table:
        bits, escape = ctypes.c_int(), ctypes.c_uint32()
        pointers = [ctypes.POINTER(ctypes.c_uint32)() for _ in range(2)]
        places = (ctypes.byref(it) for it in (bits, escape, *pointers))
        if core().tpde_delta_model_table(self._handle, number, *places):
            raise NativeError(f"the native core refused table {number} of {self.classes}")
        decode, encode = (
            np.ctypeslib.as_array(it, (size,)).copy() if it else np.zeros(0, np.uint32)
            for it, size in zip(pointers, (1 << bits.value, TOKENS), strict=True)
        )
        return Table(bits.value, escape.value, decode, encode)

    def close(self) -> None:
        """Free the tables. The model cannot be used afterwards."""
        if self._handle:
            core().tpde_delta_model_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        # `sys` is None once the interpreter has cleared this module.
        if getattr(self, "_handle", None) and sys is not None and not sys.is_finalizing():
            self.close()


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


def chunk_range(number: int, nbytes: int, word_bytes: int) -> tuple[int, int]:
    """Where a chunk of a tensor lies among its bytes."""
    size = CHUNK_WORDS * word_bytes
    return number * size, min((number + 1) * size, nbytes)


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
