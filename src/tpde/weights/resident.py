"""Blobs that are on the device on which they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tpde.codec.blob import BlobReader
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput, PackedWeight, Truncated, UnsupportedVersion
from tpde.format.blob_header import MAX_FIXED_BYTES, parse_blob_header
from tpde.io.sources import BytesSource
from tpde.weights.decoder import ChunkDecoder, Materializer
from tpde.weights.rows import RowReader
from tpde.weights.source import Decoder, RowsDecoder, Source

if TYPE_CHECKING:
    from tpde.cuda.items import Item, StagedChunks

# Of a blob: header, tables and index map of up to 8e7 words of bf16, or there is a second copy.
_START_BYTES = 128 << 10
ALIGN = 16  # of blobs: chunks start at multiples of it in them, and kernels read words of it


class Resident(Source):
    """A blob in a tensor.

    Parameters
    ----------
    blob : torch.Tensor
        One-dimensional, uint8, contiguous, on a CPU or CUDA device. It is copied if its address is not
        divisible by 16, as the kernels take it to be.
    name : str
        What errors call it.

    Raises
    ------
    InvalidInput
        If `blob` is not such a tensor.
    Truncated, UnsupportedVersion, Corrupt
        If header, tables or index map are not valid. They are checked here, on the host; chunks are when they
        are decoded.
    """

    def __init__(self, blob: torch.Tensor, name: str) -> None:
        self.name, self.version = name, 0
        self._open(blob)

    def _open(self, blob: torch.Tensor) -> None:
        if blob.dtype is not torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
            raise InvalidInput(
                f"`{self.name}`: a blob is one-dimensional, contiguous and uint8, this is {blob.dtype} of "
                f"shape {list(blob.shape)}"
            )
        if blob.device.type == "meta":
            raise InvalidInput(
                f"`{self.name}`: the blob is on the `meta` device and has no data", hint="load it first"
            )
        blob = _aligned(blob)
        start = blob[:_START_BYTES].cpu().numpy()
        try:
            header = parse_blob_header(start[:MAX_FIXED_BYTES].tobytes(), blob.numel())
            if header.chunks_at > start.size:
                start = blob[: header.chunks_at].cpu().numpy()
            if blob.device.type == "cpu":
                reader = BlobReader(BytesSource(blob.numpy(), self.name), 0, blob.numel())
            else:  # checks header, tables and index map; chunks stay on the device
                reader = BlobReader(_Start(start, self.name, blob.numel()), 0, blob.numel())
        except (Corrupt, Truncated, UnsupportedVersion) as error:
            raise error.of_tensor(self.name) from error
        self.header = header
        self._section = reader.section
        self._place(blob, reader if blob.device.type == "cpu" else None)

    def _place(self, blob: torch.Tensor, reader: BlobReader | None) -> None:
        self._blob, self._host, self._address = blob, reader, blob.data_ptr()
        self._device_tables = None
        self.version += 1

    @property
    def device(self) -> torch.device:
        """Where the blob is."""
        return self._blob.device

    @property
    def blob(self) -> torch.Tensor:
        """The blob now."""
        return self._blob

    @property
    def packed_bytes(self) -> int:
        """Bytes of the blob."""
        return self._blob.numel()

    def check(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse functions that give other bytes, as `torch.empty_like` does: see `Source.check`."""
        require_bytes_kept(self.name, self._blob, fn)

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the same blob where a function moves it: see `Source.apply`."""
        self.check(fn)
        blob = fn(self._blob)
        if blob is self._blob and blob.data_ptr() == self._address:
            return
        if blob.device.type == "cpu":
            self._open(blob)
        else:
            self._place(_aligned(blob), None)

    def check_load(self, other: Source) -> None:
        """Refuse what is no blob like this one: see `Source.check_load`."""
        check_load(self, other)

    def load(self, other: Source, *, assign: bool = False) -> None:
        """Take another blob: see `Source.load`."""
        self.check_load(other)
        blob = other.blob
        if blob is self._blob:
            return
        if assign:
            if blob is not other.memory:  # but packed for this, on the host
                blob = blob.to(other.device)
        else:
            if blob.numel() == self._blob.numel() and torch.equal(blob.to(self._blob.device), self._blob):
                return  # a tied weight, the second time
            blob = blob.to(self._blob.device, copy=True)
        self._open(blob)

    def stored(self) -> torch.Tensor:
        """The blob, without the rest of a larger tensor that it may be a piece of."""
        blob = self._blob
        return blob.clone() if blob.untyped_storage().nbytes() > blob.numel() else blob

    def clone(self, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Resident:
        """The same in memory of its own: see `Source.clone`."""
        return Resident(copy(self._blob), self.name)

    def together(self, items: Sequence[tuple[Source, int]]) -> Decoder:
        """What rebuilds resident sources with one launch."""
        return Materializer(items, self.device)

    def chunks(self, first: int, last: int, offset: int) -> Decoder:
        """What rebuilds some chunks."""
        return ChunkDecoder(self, first, last, offset)

    def row_reader(self) -> RowsDecoder:
        """What rebuilds rows of it."""
        return RowReader(self)

    def host_reader(self) -> BlobReader:
        """A reader of the blob in host memory; the bytes of one on a GPU are copied once and kept."""
        if self._blob.data_ptr() != self._address:
            self._open(self._blob)  # moved to shared memory, where it is: sent to another process, maybe
        if self._host is None:
            self._host = BlobReader(BytesSource(self._blob.cpu().numpy(), self.name), 0, self._blob.numel())
        return self._host

    def item(self, offset: int, chunks: StagedChunks | None = None) -> Item | None:
        """What the kernels take to read the blob: see `Source.item`."""
        from tpde.cuda.items import Item

        tables = self.device_tables()
        if tables is None:
            return None
        at = self._blob.data_ptr()
        return Item(self.header, tables[0], at, tables[1].data_ptr(), offset, chunks=chunks)


def require_bytes_kept(name: str, blob: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse functions that give a blob other bytes.

    Raises
    ------
    PackedWeight
        If this one does.
    """
    probe = blob[:16].clone()  # where a blob says what it is
    moved = fn(probe.clone())
    if moved.dtype is not torch.uint8 or moved.is_meta or not torch.equal(moved.cpu(), probe.cpu()):
        raise PackedWeight(
            f"`{name}` is packed, and would lose its bytes",
            hint="move it to `cpu` or a CUDA device, or call `tpde.unpack_module(model)` first",
        )


def check_load(mine: Source, other: Source) -> None:
    """Refuse what holds no tensor like that of a source, or stays in a file: see `Source.check_load`.

    Raises
    ------
    InvalidInput, PackedWeight
        If it does.
    """
    _ = other.memory  # raises if it stays in a file
    if other.header.spec != mine.header.spec:
        raise InvalidInput(
            f"`{mine.name}` is {mine.header.spec.dtype} of shape {list(mine.header.spec.shape)}, the blob "
            f"holds {other.header.spec.dtype} of shape {list(other.header.spec.shape)}"
        )


def _aligned(blob: torch.Tensor) -> torch.Tensor:
    """A blob where the kernels can read it."""
    return blob if blob.data_ptr() % ALIGN == 0 else blob.clone()


class _Start(BytesSource):
    """The first bytes of a blob whose rest is elsewhere: enough for a `BlobReader` that decodes nothing."""

    def __init__(self, data: Bytes, name: str, size: int) -> None:
        super().__init__(data, name)
        self.size = size
