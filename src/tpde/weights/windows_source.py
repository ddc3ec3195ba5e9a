"""What sources in the window layout share (docs/windows.md): a matrix, or experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpde.codec.registry import Codec, Gpu
from tpde.errors import InvalidInput, PackedWeight
from tpde.weights.pack_source import packed_again
from tpde.weights.resident import check_load, require_bytes_kept
from tpde.weights.rows import RowReader
from tpde.weights.source import Decoder, RowsDecoder, Source, decoded, decoder

if TYPE_CHECKING:
    from typing_extensions import Self

_ALIGN = 128  # of blobs, windows.md 5.2


class WindowSource(Source):
    """A bf16 tensor in the window layout, on the device on which it is multiplied.

    Files keep prefix codes: what is saved of it is packed anew, to the bytes that `tpde pack` makes.

    Parameters
    ----------
    blob : torch.Tensor
        One-dimensional, uint8, contiguous, on a CPU or CUDA device. On a GPU it is copied if its address is
        not divisible by 128, as the kernels take it to be.
    name : str
        What errors call it.

    Raises
    ------
    InvalidInput
        If `blob` is not such a tensor.
    """

    multiplies = True
    kind = torch.bfloat16  # its dtype, without looking it up
    _blob: Tensor
    _device: torch.device

    def __init__(self, blob: Tensor, name: str) -> None:
        self.name, self.version = name, 0
        if blob.dtype is not torch.uint8 or blob.dim() != 1 or not blob.is_contiguous() or blob.is_meta:
            raise InvalidInput(
                f"`{name}`: a blob is one-dimensional, contiguous and uint8, this is {blob.dtype} of shape "
                f"{list(blob.shape)} on {blob.device}"
            )

    def _place(self, blob: Tensor) -> None:
        """Be elsewhere, or another blob."""
        if blob.is_cuda and blob.data_ptr() % _ALIGN:
            blob = blob.clone()
        self._tell(blob)  # it may lack memory: then all is as before
        self._blob, self._address, self._device = blob, blob.data_ptr(), blob.device
        self.recorded = False
        self.version += 1

    @abstractmethod
    def _tell(self, blob: Tensor) -> None:
        """Have what launches kernels for a blob, where it is on a GPU."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._device

    @property
    def codec(self) -> Codec:
        """That of the blob that is saved of it; no kernel decodes this one together with others."""
        return super().codec._replace(gpu=Gpu.NONE)

    @property
    def packed_bytes(self) -> int:
        """Bytes that it takes."""
        return self._blob.numel()

    # ---- its bytes ----

    @property
    def blob(self) -> Tensor:
        """A blob of prefix codes, packed for it: see `Source.blob`."""
        return packed_again(self)

    @property
    def memory(self) -> Tensor:
        """The bytes that it is in the window layout."""
        return self._blob

    def check(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse functions that give other bytes: see `Source.check`."""
        require_bytes_kept(self.name, self._blob, fn)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Take the same blob where a function moves it: see `Source.apply`."""
        self.check(fn)
        blob = fn(self._blob)
        if blob is not self._blob or blob.data_ptr() != self._address:
            self._place(blob)

    def check_load(self, other: Source) -> None:
        """Refuse what is no tensor like this one: see `Source.check_load`."""
        check_load(self, other)

    def load(self, other: Source, *, assign: bool = False) -> None:
        """Take another's tensor, in the window layout: see `Source.load`."""
        self.check_load(other)
        if other is self:
            return
        if isinstance(other, type(self)):
            made = other if assign else other._like(other._blob.to(self.device, copy=True))
        else:
            made = self.anew(decoded(other).to(other.device if assign else self.device))
        self._become(made)

    @abstractmethod
    def _like(self, blob: Tensor) -> Self:
        """The same bytes, elsewhere."""

    @abstractmethod
    def _become(self, made: Self) -> None:
        """Be what another one is, which is of the same shape."""

    @abstractmethod
    def anew(self, plain: Tensor) -> Self:
        """Another tensor of the same shape in the window layout, whatever it takes.

        Raises
        ------
        PackedWeight
            If there are more escapes than a blob may have.
        """

    @abstractmethod
    def renew(self, plain: Tensor) -> bool:
        """Take another tensor of the same shape in the same memory, where CUDA graphs go on reading it.

        False if there is no room for its escapes. It needs one that was made with room to spare, on a GPU.
        """

    def cannot_hold(self) -> PackedWeight:
        """What `anew` raises."""
        return PackedWeight(
            f"`{self.name}` is in the window layout, which cannot hold its new values",
            hint='call `tpde.nn.set_kernels(model, "exact")` first',
        )

    def stored(self) -> Tensor:
        """A blob of prefix codes."""
        return self.blob

    def pickled(self) -> Tensor:
        """The bytes in the window layout: see `Source.pickled`."""
        blob = self._blob
        return blob.clone() if blob.untyped_storage().nbytes() > blob.numel() else blob

    def clone(self, copy: Callable[[Tensor], Tensor] = torch.clone) -> Self:
        """The same in memory of its own: see `Source.clone`."""
        return self._like(copy(self._blob))

    # ---- decoding ----

    def together(self, items: Sequence[tuple[Source, int]]) -> Decoder:
        """What rebuilds tensors, one after the other: a launch takes all multiprocessors."""
        windowed = [(it, at) for it, at in items if isinstance(it, WindowSource)]
        others = [(it, at) for it, at in items if not isinstance(it, WindowSource)]
        before = decoder(others) if others else None

        def decode(out: Tensor) -> None:
            if before is not None:
                before(out)
            for it, at in windowed:
                it._decode(out[at : at + it.nbytes], 0, it.header.chunks)

        return decode

    def chunks(self, first: int, last: int, offset: int) -> Decoder:
        """What rebuilds some chunks."""
        begin, end = self._extent(first, last + 1)

        def decode(out: Tensor) -> None:
            self._decode(out[offset : offset + end - begin], first, last + 1)

        return decode

    def row_reader(self) -> RowsDecoder:
        """What rebuilds the rows that are asked for, on the host."""
        return RowReader(self)

    def _extent(self, first: int, end: int) -> tuple[int, int]:
        """Which bytes of the tensor some chunks are."""
        begin, stop = self.header.chunk_range(first, end - 1)
        return begin * self.header.word_bytes, stop * self.header.word_bytes

    @abstractmethod
    def _decode(self, out: Tensor, first: int, end: int) -> None:
        """Decode chunks to a buffer of their bytes on the current stream."""

    def item(self, offset: int, chunks: object = None) -> None:
        """None: no kernel of prefix codes decodes it."""
        return
