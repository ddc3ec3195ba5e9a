"""Decoding prefix-coded blobs on a GPU: launches of the kernels of `kernels/decode.cu`.

Nothing here allocates on the device: callers put `lookup_tables` and `WorkList.descriptors` there, and pass
addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpde.codec.native import Bytes
from tpde.cuda.backend import KernelLaunch, current
from tpde.cuda.compiling import Asked
from tpde.cuda.geometry import Geometry, geometry, kernel_defines, max_warps, need, staged
from tpde.cuda.items import ALIGNMENT, DESCRIPTOR_BYTES, Item, descriptor, kind_defines

SOURCE = "decode.cu"
_ROW_WARPS = 8


class _Launch(NamedTuple):
    """A run of items that one kernel decodes."""

    defines: dict[str, int]
    begin: int
    items: int
    chunks: int
    grid: int
    geometry: Geometry


class _Ready(NamedTuple):
    """A launch with the arguments that never change."""

    start: KernelLaunch
    at: int  # of its descriptors, in bytes
    size: tuple[Any, ...]
    rooms: tuple[Any, ...]


class WorkList:
    """Blobs to decode together: one launch for each kind of kernel they need, one for a usual block.

    Parameters
    ----------
    items : sequence of Item
        In any order; outputs must not overlap.
    device : int
        The device's number.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the caller puts on the device, at a multiple of 16, for `launch`.

    Raises
    ------
    UnsupportedDevice
        If the device cannot run the kernels.
    """

    def __init__(self, items: Sequence[Item], device: int) -> None:
        self._device = device
        kinds: dict[tuple[tuple[str, int], ...], list[tuple[int, Item]]] = {}
        for number, item in enumerate(items):
            if item.blob % ALIGNMENT or item.tables_at % ALIGNMENT:
                raise ValueError(
                    f"item {number}: blob and tables must start at multiples of {ALIGNMENT} bytes"
                )
            if item.chunk_count:
                kind = tuple(kind_defines(item.header, item.tables).items())
                kinds.setdefault(kind, []).append((number, item))
        self._launches: list[_Launch] = []
        self._made: dict[bool, list[_Ready]] = {}
        # The last launches and what they were asked for: most are the same again, for each token.
        self._last: tuple[tuple[int, ...], list[Callable[[], None]]] = ((), [])
        rows: list[Bytes] = []
        for defines, numbered in kinds.items():
            self._launches.append(self._plan(dict(defines), [it for _, it in numbered], len(rows)))
            first = 0
            for number, item in numbered:
                rows.append(descriptor(item, number, first).view(np.uint8))
                first += item.chunk_count
        self.descriptors: Bytes = np.concatenate(rows) if rows else np.zeros(0, np.uint8)

    def _plan(self, defines: dict[str, int], items: Sequence[Item], begin: int) -> _Launch:
        have = current().facts(self._device)
        chunks = sum(it.chunk_count for it in items)
        grid = min(have.multiprocessors, chunks)
        chosen = geometry(need(items), have.shared_bytes, -(-chunks // grid))
        return _Launch(defines, begin, len(items), chunks, grid, chosen)

    def _ready(self, check: bool) -> list[_Ready]:
        """What `launch` needs, made at its first use."""
        found = self._made.get(check)
        if found is None:
            found = self._made[check] = [self._make(it, check) for it in self._launches]
        return found

    @staticmethod
    def _asked(it: _Launch, check: bool) -> Asked:
        return Asked(SOURCE, "decode_items", kernel_defines(it.defines, it.geometry, check))

    def _make(self, it: _Launch, check: bool) -> _Ready:
        source, name, defines, _ = self._asked(it, check)
        made = current().kernel(source, name, defines, self._device)
        block = min(32 * it.geometry.warps, defines["THREADS"])
        return _Ready(
            made.launch(it.grid, block, it.geometry.shared),
            it.begin * DESCRIPTOR_BYTES,
            (it.items, it.chunks),
            (it.geometry.room, it.geometry.table_room, it.geometry.ahead),
        )

    def asked(self) -> list[Asked]:
        """The kernels that `launch` needs."""
        return [self._asked(it, check) for it in self._launches for check in (False, True)]

    def prepare(self) -> None:
        """Compile what `launch` needs, before a capture or a measurement."""
        for check in (False, True):
            self._ready(check)

    def launch(
        self, descriptors: int, status: int, stream: int, out: int, check: bool = False, base: int = 0
    ) -> None:
        """Decode all items.

        Parameters
        ----------
        descriptors : int
            Address of `descriptors` on the device.
        status : int
            Address of four uint32 on the device. They stay as they are, or if the first was 0 become 1, the
            number of an item with a damaged chunk, and the chunk's number, lower half first. While the others
            are written, the first is 2.
        stream : int
            The stream's handle.
        out : int
            Address of the output; items go to their offsets from it.
        check : bool
            Compare checksums. Without, only bytes that cannot be decoded at all are reported.
        base : int
            What the items' blob addresses are counted from.
        """
        wanted = (descriptors, status, stream, out, check, base)
        last, launches = self._last
        if wanted != last:
            launches = [
                start.bind(stream, descriptors + at, *size, base, out, status, *rooms)
                for start, at, size, rooms in self._ready(check)
            ]
            self._last = (wanted, launches)
        for go in launches:
            go()


class Rows:
    """A matrix whose rows are decoded as asked for.

    Parameters
    ----------
    item : Item
        The matrix; its `out` is not used.
    device : int
        The device's number.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the caller puts on the device, at a multiple of 16, for `launch`.

    Raises
    ------
    ValueError
        If the blob is not a matrix of one segment.
    """

    def __init__(self, item: Item, device: int) -> None:
        header = item.header
        if len(header.spec.shape) != 2 or header.segment_words != header.words:
            raise ValueError(f"rows are of matrices, the shape is {header.spec.shape}")
        self._device, self._item = device, item
        self._row_words = header.words // header.spec.shape[0]
        row, chunk = self._row_words, header.chunk_words
        if chunk % row == 0:
            self._per_row = 1
        elif row % chunk == 0:
            self._per_row = row // chunk
        else:  # rows that start anywhere in a chunk may touch one more
            self._per_row = (row + chunk - 2) // chunk + 1
        self.descriptors: Bytes = descriptor(item, 0, 0).view(np.uint8)
        wanted, have = need([item]), current().facts(device)
        self._fit, self._most = staged(wanted, have.shared_bytes, wanted.warps), 4 * have.multiprocessors
        # A row's chunk needs neither windows nor a second buffer, and small blocks spread a few rows better.
        self._warps = min(_ROW_WARPS, self._fit.most)
        self._shared = self._fit.table_room + self._warps * self._fit.room + wanted.slack
        self._made: dict[tuple[int, bool], KernelLaunch] = {}
        self._sizes = header.spec.shape[0], self._row_words
        self._rest = self._fit.room, self._fit.table_room

    def launch(
        self, descriptors: int, status: int, stream: int, ids: int, count: int, out: int, check: bool = False
    ) -> None:
        """Decode rows `ids[0]` to `ids[count - 1]`, 64-bit integers on the device, to rows of `out`.

        Where `out` is 0, nothing is written: with `check`, all chunks that hold these rows are verified. A
        number that is not a row's ends in a trap, as in the framework's own kernel. For the other parameters
        see `WorkList.launch`.
        """
        if not count:
            return
        blocks = -(-count * self._per_row // self._warps)
        grid = min(blocks, self._most)
        start = self._made.get((grid, check)) or self._make(grid, check)
        start(stream, descriptors, *self._sizes, ids, count, self._per_row, out, status, *self._rest)

    def _make(self, grid: int, check: bool) -> KernelLaunch:
        """What launches so many blocks: kept, and of no more numbers than a device has places for blocks."""
        kind = kind_defines(self._item.header, self._item.tables)
        defines = {
            **kind,
            "WINDOW": self._fit.window,
            "PIECE": 0,
            "CHECK": int(check),
            "THREADS": 32 * max_warps(kind, check),
        }
        kernel = current().kernel(SOURCE, "decode_rows", defines, self._device)
        made = self._made[grid, check] = kernel.launch(grid, 32 * self._warps, self._shared)
        return made
