"""Matrices into windows (docs/windows.md) on a GPU: launches of the kernels of `kernels/window_encode.cu`.

Nothing here allocates on the device: callers put scratch memory and the blob there, and pass addresses.
Launches go to the caller's stream and synchronize nothing. Blobs have the bytes of `tpde.codec.window_plan`.

The host reads `COUNTS_BYTES` between the two launches, and nothing after them:

    encoder = WindowEncoder(Matrix(at, rows, columns, stride), device)
    scratch = ...  # encoder.scratch_bytes zeros on the device
    encoder.plan(scratch, stream)
    counts = ...  # the first COUNTS_BYTES of the scratch memory
    chosen = encoder.choose(counts)
    ...  # chosen.said, to the scratch memory at SAID_AT
    blob = ...  # chosen.window.nbytes on the device
    encoder.encode(chosen, scratch, blob, stream)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tpde.codec import window_plan, windows
from tpde.codec.native import Bytes, as_bytes
from tpde.codec.windows import FLAG_ZERO, Window
from tpde.cuda.backend import Backend, current
from tpde.cuda.compiling import Asked, compile_all, submit

SOURCE = "window_encode.cu"
COUNTS_BYTES = 2048  # of the start of scratch memory: which XORs escapes have, for both values of the flag
SAID_AT = COUNTS_BYTES  # of scratch memory: `ChosenWindow.said`
SCRATCH_AT = 16  # what its address is a multiple of
BLOB_AT = 128  # and the blob's
_TICKET_AT = SAID_AT + 256
_STATES_AT = _TICKET_AT + 16
_THREADS, _WARPS = 256, 8
# A block adds its counts to those of all others at its end, 256 numbers at most: 15 blocks for each
# multiprocessor of an H200.
_MOST_BLOCKS = 2048
_BLOCK_WORDS = 1 << 31  # a block counts in 32 bits
# A block takes a row if a warp each left most of the device without work, or long ones after the others' end.
_FEW_ROWS, _LONG_ROW = 2048, 1 << 16


class Matrix(NamedTuple):
    """bf16 words on the device: their address, a multiple of 2, and how many words rows are apart."""

    at: int
    rows: int
    columns: int
    stride: int


class ChosenWindow(NamedTuple):
    """What is chosen for a matrix: its blob's header and sections, and what `encode` finds at `SAID_AT`."""

    window: Window
    said: Bytes


def compile_ahead(device: int) -> None:
    """Compile in another thread what a trained matrix takes: see `tpde.cuda.compiling.submit`.

    Raises
    ------
    MissingDependency, UnsupportedDevice
        If there is no driver, no such device, or it cannot run our kernels.
    """
    current().facts(device)
    submit(_compile, (), device)


def _compile(backend: Backend, device: int) -> None:
    compile_all(backend, [_planning(together=True), _encoding(zero=False)], device)


def _planning(together: bool) -> Asked:
    """The kernel that chooses windows: all of a block for a row, or a warp."""
    return Asked(SOURCE, "plan_long" if together else "plan", {})


def _encoding(zero: bool) -> Asked:
    """The kernel that writes blobs with this value of the flag."""
    return Asked(SOURCE, "encode", {"FLAG": int(zero)})


class WindowEncoder:
    """Encodes a matrix in two launches, which read it once each.

    Where the address and the stride are multiples of 16 bytes, 16 are loaded at a time.

    Parameters
    ----------
    matrix : Matrix
        Its words stay as they are from one launch to the other. Otherwise the blob is none, but nothing
        outside it is written.
    device : int
        The device's number.

    Attributes
    ----------
    scratch_bytes : int
        What both launches need beside the matrix, at a multiple of `SCRATCH_AT`. They are zeros before
        `plan`, and are used up by `encode`.

    Raises
    ------
    InvalidInput
        If the matrix has no window layout (windows.md 8).
    """

    def __init__(self, matrix: Matrix, device: int) -> None:
        window = windows.sections(matrix.rows, matrix.columns)
        if matrix.at % 2 or (matrix.stride < matrix.columns and matrix.rows > 1):
            raise ValueError(f"{matrix} is no matrix of bf16 words")
        self.matrix, self._device = matrix, device
        self._blocks = -(-window.stripes * window.stripe_chunks // _WARPS)
        self._records_at = _STATES_AT + 8 * self._blocks
        self._padded = 16 * window.stripes
        self.scratch_bytes = self._records_at + 2 * self._padded

    def _launch(self, asked: Asked, blocks: int, stream: int, *arguments: int) -> None:
        matrix = self.matrix
        given = matrix.at, matrix.stride, matrix.rows, matrix.columns, *arguments
        kernel = current().kernel(asked.source, asked.name, asked.defines, self._device)
        kernel.launch(blocks, _THREADS, 0)(stream, *given)

    def plan(self, scratch: int, stream: int) -> None:
        """Choose the windows of rows, and count their escapes (windows.md 6.1).

        Parameters
        ----------
        scratch : int
            Address of `scratch_bytes` zeros. The first `COUNTS_BYTES` become what `choose` takes.
        stream : int
            The stream's handle.
        """
        _check_address("scratch memory", scratch, SCRATCH_AT)
        rows, columns = self.matrix.rows, self.matrix.columns
        together = rows < _FEW_ROWS or columns > _LONG_ROW
        blocks = max(min(rows, _MOST_BLOCKS), -(-rows * columns // _BLOCK_WORDS))
        if not together:
            blocks = max(min(-(-rows // _WARPS), _MOST_BLOCKS), -(-rows * columns // _BLOCK_WORDS))
        self._launch(_planning(together), blocks, stream, scratch + self._records_at, scratch)

    def choose(self, counts: Any) -> ChosenWindow:
        """Choose table and flag (windows.md 6.2 to 6.4).

        Parameters
        ----------
        counts : bytes-like or ndarray
            The scratch memory's first `COUNTS_BYTES`, after `plan`.

        Raises
        ------
        InvalidInput
            If the matrix has no window layout (windows.md 8).
        """
        found = as_bytes(counts).view(np.uint64).reshape(2, 128)
        window, said = window_plan.choose(self.matrix.rows, self.matrix.columns, found)
        return ChosenWindow(window, said.view(np.uint8))

    def encode(self, chosen: ChosenWindow, scratch: int, out: int, stream: int) -> None:
        """Write the blob.

        Parameters
        ----------
        chosen : ChosenWindow
            What `choose` gave.
        scratch : int
            As `plan` left it, with `chosen.said` at `SAID_AT`.
        out : int
            Address of `chosen.window.nbytes`, a multiple of `BLOB_AT`.
        stream : int
            The stream's handle.
        """
        _check_address("scratch memory", scratch, SCRATCH_AT)
        _check_address("a blob", out, BLOB_AT)
        window = chosen.window
        zero = bool(window.flags & FLAG_ZERO)
        records = scratch + self._records_at + self._padded * zero
        before = records, scratch + SAID_AT, scratch + _TICKET_AT, scratch + _STATES_AT
        where = out, window.offsets_at, window.entries_at, window.bodies_at, window.entries
        table = np.frombuffer(window.table, "<u8").tolist()
        self._launch(_encoding(zero), self._blocks, stream, *before, *where, *table)


def _check_address(what: str, at: int, unit: int) -> None:
    if at % unit:
        raise ValueError(f"{what} at {at:#x}, which is no multiple of {unit}")
