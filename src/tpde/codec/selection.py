"""Choosing how to store a tensor, from a sample of its words (docs/format.md leaves this to the writer).

Everything here is a function of the sample and the tensor's dtype and shape alone, in integers, so that
the same source always gives the same file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import zstandard

from tpde.codec import core_chunks, prefix_codes
from tpde.codec.native import Bytes, CoreLayout
from tpde.codec.zstd import LEVEL
from tpde.format.blob_header import BlobHeader, align
from tpde.format.constants import (
    ALIGN_BLOB,
    CODEC_PREFIX,
    CODEC_ZSTD,
    DTYPES,
    MIN_UNIT_LOG2,
)
from tpde.format.container import TensorSpec

CodecName = Literal["auto", "prefix", "zstd"]

# 256 symbols for each of 32 lanes: 1.4958 on synthetic bf16, where 128 give 1.4923 and 512 give 1.4976; more
# leave a GPU too few chunks
PREFIX_CHUNK_WORDS = 8192
ZSTD_CHUNK_WORDS = 65536  # the largest: zstd finds more in more
SAMPLE_CHUNKS = 64  # 1 MiB of bf16; half or twice as many change its ratio by less than 1 in 10,000
MIN_BYTES = 1024  # smaller tensors are not worth a header and a table
WORTH = 99  # percent of its size that a tensor must shrink below
SEGMENT_BYTES = 1 << 20  # slices of at least this size start a chunk of their own
ZSTD_SAMPLE = 1 << 20  # bytes


@dataclass(frozen=True)
class TensorPlan:
    """How to store a tensor: a header with all but its results, and the table section."""

    header: BlobHeader
    section: bytes
    estimate: int


def sample_ranges(spec: TensorSpec) -> list[tuple[int, int]]:
    """Byte ranges of a tensor that make its sample: up to 64 chunks, evenly spread, or all of it."""
    nbytes = spec.nbytes
    if nbytes <= SAMPLE_CHUNKS * PREFIX_CHUNK_WORDS:  # as of most: words have a byte at least
        return [(0, nbytes)]
    size = PREFIX_CHUNK_WORDS * DTYPES[spec.dtype].word_bytes
    chunks = -(-nbytes // size)
    if chunks <= SAMPLE_CHUNKS:
        return [(0, nbytes)]
    # The last chunk may be short: it is left out.
    starts = (i * (chunks - 1) // SAMPLE_CHUNKS * size for i in range(SAMPLE_CHUNKS))
    return [(at, at + size) for at in starts]


def segment_words(spec: TensorSpec) -> int:
    """Words of a segment: a slice of an expert tensor, or the whole tensor (format.md 4.1)."""
    dtype = DTYPES[spec.dtype]
    words = spec.nbytes // dtype.word_bytes
    if len(spec.shape) < 3 or not words:
        return max(words, 1)
    slice_bits = math.prod(spec.shape[1:]) * dtype.bits
    if slice_bits % (8 * dtype.word_bytes) or slice_bits < 8 * SEGMENT_BYTES:
        return words
    return slice_bits // (8 * dtype.word_bytes)


def unit_log2(nbytes: int) -> int:
    """The smallest unit whose 32-bit offsets reach every chunk, headers and padding included."""
    unit = MIN_UNIT_LOG2
    while (nbytes + nbytes // 64) >> unit >= 1 << 32:
        unit += 1
    return unit


def base_header(spec: TensorSpec, codec: int, chunk_words: int = PREFIX_CHUNK_WORDS) -> BlobHeader:
    """A header with nothing decided but the codec."""
    return BlobHeader(
        spec=spec,
        codec=codec,
        segment_words=segment_words(spec),
        chunk_words=chunk_words,
        unit_log2=unit_log2(spec.nbytes),
        planes=((0, 0),) * DTYPES[spec.dtype].word_bytes,
    )


def core_layout(header: BlobHeader) -> CoreLayout:
    """The header's facts as the core takes them."""
    layout = CoreLayout(
        words=header.words,
        segment_words=header.segment_words,
        chunk_words=header.chunk_words,
        word_bytes=header.word_bytes,
        rotate=header.rotate,
        unit_log2=header.unit_log2,
        tables=header.tables,
    )
    for p, (first, count) in enumerate(header.planes):
        layout.first_table[p], layout.table_count[p] = first, count
    return layout


def _plan_prefix(spec: TensorSpec, sample: Bytes) -> TensorPlan:
    header = base_header(spec, CODEC_PREFIX)
    layout = core_layout(header)
    section, estimate = prefix_codes.plan(layout, sample)
    planes = tuple((int(layout.first_table[p]), int(layout.table_count[p])) for p in range(header.word_bytes))
    header = replace(header, planes=planes, tables=int(layout.tables), tables_bytes=len(section))
    return TensorPlan(header, section, estimate + header.chunks_at)


def _plan_zstd(spec: TensorSpec, sample: Bytes) -> TensorPlan:
    header = base_header(spec, CODEC_ZSTD, ZSTD_CHUNK_WORDS)
    part = sample[: ZSTD_SAMPLE // header.word_bytes * header.word_bytes]
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    size = sum(
        min(len(compressor.compress(plane.tobytes())), plane.size)
        for plane in core_chunks.split(core_layout(header), part)
    )
    return TensorPlan(header, b"", size * spec.nbytes // part.size + header.chunks_at)


def plan_tensor(spec: TensorSpec, sample: Bytes, codec: CodecName = "auto") -> TensorPlan | None:
    """Choose how to store a tensor.

    Parameters
    ----------
    spec : TensorSpec
        What it is.
    sample : ndarray of uint8
        The bytes of `sample_ranges`, one range after the other.
    codec : {"auto", "prefix", "zstd"}
        `auto` takes prefix codes for floating point, and whichever promises less for the rest.

    Returns
    -------
    TensorPlan or None
        None if the tensor would not shrink and is better left plain.
    """
    if spec.nbytes < MIN_BYTES or not sample.size:
        return None
    worth = spec.nbytes * WORTH // 100
    plans = []
    if codec in ("auto", "prefix"):
        plans.append(_plan_prefix(spec, sample))
    # Weights never gain from zstd what its slow decoding costs; what does not shrink otherwise may.
    unlike_weights = not DTYPES[spec.dtype].rotate or not plans or plans[0].estimate > worth
    if codec == "zstd" or (codec == "auto" and unlike_weights):
        plans.append(_plan_zstd(spec, sample))
    best = min(plans, key=lambda plan: plan.estimate)
    return best if align(best.estimate, ALIGN_BLOB) <= worth else None
