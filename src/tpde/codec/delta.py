"""Changes between two states of a tensor, coded under a model (docs/delta.md 1 to 4), by the C core."""

from __future__ import annotations

import ctypes
import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.native import Bytes, Error, address, as_bytes, check, core
from tpde.errors import Corrupt, NativeError
from tpde.format.delta_head import Numbers
from tpde.io.buffers import Buffer

CHUNK_WORDS = 65536  # delta.md 3.1
MAX_CLASSES = 16  # delta.md 2.1
TOKENS = 1 << 14  # delta.md 1.3
# A chunk may take so much of its words' size before it is given up: other chunks may save what one costs.
_ROOM = 9 / 8
_TOGETHER = 256  # chunks that are encoded at a time
_ROOM_LEFT = 64  # bytes of a chunk beside, more than the core keeps free: `MOST_BYTES` and 16, and a change


def chunk_count(words: int) -> int:
    """Number of chunks of a tensor (delta.md 3.1)."""
    return -(-words // CHUNK_WORDS)


def chunk_range(number: int, nbytes: int, word_bytes: int) -> tuple[int, int]:
    """Where a chunk of a tensor lies among its bytes."""
    size = CHUNK_WORDS * word_bytes
    return number * size, min((number + 1) * size, nbytes)


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
    targets: npt.NDArray[np.uint8 | np.uint16 | np.uint32 | np.uint64]
    check: int


class TokenTable(NamedTuple):
    """A class's table, as expanded: see `tpde_delta_model_table` in tpde.h."""

    bits: int
    escape: int
    decode: Numbers
    encode: Numbers


class ChangeModel:
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

    def encode(self, base: Buffer, target: Buffer, threads: int = 1) -> Sparse | None:
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
        records = np.empty((2, chunks), np.uint32)  # changes and sizes
        # The least is for chunks of a few words. A system with large pages gives all of it memory.
        room = chunk_room(old.size, chunks) + _ROOM_LEFT
        out, parts = np.empty(room * min(chunks, _TOGETHER), np.uint8), list[Bytes]()
        # Places are computed from these: of small tensors, most of the time goes to asking for them.
        old_at, new_at, out_at, changes_at = address(old), address(new), address(out), address(records)
        sizes_at = changes_at + 4 * chunks
        check_sum, used, part_check, error = 0, ctypes.c_uint64(), ctypes.c_uint64(), Error()
        for first in range(0, chunks, _TOGETHER):
            last = min(first + _TOGETHER, chunks)
            begin = chunk_range(first, old.size, self.word_bytes)[0]
            end = chunk_range(last - 1, old.size, self.word_bytes)[1]
            code = core().tpde_delta_encode(
                self._handle,
                old_at + begin,
                new_at + begin,
                (end - begin) // self.word_bytes,
                out_at,
                room * (last - first),
                ctypes.byref(used),
                changes_at + 4 * first,
                sizes_at + 4 * first,
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
        data: Bytes = parts[0] if len(parts) == 1 else np.concatenate([out[:0], *parts])
        return Sparse(data, records[0], records[1], check_sum % (1 << 64))

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

    def _call(self, name: str, sparse: Sparse, words: Bytes, *how: object) -> None:
        count, error = words.size // self.word_bytes, Error()
        chunks = chunk_count(count)
        if words.size % self.word_bytes or sparse.changes.size != chunks or sparse.sizes.size != chunks:
            raise ValueError(f"{words.size} bytes, with records of {sparse.changes.size} chunks")
        code = getattr(core(), name)(
            self._handle,
            address(sparse.data) if sparse.data.size else None,
            sparse.data.size,
            address(sparse.changes),
            address(sparse.sizes),
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

    def tables(self) -> list[TokenTable]:
        """Copies of the expanded tables of all classes, for decoders and encoders elsewhere."""
        return [self._table(number) for number in range(self.classes)]

    def _table(self, number: int) -> TokenTable:
        bits, escape = ctypes.c_int(), ctypes.c_uint32()
        pointers = [ctypes.POINTER(ctypes.c_uint32)() for _ in range(2)]
        places = (ctypes.byref(it) for it in (bits, escape, *pointers))
        if core().tpde_delta_model_table(self._handle, number, *places):
            raise NativeError(f"the native core refused table {number} of {self.classes}")
        decode, encode = (
            np.ctypeslib.as_array(it, (size,)).copy() if it else np.zeros(0, np.uint32)
            for it, size in zip(pointers, (1 << bits.value, TOKENS), strict=True)
        )
        return TokenTable(bits.value, escape.value, decode, encode)

    def close(self) -> None:
        """Free the tables. The model cannot be used afterwards."""
        if self._handle:
            core().tpde_delta_model_close(self._handle)
            self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        # `sys` is None once the interpreter has cleared this module.
        if getattr(self, "_handle", None) and sys is not None and not sys.is_finalizing():
            self.close()
