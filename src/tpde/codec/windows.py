"""bf16 matrices in the window layout (docs/windows.md), by the C core."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.native import Bytes, CoreWindow, Error, address, as_bytes, check, core
from tpde.errors import InvalidInput

ROWS_AT = 16  # windows.md 7.1: where rows can be cut
COLUMNS_AT = 64  # windows.md 7.1: where columns can be cut
FLAG_ZERO = 1  # windows.md 5.1

Words = npt.NDArray[np.uint16]
Counts = npt.NDArray[np.uint64]
_Starts = npt.NDArray[np.uint64]


class Window(NamedTuple):
    """What a blob holds, and where (windows.md 5).

    Attributes
    ----------
    rows, columns : int
        Of the matrix.
    entries : int
        How many its escapes take.
    flags : int
        `FLAG_ZERO`, or 0.
    table : bytes
        The 16 XORs.
    stripes : int
        Of 16 rows.
    stripe_chunks, stripe_bytes : int
        Chunks of each, and bytes of their bodies.
    records_at, offsets_at, entries_at, bodies_at : int
        Where the sections start.
    nbytes : int
        Size of the blob.
    """

    rows: int
    columns: int
    entries: int
    flags: int
    table: bytes
    stripes: int
    stripe_chunks: int
    stripe_bytes: int
    records_at: int
    offsets_at: int
    entries_at: int
    bodies_at: int
    nbytes: int


def _window(it: CoreWindow) -> Window:
    return Window(
        rows=it.rows,
        columns=it.columns,
        entries=it.entries,
        flags=it.flags,
        table=bytes(it.table),
        stripes=it.stripes,
        stripe_chunks=it.stripe_chunks,
        stripe_bytes=it.stripe_bytes,
        records_at=it.records_at,
        offsets_at=it.offsets_at,
        entries_at=it.entries_at,
        bodies_at=it.bodies_at,
        nbytes=it.bytes,
    )


def sections(rows: int, columns: int, entries: int = 0) -> Window:
    """Where everything of a blob would be; flags and table are zeros.

    Parameters
    ----------
    rows, columns : int
        Of the matrix.
    entries : int
        How many its escapes take.

    Raises
    ------
    InvalidInput
        If there is no such blob (windows.md 8).
    """
    made = CoreWindow()
    # ctypes takes numbers modulo 2^64.
    fits = all(0 <= it < 1 << 64 for it in (rows, columns, entries))
    if not fits or core().tpde_window_sections(rows, columns, entries, ctypes.byref(made)):
        raise InvalidInput(
            f"a matrix of {rows} x {columns} words with {entries} entries has no window layout",
            found=(rows, columns, entries),
        )
    return _window(made)


def encoded_size(rows: int, columns: int, entries: int) -> int:
    """Bytes of the blob of a matrix, of which `Plan.entries` are known.

    Raises
    ------
    InvalidInput
        If there is no such blob (windows.md 8).
    """
    return sections(rows, columns, entries).nbytes


def _check_plan(code: int, error: Error, rows: int, columns: int) -> None:
    if code == native.E_SPACE:
        raise InvalidInput(
            f"a matrix of {rows} x {columns} words needs {error.found} entries, a blob has fewer",
            found=error.found,
            needed=error.needed,
        )
    check(code, error)


def choose(rows: int, columns: int, counts: Counts) -> tuple[Window, Words]:
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
    return _window(made), said


class Plan:
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

    def __init__(self, words: npt.NDArray[Any], threads: int = 1) -> None:
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
        made, error = _room(out, self.nbytes), Error()
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


def _room(out: Bytes | None, nbytes: int) -> Bytes:
    if out is None:
        return np.empty(nbytes, np.uint8)
    if out.nbytes != nbytes or not out.flags.writeable:
        raise ValueError(f"an output of {out.nbytes} bytes, {nbytes} that can be written are needed")
    return as_bytes(out)


def encode(words: npt.NDArray[Any], threads: int = 1) -> Bytes:
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
    return Plan(words, threads).encode(threads=threads)


def validate(blob: Any, threads: int = 1) -> Window:
    """Check all of a blob but its bodies, which may hold any bytes.

    Parameters
    ----------
    blob : bytes-like or ndarray
        Contiguous.
    threads : int
        How many threads check.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If it is not what windows.md says.
    """
    data, found, error = as_bytes(blob), CoreWindow(), Error()
    code = core().tpde_window_check(
        address(data), data.size, ctypes.byref(found), threads, ctypes.byref(error)
    )
    check(code, error)
    return _window(found)


def decode(
    blob: Any, first: int = 0, end: int | None = None, *, out: Words | None = None, threads: int = 1
) -> Words:
    """Decode a blob, or some of its rows.

    Parameters
    ----------
    blob : bytes-like or ndarray
        Contiguous. What is decoded of it is checked.
    first, end : int
        Which rows.
    out : ndarray of uint16, shape (end - first, columns), optional
        To write to.
    threads : int
        How many threads to use.

    Returns
    -------
    ndarray of uint16, shape (end - first, columns)
        The words: `out`, if it was given.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If what is read is not what windows.md says.
    """
    data, error = as_bytes(blob), Error()
    found = header(data)
    end = found.rows if end is None else end
    if not 0 <= first <= end <= found.rows:
        raise ValueError(f"rows {first} to {end} of {found.rows}")
    shape = (end - first, found.columns)
    if out is None:
        out = np.empty(shape, np.uint16)
    if out.shape != shape or out.dtype != np.uint16:
        raise ValueError(
            f"an output of shape {out.shape} and dtype {out.dtype}, {shape} of uint16 are needed"
        )
    made = _room(out.view(np.uint8), 2 * (end - first) * found.columns)
    code = core().tpde_window_decode(
        *(address(data), data.size, first, end - first),
        *(address(made), made.size, threads, ctypes.byref(error)),
    )
    check(code, error)
    return out


def header(blob: Any) -> Window:
    """What a blob's header says, which is checked against its size; the rest is not looked at.

    Parameters
    ----------
    blob : bytes-like or ndarray
        Contiguous.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If it is not what windows.md says.
    """
    data = as_bytes(blob)
    found, error = CoreWindow(), Error()
    check(core().tpde_window_open(address(data), data.size, ctypes.byref(found), ctypes.byref(error)), error)
    return _window(found)


def cut(
    blob: Any, rows: tuple[int, int], columns: tuple[int, int], *, out: Bytes | None = None, threads: int = 1
) -> Bytes:
    """Cut a part out of a blob, without decoding it.

    Parameters
    ----------
    blob : bytes-like or ndarray
        Contiguous.
    rows, columns : (int, int)
        Where the part begins and ends: at multiples of 16 rows and 64 columns, or at the end.
    out : ndarray of uint8, optional
        Exactly the part's bytes to write to.
    threads : int
        How many threads to use. The bytes do not depend on it.

    Returns
    -------
    ndarray of uint8
        The blob of that part of the matrix.

    Raises
    ------
    ValueError
        If it cannot be cut there.
    Truncated, Corrupt, UnsupportedVersion
        If what is read is not what windows.md says.
    """
    data, error = as_bytes(blob), Error()
    whole = header(data)
    _check_cut("rows", rows, whole.rows, ROWS_AT)
    _check_cut("columns", columns, whole.columns, COLUMNS_AT)
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    part = sections(height, width)
    head = np.empty(part.offsets_at, np.uint8)
    starts: _Starts = np.empty(part.stripes + 1, np.uint64)
    code = core().tpde_window_cut_plan(
        *(address(data), data.size, rows[0], height, columns[0], width),
        *(address(head), starts.ctypes.data, threads, ctypes.byref(error)),
    )
    check(code, error)
    made = _room(out, encoded_size(height, width, int(starts[-1])))
    code = core().tpde_window_cut(
        *(address(data), data.size, rows[0], columns[0], address(head), starts.ctypes.data),
        *(address(made), made.size, threads, ctypes.byref(error)),
    )
    check(code, error)
    return made


def _check_cut(what: str, part: tuple[int, int], size: int, unit: int) -> None:
    first, end = part
    if not 0 <= first < end <= size or first % unit or (end % unit and end != size):
        raise ValueError(
            f"{what} {first} to {end} of {size} cannot be cut out of a blob: cut at multiples of {unit}, "
            "or at the end"
        )


def cut_rows(blob: Any, first: int, end: int, threads: int = 1) -> Bytes:
    """Cut rows out of a blob: `cut` with all columns."""
    return cut(blob, (first, end), (0, header(blob).columns), threads=threads)


def cut_columns(blob: Any, first: int, end: int, threads: int = 1) -> Bytes:
    """Cut columns out of a blob: `cut` with all rows."""
    return cut(blob, (0, header(blob).rows), (first, end), threads=threads)
