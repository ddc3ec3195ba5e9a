"""What a packed weight comes from: a blob, wherever its bytes are.

All that is above takes sources as they are. What differs between bytes on the device and bytes elsewhere is
a method here, and nobody asks which kind one is.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tpde.codec.blob import BlobReader
from tpde.codec.native import Bytes
from tpde.codec.registry import Codec, codec_of
from tpde.errors import Corrupt, InvalidInput
from tpde.files.thread_count import default_threads
from tpde.format.blob_header import BlobHeader, align
from tpde.frameworks import torch_dtype, torch_shape
from tpde.weights.launch import upload

if TYPE_CHECKING:
    from tpde.cuda.items import Item, StagedChunks, Tables
    from tpde.weights.active_delta import ActiveDelta

Decoder = Callable[[torch.Tensor], None]  # rebuilds something into a buffer of bytes, on the current stream
RowsDecoder = Callable[
    [torch.Tensor], torch.Tensor
]  # rebuilds the rows of a matrix whose numbers it is given

ALIGN = 512  # the allocator's own: matrix libraries choose other kernels for addresses that are less round
_HERE = contextlib.nullcontext()


class Watched(Protocol):
    """Something whose damage shows only after it was used."""

    def report(self) -> None:
        """Raise `Corrupt` if its last use was of damaged bytes, as far as that is known by now."""


class Source(ABC):
    """One tensor of a packed file (docs/format.md 2), of which a weight consists, or a part of one.

    Attributes
    ----------
    name : str
        What errors call it.
    header : BlobHeader
        What the blob says of its tensor.
    version : int
        Counts the blobs so far: what was derived from another one is invalid.
    lead : int
        Of sources that are decoded together, the one with the highest decodes all of them.
    settled : bool
        Whether its bytes are on the device by now, and stay as they are there.
    travels : bool
        Whether it has chunks that are brought to the device each time.
    active_delta : ActiveDelta or None
        By which name it is decoded, if it has several.
    multiplies : bool
        Whether a linear layer's product is computed from it, without its being decoded before: it has a
        `product`.
    recorded : bool
        Whether a CUDA graph was recorded, by eager code, that reads its bytes where they are: only of one
        that `multiplies`.
    """

    name: str
    header: BlobHeader
    version: int
    lead = 0
    settled = True
    travels = False
    active_delta: ActiveDelta | None = None
    multiplies = False
    recorded = False
    _section: bytes
    _host: BlobReader | None = None
    _device_tables: tuple[Tables, torch.Tensor] | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the tensor is rebuilt."""

    @property
    def codec(self) -> Codec:
        """What its blob is, and how that is decoded."""
        return codec_of(self.header)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return torch_dtype(self.header.spec.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return torch_shape(self.header.spec)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, plain."""
        return self.header.spec.nbytes

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of the blob."""

    # ---- its bytes ----

    @property
    @abstractmethod
    def blob(self) -> torch.Tensor:
        """The blob, uint8.

        Raises
        ------
        PackedWeight
            If it is in a file, and stays there.
        """

    @property
    def memory(self) -> torch.Tensor:
        """What tells it apart, and says where it is and how much: its blob, or that of what it is made from.

        Raises
        ------
        PackedWeight
            If it is in a file, and stays there.
        """
        return self.blob

    @abstractmethod
    def check(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise what `apply` would."""

    @abstractmethod
    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the same blob where a function moves it.

        Raises
        ------
        PackedWeight
            If it cannot be moved, or the function changes its bytes.
        """

    @abstractmethod
    def check_load(self, other: Source) -> None:
        """Raise what `load` would."""

    @abstractmethod
    def load(self, other: Source, *, assign: bool = False) -> None:
        """Take another blob of the same dtype and shape.

        Parameters
        ----------
        other : Source
            On any device.
        assign : bool
            Take its blob as it is, instead of a copy on the device of the one before.

        Raises
        ------
        InvalidInput
            If it holds a tensor of another dtype or shape; the one before is kept.
        PackedWeight
            If one of the two is in a file, and stays there.
        """

    @abstractmethod
    def stored(self) -> torch.Tensor:
        """The blob, in a tensor that holds nothing else, as it is saved.

        Raises
        ------
        PackedWeight
            If it is in a file, and stays there.
        """

    def pickled(self) -> torch.Tensor:
        """Its bytes as `pickle` keeps them, in a tensor that holds nothing else: see `rebuild_tensor`.

        Raises
        ------
        PackedWeight
            If they are in a file, and stay there.
        """
        return self.stored()

    @abstractmethod
    def clone(self, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Source:
        """The same in memory of its own, which a function copies bytes to, maybe of another device.

        Raises
        ------
        PackedWeight
            If it is in a file, and stays there.
        """

    def retire(self) -> None:
        """Have what was begun with it refused, and holds it: another one of other values takes its place."""
        return

    def require_restorable(self) -> None:
        """Refuse to be turned into a plain weight that stays.

        Raises
        ------
        PackedWeight
            If that would break a budget.
        """
        return

    def in_host_memory(self, streamer: object) -> bool:
        """Whether a streamer can ask for any of the chunks at any time, all being in host memory."""
        return False

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Let the bytes be read where they lie; inside, nobody gives them up.

        Raises
        ------
        ReadError
            If they were given up.
        """
        return _HERE

    def watch(self, reader: Watched) -> None:
        """Raise what a reader of rows has found so far; somebody will ask it again."""
        return

    # ---- decoding ----

    @abstractmethod
    def together(self, items: Sequence[tuple[Source, int]]) -> Decoder:
        """What rebuilds sources, each at its byte offset, into a buffer. Of all, this one leads."""

    @abstractmethod
    def chunks(self, first: int, last: int, offset: int) -> Decoder:
        """What rebuilds chunks `first` to `last` into a buffer, from byte `offset` on."""

    @abstractmethod
    def row_reader(self) -> RowsDecoder:
        """What rebuilds the rows that are asked for, of a matrix."""

    def host_reader(self) -> BlobReader:
        """A reader of the blob in host memory."""
        assert self._host is not None
        return self._host

    def decode_on_host(self, begin: int, end: int, out: Bytes) -> None:
        """Decode bytes `begin` to `end` of the tensor with the CPU core, all processors taking part.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        try:
            self.host_reader().read(begin, end, out, default_threads())
        except Corrupt as error:
            raise error.of_tensor(self.name) from error

    def device_tables(self) -> tuple[Tables, torch.Tensor] | None:
        """Expanded tables, and their image on the device; None if the kernels cannot decode the blob."""
        from tpde.cuda.items import lookup_tables

        if self._device_tables is None:
            tables = lookup_tables(self.header, self._section)
            if tables is None:
                return None
            self._device_tables = tables, upload(tables.image, self.device)
        return self._device_tables

    @abstractmethod
    def item(self, offset: int, chunks: StagedChunks | None = None) -> Item | None:
        """What the kernels take: an `Item`, of some chunks or all; None if they cannot decode it there."""


def require_on(device: torch.device, sources: Iterable[Source]) -> None:
    """Refuse to decode sources to a device if one is elsewhere, as after a move that failed halfway.

    Raises
    ------
    InvalidInput
        Naming it.
    """
    for source in sources:
        if source.device != device:
            raise InvalidInput(
                f"`{source.name}` is on {source.device}, the weights decoded with it on {device}",
                hint="move the whole block to one device",
            )


def decoder(items: Sequence[tuple[Source, int]]) -> Decoder:
    """What rebuilds sources, each at its byte offset, into a buffer on their device.

    Raises
    ------
    InvalidInput
        If they are on several devices.
    """
    require_on(items[0][0].device, (source for source, _ in items))
    lead = max((source for source, _ in items), key=lambda source: source.lead)
    return lead.together(items)


def decoded(source: Source) -> torch.Tensor:
    """A source's tensor, in memory of its own.

    Raises
    ------
    Corrupt
        Naming tensor and chunk.
    """
    with torch.inference_mode(False), torch.no_grad():
        size = max(align(source.nbytes, ALIGN), 1)
        flat = torch.empty(size, dtype=torch.uint8, device=source.device)
        decoder([(source, 0)])(flat)
        return flat[: source.nbytes].view(source.dtype).view(source.shape)
