"""Blobs whose chunks stay in their file, or in host memory, and travel when they are wanted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeGuard

import numpy as np
import torch

from tpde.codec.blob import BlobReader
from tpde.errors import Corrupt, PackedWeight, Truncated, UnsupportedVersion
from tpde.format.blob_header import align
from tpde.host.feed import Feed
from tpde.io.sources import Extent
from tpde.memory.device_memory import allocate
from tpde.weights.decoder import ChunkDecoder
from tpde.weights.rows import RowReader
from tpde.weights.source import Decoder, RowsDecoder, Source, Watched

if TYPE_CHECKING:
    from tpde.cuda.items import Item, StagedChunks, Tables


def _stays(name: str, wish: str) -> PackedWeight:
    """The error for what a weight that stays in its file cannot do."""
    return PackedWeight(
        f"`{name}` is streamed to the GPU under a VRAM budget, and stays in its file",
        hint=f"load the model again without `vram=` {wish}",
        where=name,
    )


_PUTTING = threading.Lock()


class Streams(Protocol):
    """What brings chunks to a device, and decodes them there: see `tpde.streaming.streamer`."""

    def unit(self, items: Sequence[tuple[Source, int]]) -> Decoder:
        """What rebuilds sources, each at its byte offset, into a buffer."""

    def chunks(self, packed: Streamed, first: int, last: int, offset: int) -> Decoder:
        """What rebuilds chunks `first` to `last` of a source into a buffer, from byte `offset` on."""

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Raise `ReadError` if the chunks were given up; inside, nobody gives them up."""

    def watch(self, reader: Watched) -> None:
        """Raise what a reader of rows has found so far; somebody will ask it again."""


