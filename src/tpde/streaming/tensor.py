"""A packed tensor whose chunks stay in its file, or in host memory, and travel when they are wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tpde.codec.blob import BlobReader
from tpde.errors import Corrupt, PackedWeight, Truncated, UnsupportedVersion
from tpde.format.blob import align
from tpde.format.constants import CODEC_CONSTANT
from tpde.format.source import Extent
from tpde.materialize import PackedTensor, Streams, named
from tpde.memory import allocate

_ADVICE = (
    "is streamed to the GPU under a VRAM budget, and stays in its file; load the model again without `vram=`"
)


_PUTTING = threading.Lock()


class Absent(torch.Tensor):
    """Stands for a blob that is in a file: has a size, and refuses what needs its bytes.

    So state dicts can be looked at, but not saved or moved, by whatever library.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what needs no bytes."""
        if func in _NEEDS_BYTES:
            raise PackedWeight(
                f"a weight {_ADVICE} to save, copy or move it, or to put accelerate's hooks on it"
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


_NEEDS_BYTES = {
    torch.Tensor.to,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.clone,
    torch.Tensor.copy_,
    torch.Tensor.data_ptr,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
}


class StreamedTensor(PackedTensor):
    """A blob in a file.

    Header, tables and index map are read and checked here, with `pread`; tables and index map are put on the
    device when they are first needed, and stay there.

    Parameters
    ----------
    extent : Extent
        Where the blob lies. The source must stay open.
    streams : Streams or None
        What brings the chunks to the device, and decodes them there; None until `bind`, or where the caller
        does it.
    device : torch.device
        The device.
    supply : Supply or None
        What brings the chunks to where the device can copy from.

    Raises
    ------
    Truncated, UnsupportedVersion, Corrupt
        If header, tables or index map are not valid.

    Attributes
    ----------
    blob : torch.Tensor
        On the `meta` device, as large as the blob.
    offsets : ndarray of int64
        Where in the blob each chunk starts, and where the last one ends.
    """

    def __init__(self, extent: Extent, streams: Streams | None, device: torch.device, supply: Any) -> None:
        self.name, self.version, self.extent, self._device = extent.name, 0, extent, device
        self.bind(streams, supply)
        try:
            reader = BlobReader(extent.source, extent.offset, extent.size)
        except (Corrupt, Truncated, UnsupportedVersion) as error:
            raise named(error, self.name) from error
        self.header, self.offsets = reader.header, reader.offsets
        self._section = reader.section
        self._device_index: torch.Tensor | None = None
        self._place(torch.empty(extent.size, dtype=torch.uint8, device="meta").as_subclass(Absent), reader)

    def bind(self, streams: Streams | None, supply: Any) -> None:
        """Say what brings the chunks."""
        self.streams, self.supply = streams, supply

    @property
    def device(self) -> torch.device:
        """Where the tensor is rebuilt."""
        return self._device

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse to move elsewhere."""
        if fn(torch.empty(0, dtype=torch.uint8, device=self._device)).device != self._device:
            raise PackedWeight(f"`{self.name}` {_ADVICE} to move it from {self._device}")

    def load(self, blob: torch.Tensor, *, assign: bool = False) -> None:
        """Refuse other blobs."""
        raise PackedWeight(f"`{self.name}` {_ADVICE} to load a state dict into it")

    def __getstate__(self) -> dict[str, Any]:
        raise PackedWeight(f"`{self.name}` {_ADVICE} to copy, pickle or save it")

    def device_tables(self) -> tuple[Any, torch.Tensor] | None:
        """Expanded tables, and their image on the device; None if the kernels cannot decode the blob."""
        put_on_device([self])
        return self._device_tables

    def decodable(self) -> bool:
        """Whether the kernels can decode the blob."""
        return self.header.codec != CODEC_CONSTANT and self.device_tables() is not None

    def span_item(self, out: int, chunks: Any, at: int) -> Any:
        """What the kernels take for some chunks, the blob's start being `at` bytes from a launch's base."""
        from tpde.cuda.items import Item

        tables = self.device_tables()
        assert tables is not None
        assert self._device_index is not None
        index = self._device_index.data_ptr()
        return Item(self.header, tables[0], at, tables[1].data_ptr(), out, index, chunks)

    def item(self, offset: int, chunks: Any = None) -> Any:
        """What the kernels take to read the blob over the bus, where it lies; None if they cannot."""
        from tpde.cuda.items import ALIGNMENT

        if not self.decodable():
            return None
        at = self.supply.device_address(self.extent)
        return None if at is None or at % ALIGNMENT else self.span_item(offset, chunks, at)


def put_on_device(tensors: Iterable[StreamedTensor]) -> None:
    """Put tables and index maps there, unless they are: one copy for all of these tensors, of one device.

    Each copy is a call of the driver that takes 0.1 ms, or 0.5 ms while pages are locked. One thread does it
    at a time: what another has put there must not be replaced, and freed, while a launch knows its address.
    """
    from tpde.cuda.items import ALIGNMENT, lookup_tables

    with _PUTTING:
        new: list[tuple[StreamedTensor, Any]] = []
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
