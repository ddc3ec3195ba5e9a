"""Blobs in the window layout (docs/windows.md 1 to 5): what they hold, and decoding them, by the C core."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tpde.codec.native import Bytes, CoreWindow, Error, address, as_bytes, check, core
from tpde.errors import InvalidInput
from tpde.io.buffers import Buffer

ROWS_AT = 16  # windows.md 7.1: where rows can be cut
COLUMNS_AT = 64  # windows.md 7.1: where columns can be cut
FLAG_ZERO = 1  # windows.md 5.1

Words = npt.NDArray[np.uint16]


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


def from_core(it: CoreWindow) -> Window:
    """What the core says of a blob."""
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
    return from_core(made)


def encoded_size(rows: int, columns: int, entries: int) -> int:
    """Bytes of the blob of a matrix, of which `WindowPlan.entries` are known.

    Raises
    ------
    InvalidInput
        If there is no such blob (windows.md 8).
    """
    return sections(rows, columns, entries).nbytes


def room_for(out: Bytes | None, nbytes: int) -> Bytes:
    """An output of exactly so many bytes: what was given for it, or new memory."""
    if out is None:
        return np.empty(nbytes, np.uint8)
    if out.nbytes != nbytes or not out.flags.writeable:
        raise ValueError(f"an output of {out.nbytes} bytes, {nbytes} that can be written are needed")
    return as_bytes(out)


def header(blob: Buffer) -> Window:
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
    return from_core(found)


def validate(blob: Buffer, threads: int = 1) -> Window:
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
    return from_core(found)


def decode(
    blob: Buffer, first: int = 0, end: int | None = None, *, out: Words | None = None, threads: int = 1
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
    made = room_for(out.view(np.uint8), 2 * (end - first) * found.columns)
    code = core().tpde_window_decode(
        *(address(data), data.size, first, end - first),
        *(address(made), made.size, threads, ctypes.byref(error)),
    )
    check(code, error)
    return out