class Streamed(Source):
    """A blob in a file.

    Header, tables and index map are read and checked here, with `pread`; tables and index map are put on the
    device when they are first needed, and stay there.

    Parameters
    ----------
    extent : Extent
        Where the blob lies. The source must stay open.
    streams : Streams or None
        What brings the chunks to the device, and decodes them there; None until `bind`, where the caller
        does it, or on the CPU, which reads them.
    device : torch.device
        The device.
    feed : Feed or None
        What brings the chunks to where the device can copy from.

    Raises
    ------
    Truncated, UnsupportedVersion, Corrupt
        If header, tables or index map are not valid.

    Attributes
    ----------
    offsets : ndarray of int64
        Where in the blob each chunk starts, and where the last one ends.
    """

    lead = 1  # decodes what is resident, too
    settled = False

    def __init__(
        self, extent: Extent, streams: Streams | None, device: torch.device, feed: Feed | None
    ) -> None:
        self.name, self.version, self.extent, self._device = extent.name, 1, extent, device
        self.bind(streams, feed)
        try:
            reader = BlobReader(extent.source, extent.offset, extent.size)
        except (Corrupt, Truncated, UnsupportedVersion) as error:
            raise error.of_tensor(self.name) from error
        self.header, self.offsets = reader.header, reader.offsets
        self._section, self._host = reader.section, reader
        self.travels = self.codec.in_pieces
        self._device_index: torch.Tensor | None = None

    def bind(self, streams: Streams | None, feed: Feed | None) -> None:
        """Say what brings the chunks."""
        self._streams, self._feed = streams, feed

    @property
    def feed(self) -> Feed:
        """What brings the chunks to where the device can copy from, or read them."""
        assert self._feed is not None
        return self._feed

    @property
    def device(self) -> torch.device:
        """Where the tensor is rebuilt."""
        return self._device

    @property
    def packed_bytes(self) -> int:
        """Bytes of the blob."""
        return self.extent.size

    @property
    def blob(self) -> torch.Tensor:
        """Refuse: it stays in the file."""
        raise _stays(self.name, "to save or copy it, or to load a state dict into it")

    def check(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse to move elsewhere."""
        if fn(torch.empty(0, dtype=torch.uint8, device=self._device)).device != self._device:
            raise _stays(self.name, f"to move it from {self._device}")

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Stay, or refuse to move elsewhere."""
        self.check(fn)

    def check_load(self, other: Source) -> None:
        """Refuse other blobs."""
        raise _stays(self.name, "to load a state dict into it")

    def load(self, other: Source, *, assign: bool = False) -> None:
        """Refuse other blobs."""
        self.check_load(other)

    def stored(self) -> torch.Tensor:
        """Refuse."""
        raise _stays(self.name, "to copy, pickle or save it")

    def clone(self, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Source:
        """Refuse."""
        raise _stays(self.name, "to copy, pickle or save it")

    def require_restorable(self) -> None:
        """Refuse."""
        raise PackedWeight(
            f"`{self.name}` is streamed under a VRAM budget, which plain weights would break",
            hint="load the model without `vram=`, and unpack that",
            where=self.name,
        )

    def in_host_memory(self, streamer: object) -> bool:
        """Whether this streamer brings the chunks, and they all lie in host memory."""
        return self._streams is streamer and not self.feed.ahead

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Raise `ReadError` if the chunks were given up; inside, nobody gives them up."""
        return contextlib.nullcontext() if self._streams is None else self._streams.opened()

    def watch(self, reader: Watched) -> None:
        """Raise what a reader of rows has found so far; the streamer will ask it again."""
        assert self._streams is not None
        self._streams.watch(reader)

    def together(self, items: Sequence[tuple[Source, int]]) -> Decoder:
        """What brings all that travels, and rebuilds it with the rest."""
        assert self._streams is not None
        return self._streams.unit(items)

    def chunks(self, first: int, last: int, offset: int) -> Decoder:
        """What brings and rebuilds some chunks."""
        if self._streams is None or not self.travels:
            return ChunkDecoder(self, first, last, offset)
        return self._streams.chunks(self, first, last, offset)

    def row_reader(self) -> RowsDecoder:
        """What rebuilds rows of it, which a GPU reads over the bus."""
        return RowReader(self)

    def device_tables(self) -> tuple[Tables, torch.Tensor] | None:
        """Expanded tables, and their image on the device; None if the kernels cannot decode the blob."""
        put_on_device([self])
        return self._device_tables

    def decodable(self) -> bool:
        """Whether the kernels can decode the blob."""
        return self.travels and self.device_tables() is not None

    def span_item(self, out: int, chunks: StagedChunks | None, at: int) -> Item:
        """What the kernels take for some chunks, the blob's start being `at` bytes from a launch's base."""
        from tpde.cuda.items import Item

        tables = self.device_tables()
        assert tables is not None
        assert self._device_index is not None
        index = self._device_index.data_ptr()
        return Item(self.header, tables[0], at, tables[1].data_ptr(), out, index, chunks)

    def item(self, offset: int, chunks: StagedChunks | None = None) -> Item | None:
        """What the kernels take to read the blob over the bus, where it lies; None if they cannot."""
        from tpde.cuda.items import ALIGNMENT

        if not self.decodable():
            return None
        at = self.feed.device_address(self.extent)
        return None if at is None or at % ALIGNMENT else self.span_item(offset, chunks, at)


def travelling(source: Source) -> TypeGuard[Streamed]:
    """Whether a source has chunks that are brought to the device each time; only those in files have."""
    return source.travels


def put_on_device(tensors: Iterable[Streamed]) -> None:
    """Put tables and index maps there, unless they are: one copy for all of these tensors, of one device.

    Each copy is a call of the driver that takes 0.1 ms, or 0.5 ms while pages are locked. One thread does it
    at a time: what another has put there must not be replaced, and freed, while a launch knows its address.
    """
    from tpde.cuda.items import ALIGNMENT, lookup_tables

    with _PUTTING:
        new: list[tuple[Streamed, Tables]] = []
        rows: list[np.ndarray] = []
        for it in tensors:
            tables = lookup_tables(it.header, it._section) if it._device_tables is None else None
            if tables is not None:
                new.append((it, tables))
                rows += [tables.image, it.host_reader().index]
        if not new:
            return
        starts = list(accumulate((align(row.size, ALIGNMENT) for row in rows), initial=0))
        whole = np.zeros(starts.pop(), np.uint8)
        for at, row in zip(starts, rows, strict=True):
            whole[at : at + row.size] = row
        there = allocate(max(whole.size, 16), new[0][0].device, "the room for tables and index maps")
        there[: whole.size].copy_(torch.from_numpy(whole))
        pieces = (there[at : at + row.size] for at, row in zip(starts, rows, strict=True))
        for it, tables in new:
            it._device_tables, it._device_index = (tables, next(pieces)), next(pieces)
