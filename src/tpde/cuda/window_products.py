"""Matrices in the window layout on a GPU: launches of the kernels of `kernels/window*.cu` (docs/windows.md).

Nothing here allocates on the device: callers put blobs there that `tpde.codec.windows.validate` has checked,
and pass addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

import functools

import numpy as np

from tpde.codec.windows import ROWS_AT, Window, sections
from tpde.cuda import window_encode
from tpde.cuda.backend import Backend, KernelLaunch, current
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.compiling import Asked, compile_all, submit
from tpde.cuda.many_rows import FEW, many_way
from tpde.cuda.many_rows import SOURCE as MANY
from tpde.cuda.product_ways import (
    MOST_ROWS,
    SOURCE,
    WARP_BYTES,
    WARPS,
    Product,
    blocks_at_once,
    matrix_defines,
    multiplies_in_groups,
)
from tpde.cuda.window_launches import NO_STEPS, ProductSteps, launch_of, steps_by, steps_of, tuned_ways
from tpde.errors import UnsupportedDevice

X_AT, _ROOM_AT = 16, 16  # what addresses of rows of x are multiples of, and of room
_DECODING = "rows", "lookup"  # kernels
_KEPT = FEW  # rows of x, for which launches are kept: these are few numbers, and come again for each token


class DeviceWindow:
    """A blob in the window layout on a device.

    Parameters
    ----------
    window : Window
        What `tpde.codec.windows.validate` says of it: kernels trust its offsets and entries.
    at : int
        Its address, a multiple of 128. The caller keeps it.
    device : int
        The device's number.

    Raises
    ------
    MissingDependency, UnsupportedDevice, CompileError
        If the kernels cannot run.
    """

    def __init__(self, window: Window, at: int, device: int) -> None:
        if at % 128:
            raise ValueError(f"a blob at {at:#x}, which is no multiple of 128")
        self.window, self._device, self._facts = window, device, current().facts(device)
        places = window.records_at, window.offsets_at, window.entries_at, window.bodies_at
        tables = np.frombuffer(window.table, "<u8").tolist()
        self._matrix = (*(at + it for it in places), *tables, window.rows, window.columns)
        self._decodings: dict[tuple[str, int], KernelLaunch] = {}  # by kernels and blocks
        self._products: dict[int, ProductSteps] = {}  # by how many rows x has
        self._latest = 0, NO_STEPS  # of more rows than are kept there

    def prepare(self) -> None:
        """Compile and load the kernels, for the errors that there may be, and for CUDA graphs.

        Raises
        ------
        MissingDependency, UnsupportedDevice, CompileError
            If the kernels cannot run.
        """
        window = self.window
        _compile(current(), window.rows, window.columns, window.flags, self._device)
        for name in _DECODING:
            self._decoding(name, window.stripes * window.stripe_chunks)
        for count in range(1, MOST_ROWS + 1):
            self._steps(count)
        for how in _of_many_rows(self._facts, window):
            launch_of(current(), window, how, self._device)

    def _decoding(self, name: str, chunks: int) -> KernelLaunch:
        """A kernel that takes so many chunks; launches are made once."""
        shared = WARPS * WARP_BYTES
        beside = blocks_at_once(shared, self._facts.shared_bytes)
        grid = min(beside * self._facts.multiprocessors, -(-chunks // WARPS))
        made = self._decodings.get((name, grid))
        if made is None:
            kernel = current().kernel(SOURCE, name, _decoding_defines(self.window), self._device)
            made = self._decodings[name, grid] = kernel.launch(grid, 32 * WARPS, shared)
        return made

    def rows(self, out: int, stride: int, stream: int, first: int = 0, end: int | None = None) -> None:
        """Decode to rows.

        Parameters
        ----------
        out, stride : int
            Address of room for them, and how many words they are apart. Stores are of 16 bytes where both are
            multiples of that.
        stream : int
            The stream's handle.
        first, end : int
            Which stripes of 16 rows; by default all.
        """
        matrix, end = self._matrix, self.window.stripes if end is None else end
        if first or end < self.window.stripes:
            matrix = self._stripes(first, end)
        wide = out % 16 == 0 and stride % 8 == 0
        launch = self._decoding("rows", (end - first) * self.window.stripe_chunks)
        launch(stream, *matrix, out, stride, wide)

    def _stripes(self, first: int, end: int) -> tuple[int, ...]:
        """What kernels are given of some stripes: as of a matrix that has no others."""
        window = self.window
        records, offsets, entries, bodies, low, high, _, columns = self._matrix
        return (
            records + ROWS_AT * first,
            offsets + 4 * first * window.stripe_chunks,
            entries,
            bodies + first * window.stripe_bytes,
            low,
            high,
            min(ROWS_AT * end, window.rows) - ROWS_AT * first,
            columns,
        )

    def lookup(self, ids: int, count: int, out: int, stream: int) -> None:
        """Decode some rows.

        Parameters
        ----------
        ids : int
            Address of their numbers, integers of 64 bits. One that is no row's ends in a trap.
        count : int
            How many, at least 1.
        out : int
            Address of room for them, one after the other.
        stream : int
            The stream's handle.
        """
        launch = self._decoding("lookup", count * self.window.stripe_chunks)
        launch(stream, *self._matrix, ids, count, out)

    def takes(self, count: int) -> bool:
        """Whether so many rows of x are to be multiplied straight from the blob: more where it is faster."""
        return count <= MOST_ROWS or self._steps(count) is not NO_STEPS

    def room(self, count: int) -> int:
        """Bytes on the device that a `product` with so many rows of x takes meanwhile."""
        return self._steps(count).room

    def _steps(self, count: int) -> ProductSteps:
        found = self._products.get(count)
        if found is None:
            last, found = self._latest
            if last == count:
                return found
            found = steps_of(current(), self.window, count, self._device)
            if count <= _KEPT:
                self._products[count] = found
            else:
                self._latest = count, found
        return found

    def product(
        self, x: int, x_stride: int, count: int, y: int, y_stride: int, bias: int, stream: int, room: int = 0
    ) -> None:
        """Multiply: `y = x W^T + bias` (windows.md 9).

        Parameters
        ----------
        x, x_stride : int
            Address of rows of as many words as the matrix has columns, and zeros to a multiple of 8; and how
            many words they are apart. Each lies at a multiple of `X_AT` bytes.
        count : int
            How many rows x has, as many as `takes` says. More than 8 may take several launches.
        y, y_stride : int
            Address of room for as many rows, and how many words they are apart.
        bias : int
            Address of a bf16 word for each of the matrix's rows, or 0.
        stream : int
            The stream's handle. On a device of compute capability 9.0 or more the kernel may start while the
            one before it in the stream ends: it waits before it reads x and writes y, not before it reads
            the matrix, which the caller must not write there.
        room : int
            Address of as many bytes as `self.room` gives, a multiple of 16; what follows in the stream may
            use them.

        Raises
        ------
        ValueError
            If x or the room does not lie as it must, or a matrix is decoded for so many rows.
        """
        if x % X_AT or x_stride * 2 % X_AT:
            raise ValueError(f"x at {x:#x}, rows {x_stride} words apart: no multiples of {X_AT} bytes")
        steps = self._steps(count).launches
        if not steps:
            raise ValueError(f"for {count} rows of x a matrix is decoded")
        for first, rows, (_, launch, arrange, needed) in steps:
            if needed and (not room or room % _ROOM_AT):
                raise ValueError(
                    f"{count} rows of x take {needed} bytes of room at a multiple of {_ROOM_AT}, not at "
                    f"{room:#x}"
                )
            if arrange is None:
                of_x: tuple[int, ...] = (x + 2 * first * x_stride, x_stride, rows)
            else:
                arrange(stream, x + 2 * first * x_stride, x_stride, rows, self.window.columns, room)
                of_x = room, rows
            launch(stream, *self._matrix, *of_x, y + 2 * first * y_stride, y_stride, bias)

    def ways(self, count: int) -> list[Product]:
        """How a product with so many rows of x may be launched on the device, as it is by default first."""
        return tuned_ways(current(), self.window, count, self._device)

    def choose(self, count: int, how: Product) -> None:
        """Launch products with so many rows of x in one of the `ways`, from now on.

        Raises
        ------
        UnsupportedDevice
            If the device, a part of one for example, has no room for it.
        ValueError
            If it is made for another number of rows, and cannot be launched again and again.
        """
        if how.source == MANY and count != how.rows:
            raise ValueError(f"{how.name} is for exactly {how.rows} rows of x, not {count}")
        made = launch_of(current(), self.window, how, self._device)
        if made is None:
            raise UnsupportedDevice(f"device {self._device} has no room for a cluster of {how.name}")
        self._products[count] = steps_by(made, count)


def compile_ahead(rows: int, columns: int, device: int) -> None:
    """Compile what a trained matrix takes, with `ZERO` clear: see `window_encode.compile_ahead`."""
    window_encode.compile_ahead(device)
    submit(_compile, (rows, columns, 0), device)


def _decoding_defines(window: Window) -> dict[str, int]:
    return matrix_defines(window) | {"NB": 8, "SHARED": 0, "BLOCKS": 2}


def _of_many_rows(have: DeviceFacts, window: Window) -> list[Product]:
    """Ways with all kernels for more than `MOST_ROWS` rows of x, first what takes longest to compile."""
    if not multiplies_in_groups(have, window):
        return []
    return [many_way(have, window, count) for count in (FEW + 1, FEW)]


@functools.cache
def _compile(backend: Backend, rows: int, columns: int, flags: int, device: int) -> None:
    """Have all kernels for matrices of a shape."""
    window = sections(rows, columns)._replace(flags=flags)
    # Those that take longest, 1.3 s, come first.
    firsts = _of_many_rows(backend.facts(device), window)
    firsts += [tuned_ways(backend, window, count, device)[0] for count in range(1, MOST_ROWS + 1)]
    products = {it.label: it for it in firsts}.values()
    asked = [Asked(it.source, it.name, it.defines, it.own) for it in products]
    asked += [Asked(SOURCE, name, _decoding_defines(window)) for name in _DECODING]
    compile_all(backend, asked, device)
