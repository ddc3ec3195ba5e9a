"""Matrices in the window layout on a GPU: launches of the kernels of `kernels/window*.cu` (docs/windows.md).

Nothing here allocates on the device: callers put blobs there that `tpde.codec.windows.validate` has checked,
and pass addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from tpde.codec.windows import FLAG_ZERO, ROWS_AT, Window, sections
from tpde.cuda.backend import Backend, Kernel, KernelLaunch, current
from tpde.cuda.tuning import Kernels, table_of
from tpde.errors import UnsupportedDevice

SOURCE, GROUP_SOURCE = "window.cu", "window_group.cu"
MOST_ROWS = 64  # of x in one call: with more, decoding and the matrix library's product are faster
KERNELS = Kernels((SOURCE, GROUP_SOURCE), MOST_ROWS)  # that tables of the fastest ways are of
_FEW_ROWS = 16  # of x in one launch of `product`
X_AT = 16  # what addresses of rows of x are multiples of
WARPS = 8  # of a block
PARTS = 8  # sums of a row, windows.md 9.2
WARP_BYTES = 4096 + 5632  # of shared memory: a plane of escapes, and a chunk
_TURNS = 2  # of partial sums, which are written while those before are read
# Rows of x of more bytes are first not copied to shared memory, but read from the cache: measured on an H200,
# where one row of 4,096 columns gained 0.3 to 7 % by the copy, and one of 14,336 lost 3 %.
_SHARED_X = 16 << 10
# Of `group_product`: warps that multiply, by how many rows x has, the fastest first on an H200; for x that
# does not stay in shared memory, how many stripes a warp takes beside each other, how many chunks of x are
# there at a time, and how many turns' partial sums; what else a block has; and the compute capability that it
# is made for.
_GROUPS = {16: (12, 8), 32: (12, 8), 64: (8,)}
_STREAMS = {16: ((1, 4, 2),), 32: ((1, 4, 2),), 64: ((2, 2, 2),)}
_CLUSTER, _OTHER_WARPS = 8, 4
_WGMMA = (9, 0)
_OF_MATRIX = ("ZERO", "TAIL")  # macros


class Product(NamedTuple):
    """How a product is launched.

    Attributes
    ----------
    rows : int
        Of x, at most.
    source, name : str
        Of the kernel.
    defines : dict of str to int
        Macros.
    shared : int
        Bytes of shared memory.
    warps : int
        Of a block, that multiply.
    blocks : int
        Of a multiprocessor.
    """

    rows: int
    source: str
    name: str
    defines: dict[str, int]
    shared: int
    warps: int = WARPS
    blocks: int = 1

    @property
    def grouped(self) -> bool:
        """Whether it is one of `group_product`."""
        return self.source == GROUP_SOURCE

    @property
    def width(self) -> int:
        """Rows of x that a warp multiplies at a time, be they there or not."""
        return self.defines["NB"]

    @property
    def label(self) -> str:
        """What tables name it by: the kernel and its macros, but those that are the matrix's."""
        own = [f"{key}={value}" for key, value in self.defines.items() if key not in _OF_MATRIX]
        return " ".join([self.name, *own])


def products_of(window: Window, count: int, shared_bytes: int, groups: bool) -> list[Product]:
    """How a product with `count` rows of x may be launched, the fastest first. Results do not depend on it.

    Parameters
    ----------
    window : Window
        The matrix.
    count : int
        Rows of x. Some ways take fewer at a time.
    shared_bytes : int
        What a block may have at most.
    groups : bool
        Whether groups of warps can multiply: the device has `wgmma`.

    Raises
    ------
    ValueError
        If it is not 1 to `MOST_ROWS`.
    """
    if not 1 <= count <= MOST_ROWS:
        raise ValueError(f"{count} rows of x, 1 to {MOST_ROWS} are taken at a time")
    made: list[Product] = []
    if count > 8 and groups and window.stripe_chunks >= PARTS:
        first = next(rows for rows in _GROUPS if rows >= count)
        for rows in (it for it in reversed(_GROUPS) if it <= first):  # at least, in several launches
            made += [it for warps in _GROUPS[rows] for it in _grouped(window, rows, warps, shared_bytes)]
    return made + _narrow(window, min(count, _FEW_ROWS), shared_bytes)


