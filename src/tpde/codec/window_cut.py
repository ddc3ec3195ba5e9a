"""Cutting parts out of blobs in the window layout (docs/windows.md 7), by the C core."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from tpde.codec.native import Bytes, Error, address, as_bytes, check, core
from tpde.codec.windows import COLUMNS_AT, ROWS_AT, encoded_size, header, room_for, sections
from tpde.io.buffers import Buffer

_Starts = npt.NDArray[np.uint64]


def cut(
    blob: Buffer,
    rows: tuple[int, int],
    columns: tuple[int, int],
    *,
    out: Bytes | None = None,
    threads: int = 1,
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
    made = room_for(out, encoded_size(height, width, int(starts[-1])))
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


def cut_rows(blob: Buffer, first: int, end: int, threads: int = 1) -> Bytes:
    """Cut rows out of a blob: `cut` with all columns."""
    return cut(blob, (first, end), (0, header(blob).columns), threads=threads)


def cut_columns(blob: Buffer, first: int, end: int, threads: int = 1) -> Bytes:
    """Cut columns out of a blob: `cut` with all rows."""
    return cut(blob, (0, header(blob).rows), (first, end), threads=threads)
