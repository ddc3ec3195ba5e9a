"""What there is to know of each codec, in one place.

Above the format nobody asks for a codec's number: what must be done for a blob follows from its record. A new
codec is a row of docs/format.md 2.2 and of `CODEC_FACTS`, a module for its chunks, and a record here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from tpde.codec import prefix_codes
from tpde.codec.core_chunks import EncodedChunks
from tpde.codec.native import Bytes
from tpde.codec.selection import core_layout
from tpde.codec.zstd import ZstdCodec
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_CONSTANT, CODEC_FACTS, CODEC_PREFIX, CODEC_ZSTD


class ChunkCodec(Protocol):
    """Encodes and decodes the chunks of one tensor, on the CPU."""

    def bound(self, words: int, chunks: int) -> int:
        """Most bytes that encoding so many words in so many chunks can take."""

    def encode(
        self, words: Bytes, first: int, count: int, offset: int, out: Bytes, threads: int = 1
    ) -> EncodedChunks:
        """Encode chunks `first` to `first + count - 1`; see `prefix_codes.PrefixCodec.encode`."""

    def decode(
        self, index: Bytes, first: int, data: Bytes, begin: int, end: int, out: Bytes, threads: int = 1
    ) -> None:
        """Decode the chunks of an index map from `first` on; see `prefix_codes.PrefixCodec.decode`."""


class Gpu(Enum):
    """What rebuilds a tensor on a GPU, from a blob that is there."""

    KERNELS = "kernels"  # of `tpde.cuda.decode`: any chunks, and rows
    NVCOMP = "nvCOMP"  # all of it, by `tpde.cuda.zstd_blob` if it is installed, else the CPU
    FILL = "fill"  # with the header's constant
    NONE = "none"  # the CPU does, and copies it there


class Codec(NamedTuple):
    """A codec.

    Attributes
    ----------
    number : int
        Its number in blobs.
    chunks : callable or None
        Opens a header and its table section for decoding, and if asked to for encoding; None if a blob of it
        has no chunks.
    gpu : Gpu
        What decodes it there.
    in_pieces : bool
        Whether chunks can be copied to a GPU and decoded there by themselves, as they come.
    """

    number: int
    chunks: Callable[[BlobHeader, bytes, bool], ChunkCodec] | None
    gpu: Gpu
    in_pieces: bool = False

    @property
    def name(self) -> str:
        """What users call it."""
        return CODEC_FACTS[self.number].name

    @property
    def stays(self) -> bool:
        """Whether a blob must be on the GPU as a whole for it to be decoded there."""
        return self.chunks is not None and not self.in_pieces


def _prefix(header: BlobHeader, section: bytes, encode: bool) -> ChunkCodec:
    return prefix_codes.PrefixCodec(core_layout(header), section, encode=encode)


def _zstd(header: BlobHeader, section: bytes, encode: bool) -> ChunkCodec:
    return ZstdCodec(header, core_layout(header))


PREFIX = Codec(CODEC_PREFIX, _prefix, Gpu.KERNELS, in_pieces=True)
ZSTD = Codec(CODEC_ZSTD, _zstd, Gpu.NVCOMP)
CONSTANT = Codec(CODEC_CONSTANT, None, Gpu.FILL)

CODECS = {it.number: it for it in (PREFIX, ZSTD, CONSTANT)}


def codec_of(header: BlobHeader) -> Codec:
    """The codec of a blob, which the format knows: headers are checked when they are read."""
    return CODECS[header.codec]
