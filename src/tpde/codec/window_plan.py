"""Choosing the windows of a bf16 matrix, and encoding it by them (docs/windows.md 6), by the C core."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.native import Bytes, CoreWindow, Error, address, as_bytes, check, core
from tpde.codec.windows import Window, Words, encoded_size, from_core, room_for, sections
from tpde.errors import InvalidInput

_Counts = npt.NDArray[np.uint64]
_Starts = npt.NDArray[np.uint64]


def _check_plan(code: int, error: Error, rows: int, columns: int) -> None:
    if code == native.E_SPACE:
        raise InvalidInput(
            f"a matrix of {rows} x {columns} words needs {error.found} entries, a blob has fewer",
            found=error.found,
            needed=error.needed,
        )
    check(code, error)


def choose(rows: int, columns: int, counts: _Counts) -> tuple[Window, Words]:
    """Choose the table and the flag of a blob that is encoded elsewhere (windows.md 6.2 to 6.4).

    Parameters
    ----------
    rows, columns : int
        Of the matrix.
    counts : ndarray of uint64, shape (2, 128)
        How many escapes have each XOR, with the flag clear and with it set.

    Returns
    -------
    window : Window
        The blob's header, and where its sections are.
    said : ndarray of uint16, shape (128,)
        Which entries of the table say each XOR: bits of their indices.

    Raises
    ------
    InvalidInput
        If the matrix has no window layout (windows.md 8).
    """
    if counts.shape != (2, 128) or counts.dtype != np.uint64:
        raise ValueError(f"counts of shape {counts.shape} and dtype {counts.dtype}, not (2, 128) of uint64")
    sections(rows, columns)
    counts, said = np.ascontiguousarray(counts), np.empty(128, np.uint16)
    made, error = CoreWindow(), Error()
    code = core().tpde_window_choose(
        *(rows, columns, counts.ctypes.data, ctypes.byref(made)), said.ctypes.data, ctypes.byref(error)
    )
    _check_plan(code, error, rows, columns)
    return from_core(made), said


def said_by(table: bytes) -> Words:
    """Which entries of a table say each XOR: the fewest that there are (windows.md 4.2).

    Parameters
    ----------
    table : bytes
        The 16 XORs.

    Returns
    -------
    ndarray of uint16, shape (128,)
        Bits of their indices.
    """
    said, reached = np.zeros(128, np.uint16), [0]
    for xor in reached:  # which grows: those of one entry, of two, and so on
        for index, one in enumerate(table):
            if (other := xor ^ one) and not said[other]:
                said[other] = said[xor] | 1 << index
                reached.append(other)
    return said


class WindowPlan:
    """The windows of a matrix, chosen; it is encoded next, or refused for its size.

    Parameters
    ----------
    words : ndarray
        The matrix: two dimensions, contiguous, two bytes a word.
    threads : int
        How many threads count. Nothing of the plan depends on it.

    Attributes
    ----------
    entries : int
        How many entries escapes take.
    nbytes : int
        What the blob takes.

    Raises
    ------
    InvalidInput
        If the matrix has no window layout (windows.md 8).
    """

    def __init__(self, words: npt.NDArray[np.generic[object]], threads: int = 1) -> None:
        if words.ndim != 2 or words.itemsize != 2:
            raise ValueError(f"an array of shape {words.shape} and dtype {words.dtype} is no bf16 matrix")
        rows, columns = words.shape
        before, error = sections(rows, columns), Error()
        self._words = as_bytes(words)
        self._head = np.empty(before.offsets_at, np.uint8)
        self._starts: _Starts = np.empty(before.stripes + 1, np.uint64)
        code = core().tpde_window_plan(
            address(self._words),
            rows,
            columns,
            address(self._head),
            self._starts.ctypes.data,
            threads,
            ctypes.byref(error),
        )
        _check_plan(code, error, rows, columns)
        self.entries = int(self._starts[-1])
        self.nbytes = encoded_size(rows, columns, self.entries)

    def encode(self, out: Bytes | None = None, threads: int = 1) -> Bytes:
        """Encode the matrix.

        Parameters
        ----------
        out : ndarray of uint8, optional
            Exactly `nbytes` bytes to write to.
        threads : int
            How many threads encode. The bytes do not depend on it.

        Returns
        -------
        ndarray of uint8
            The blob: `out`, if it was given.
        """
        made, error = room_for(out, self.nbytes), Error()
        code = core().tpde_window_encode(
            address(self._words),
            address(self._head),
            self._starts.ctypes.data,
            address(made),
            made.size,
            threads,
            ctypes.byref(error),
        )
        check(code, error)
        return made


def encode(words: npt.NDArray[np.generic[object]], threads: int = 1) -> Bytes:
    """Encode a matrix.

    Parameters
    ----------
    words : ndarray
        The matrix: two dimensions, contiguous, two bytes a word.
    threads : int
        How many threads to use. The bytes do not depend on it.

    Returns
    -------
    ndarray of uint8
        The blob.

    Raises
    ------
    InvalidInput
        If the matrix has no window layout (windows.md 8).
    """
    return WindowPlan(words, threads).encode(threads=threads)