def _narrow(window: Window, count: int, shared_bytes: int) -> list[Product]:
    """A block by itself takes all parts, and reads x from the cache, or copies all of it."""
    tiles = -(-count // 8)
    x_bytes = 2 * (-(-window.columns // 8) * 8) + 64  # lanes that read rows beside each other meet no bank
    least, copied = WARPS * (WARP_BYTES + _TURNS * tiles * 16 * 8 * 4), count * x_bytes
    blocks = 2 if tiles == 1 else 1

    def made(shared: bool) -> Product:
        defines = _defines(window) | {"NB": 8 * tiles, "SHARED": int(shared), "BLOCKS": blocks}
        rows = count if shared else 8 * tiles
        return Product(rows, SOURCE, "product", defines, least + shared * copied, blocks=blocks)

    fits = (True, False) if copied <= _SHARED_X else (False, True)
    return [made(shared) for shared in fits if least + shared * copied <= shared_bytes]


def _grouped(window: Window, rows: int, warps: int, shared_bytes: int) -> list[Product]:
    """The blocks of a cluster share x, and the groups of warps of a block.

    With room for two turns' partial sums no warp waits for those of the turn before. Where 64 rows of x do
    not stay in shared memory, copying them takes longer than multiplying: warps that take two stripes copy x
    once for both. On an H200 that took 259 us instead of 300 with 57344 x 8192 words; where x stays, one
    stripe is faster by 3 to 10 %.
    """
    own = -(-window.stripe_chunks // PARTS)  # chunks of a part, at most
    streams = [_stages(window, rows, warps, *it, True) for it in _STREAMS[rows] if it[1] < own]
    stays = [_stages(window, rows, warps, 1, own, inboxes, False) for inboxes in (2, 1)]
    fit = [[it for it in ways if it.shared <= shared_bytes] for ways in (stays, streams)]
    return fit[0][:1] + fit[1]


def _stages(
    window: Window, rows: int, warps: int, each: int, stages: int, inboxes: int, streams: bool
) -> Product:
    """With room for so many chunks of x, and so many turns' partial sums."""
    barriers = 8 * (2 * inboxes + warps + 2 * stages)
    shared = stages * rows * 512 + inboxes * warps * rows * 64 + warps * WARP_BYTES + barriers
    room = {"EACH": each, "STAGES": stages, "STREAMS": int(streams), "INBOXES": inboxes}
    defines = _defines(window) | {"NB": rows, "WIDE": warps} | room
    return Product(rows, GROUP_SOURCE, "group_product", defines, shared, warps)


def _defines(window: Window) -> dict[str, int]:
    return {"ZERO": int(bool(window.flags & FLAG_ZERO)), "TAIL": int(window.columns % 256 != 0)}


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
        tables = np.frombuffer(window.table, "<u8")
        self._matrix = (
            *(np.uint64(at + it) for it in places),
            *(np.uint64(it) for it in tables),
            np.uint32(window.rows),
            np.uint32(window.columns),
        )
        self._products: dict[int, tuple[int, KernelLaunch]] = {}  # by how many rows x has: those of a launch

    def prepare(self) -> None:
        """Compile and load the kernels, for the errors that there may be, and for CUDA graphs.

        Raises
        ------
        MissingDependency, UnsupportedDevice, CompileError
            If the kernels cannot run.
        """
        _ = self._rows, self._lookup
        for count in range(1, MOST_ROWS + 1):
            self._product(count)

    def _decoding(self, name: str) -> Kernel:
        made = _defines(self.window) | {"NB": 8, "SHARED": 0, "BLOCKS": 2}
        return current().kernel(SOURCE, name, made, self._device)

    @functools.cached_property
    def _rows(self) -> Kernel:
        return self._decoding("rows")

    @functools.cached_property
    def _lookup(self) -> Kernel:
        return self._decoding("lookup")

    def _spread(self, kernel: Kernel, chunks: int) -> KernelLaunch:
        grid = min(2 * self._facts.multiprocessors, -(-chunks // WARPS))
        return kernel.launch(grid, 32 * WARPS, WARPS * WARP_BYTES)

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
        window = self.window
        end = window.stripes if end is None else end
        chunks = (end - first) * window.stripe_chunks
        records, offsets, entries, bodies, *tables, _, columns = self._matrix
        places = (
            records + ROWS_AT * first,
            offsets + 4 * first * window.stripe_chunks,
            entries,
            bodies + first * window.stripe_bytes,
        )
        count = min(ROWS_AT * end, window.rows) - ROWS_AT * first
        wide = np.uint32(out % 16 == 0 and stride % 8 == 0)
        arguments = np.uint64(out), np.uint64(stride), wide
        launch = self._spread(self._rows, chunks)
        launch(stream, *map(np.uint64, places), *tables, np.uint32(count), columns, *arguments)

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
        launch = self._spread(self._lookup, count * self.window.stripe_chunks)
        arguments = np.uint64(ids), np.uint64(count), np.uint64(out)
        launch(stream, *self._matrix, *arguments)

    def product(
        self, x: int, x_stride: int, count: int, y: int, y_stride: int, bias: int, stream: int
    ) -> None:
        """Multiply: `y = x W^T + bias` (windows.md 9).

        Parameters
        ----------
        x, x_stride : int
            Address of rows of as many words as the matrix has columns, and zeros to a multiple of 8; and how
            many words they are apart. Each lies at a multiple of `X_AT` bytes.
        count : int
            How many rows x has, at most `MOST_ROWS`. More than 8 may take several launches.
        y, y_stride : int
            Address of room for as many rows, and how many words they are apart.
        bias : int
            Address of a bf16 word for each of the matrix's rows, or 0.
        stream : int
            The stream's handle. On a device of compute capability 9.0 or more the kernel may start while the
            one before it in the stream ends: it waits before it reads x and writes y, not before it reads
            the matrix, which the caller must not write there.

        Raises
        ------
        ValueError
            If x does not lie as it must, or has other rows.
        """
        if x % X_AT or x_stride * 2 % X_AT:
            raise ValueError(f"x at {x:#x}, rows {x_stride} words apart: no multiples of {X_AT} bytes")
        rows, launch = self._products.get(count) or self._product(count)
        for first in range(0, count, rows):
            launch(
                stream,
                *self._matrix,
                *(
                    np.uint64(x + 2 * first * x_stride),
                    np.uint64(x_stride),
                    np.uint32(min(count - first, rows)),
                ),
                *(np.uint64(y + 2 * first * y_stride), np.uint64(y_stride), np.uint64(bias)),
            )

    def ways(self, count: int) -> list[Product]:
        """How a product with so many rows of x may be launched on the device, as it is by default first."""
        return _tuned(current(), self.window, count, self._device)

    def choose(self, count: int, how: Product) -> None:
        """Launch products with so many rows of x in one of the `ways`, from now on.

        Raises
        ------
        UnsupportedDevice
            If the device, a part of one for example, has no room for it.
        """
        made = _launch(current(), self.window, how, self._device)
        if made is None:
            raise UnsupportedDevice(f"device {self._device} has no room for a cluster of {how.name}")
        self._products[count] = how.rows, made

    def _product(self, count: int) -> tuple[int, KernelLaunch]:
        window = self.window
        made = _launch_of(current(), window.rows, window.columns, window.flags, count, self._device)
        self._products[count] = made
        return made


def ways_of(backend: Backend, window: Window, count: int, device: int) -> list[Product]:
    """How a product may be launched on a device, as it is without a table first: see `products_of`."""
    have = backend.facts(device)
    return products_of(window, count, have.shared_bytes, have.capability == _WGMMA)


def _tuned(backend: Backend, window: Window, count: int, device: int) -> list[Product]:
    """The same, first the one that the device's table names, if there is a table."""
    table = table_of(backend.facts(device), KERNELS)
    shape = window.rows, window.columns
    return table.ordered(shape, count, lambda it: ways_of(backend, window, it, device))


@functools.cache
def _launch_of(
    backend: Backend, rows: int, columns: int, flags: int, count: int, device: int
) -> tuple[int, KernelLaunch]:
    """How many rows of x a launch takes by default, and the launch, for all matrices of a shape."""
    window = sections(rows, columns)._replace(flags=flags)
    made = (
        (how.rows, _launch(backend, window, how, device)) for how in _tuned(backend, window, count, device)
    )
    return next((most, launch) for most, launch in made if launch is not None)


def _launch(backend: Backend, window: Window, how: Product, device: int) -> KernelLaunch | None:
    """The launch; None if the device never runs eight blocks of it at a time, as a part of one may not."""
    kernel = backend.kernel(how.source, how.name, how.defines, device, own=how.grouped)
    have, stripes = backend.facts(device), window.stripes
    early = have.capability >= (9, 0)  # kernels start while those before them end
    if how.grouped:
        threads = 32 * (how.warps + _OTHER_WARPS)
        most = kernel.clusters_at_once(_CLUSTER, threads, how.shared)
        grid = _CLUSTER * min(most, -(-stripes // how.warps))
        if not grid:
            return None
        return kernel.launch(grid, threads, how.shared, cluster=_CLUSTER, early=early)
    beside = WARPS // min(window.stripe_chunks, PARTS)  # stripes that a block takes at a time
    grid = min(how.blocks * have.multiprocessors, -(-stripes // beside))
    return kernel.launch(grid, 32 * how.warps, how.shared, early=early)
