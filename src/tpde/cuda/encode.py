"""Packed tensors (docs/format.md 2 to 5) from a GPU: launches of the kernels of `kernels/encode.cu`.

Nothing here allocates on the device: callers put a sample, scratch memory and the blob there, and pass
addresses. Launches go to the caller's stream and synchronize nothing. Blobs have the bytes of the CPU.

The host reads the sample, and then the index map; the second time it knows the blob's size:

    encoder = PackEncoder(at, spec, device)
    sample = ...  # encoder.sample_bytes on the device
    encoder.gather(sample, stream)
    chosen = encoder.choose(...)  # the sample, on the host; None: the CPU shall pack it
    scratch = ...  # chosen.scratch_bytes on the device
    ...  # chosen.image, to the scratch memory at chosen.image_at
    encoder.measure(chosen, scratch, stream)
    found = encoder.found(chosen, ...)  # the scratch memory's first chosen.found_bytes, on the host
    blob = ...  # found.nbytes on the device
    encoder.encode(chosen, scratch, blob, stream)
    ...  # found.head(digest), to the blob's start
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tpde.codec import core_chunks, native, prefix_codes
from tpde.codec.native import Bytes, as_bytes
from tpde.codec.registry import PREFIX
from tpde.codec.selection import (
    PREFIX_CHUNK_WORDS,
    SAMPLE_CHUNKS,
    CodecName,
    core_layout,
    plan_tensor,
    sample_ranges,
)
from tpde.cuda.backend import current
from tpde.errors import Corrupt
from tpde.format.blob_header import BlobHeader, align, with_results
from tpde.format.constants import DTYPES, RECORD_BYTES
from tpde.format.container import TensorSpec

SOURCE = "encode.cu"
ALIGNMENT = 16  # of a sample's, scratch memory's and a blob's address
_SAID_BYTES = 32
_MEASURE_WARPS, _ENCODE_WARPS = 8, 4  # of a block, and as many chunks
_EXPAND_THREADS, _PARTS = 256, 256  # blocks for each plane: one for 256 pairs
_LANE_HEADER = 36  # format.md 5.2
_PAIRS = 2  # a table's kind

_TABLE = np.dtype([(name, "<u4") for name in ("entries", "bits", "escape", "escape_bits", "raw_bits", "pad")])
_JOB = np.dtype(
    [
        *((name, "<u8") for name in ("words", "segment_words", "chunks", "states", "headers")),
        ("planes", "<u8", 8),
        *((name, "<u4") for name in ("segment_chunks", "unit_log2", "first", "blocks")),
        ("first_table", "u1", 8),
        ("table_count", "u1", 8),
        ("tables", _TABLE, 16),
    ]
)


class EncodePlan(NamedTuple):
    """How a tensor is packed, and what that takes of scratch memory.

    Attributes
    ----------
    header : BlobHeader
        The blob's, with all but its results.
    section : bytes
        Its tables.
    image : ndarray of uint8
        What the kernels read of all this.
    image_at : int
        Where in scratch memory it lies.
    scratch_bytes, found_bytes : int
        How large that is, and what of its start the host reads.
    defines : dict of str to int
        Macros of the kernels.
    """

    header: BlobHeader
    section: bytes
    image: Bytes
    image_at: int
    scratch_bytes: int
    found_bytes: int
    defines: dict[str, int]


class Found(NamedTuple):
    """A blob whose chunks are measured: header without its hash, tables, index map."""

    header: BlobHeader
    section: bytes
    records: Bytes

    @property
    def nbytes(self) -> int:
        """Size of the blob."""
        return self.header.blob_bytes

    def head(self, digest: bytes) -> Bytes:
        """Everything before the first chunk.

        Parameters
        ----------
        digest : bytes
            XXH3-128 of the tensor's bytes.
        """
        header = with_results(
            self.header,
            blob_bytes=self.header.blob_bytes,
            max_chunk=self.header.max_chunk_bytes,
            max_stream=self.header.max_stream_bytes,
            digest=digest,
        )
        return as_bytes(header.write(self.section, self.records.tobytes()))


class PackEncoder:
    """Encodes a tensor, which is read twice, beside its sample.

    Where chunks start at multiples of 16 bytes, 16 are loaded at a time. They do, but in slices of odd sizes.

    The header's hash of the tensor's bytes is the caller's to give: see `tpde.cuda.digest`, which reads them
    once more.

    Parameters
    ----------
    at : int
        Address of the words on the device, a multiple of a word's bytes. They stay as they are from one
        launch to the next. Otherwise the blob is none, but nothing outside it is written.
    spec : TensorSpec
        What they are.
    device : int
        The device's number.
    spread : bool
        Take a sample from all of the tensor, as packing a file does. Otherwise its first bytes are the
        sample, as where tensors are in memory: `tpde.torch.save_file`, `tpde.pack_module`.

    Attributes
    ----------
    sample_bytes : int
        What `gather` needs.
    """

    def __init__(self, at: int, spec: TensorSpec, device: int, *, spread: bool = True) -> None:
        word = DTYPES[spec.dtype].word_bytes
        if at % word:
            raise ValueError(f"words of {spec.dtype} at {at:#x}, which is no multiple of {word}")
        self.at, self.spec, self._device = at, spec, device
        ranges = sample_ranges(spec)
        self.sample_bytes = sum(end - begin for begin, end in ranges)
        self._spread, self._ranges = spread, len(ranges)
        self._chunk_bytes = PREFIX_CHUNK_WORDS * word

    def _launch(self, name: str, defines: dict[str, int], blocks: int, threads: int, *given: int) -> None:
        *arguments, stream = given
        kernel = current().kernel(SOURCE, name, defines, self._device)
        kernel.launch(blocks, threads, 0)(stream, *arguments)

    def gather(self, to: int, stream: int) -> None:
        """Collect the sample.

        Parameters
        ----------
        to : int
            Address of room for `sample_bytes`.
        stream : int
            The stream's handle.
        """
        _check_address("a sample", to)
        if not self.sample_bytes:
            return
        chunks, blocks = (-(-size // self._chunk_bytes) for size in (self.spec.nbytes, self.sample_bytes))
        starts = (chunks - 1, SAMPLE_CHUNKS) if self._spread and self._ranges > 1 else (1, 1)
        given = self.at, to, self.spec.nbytes, self._chunk_bytes, *starts, stream
        self._launch("gather", usual(self.spec), blocks, 256, *given)

    def choose(self, sample: Any, codec: CodecName = "auto") -> EncodePlan | None:
        """Choose planes and tables, as the CPU does.

        Takes some 2 ms for tensors of 1 MiB and more; other threads run meanwhile.

        Parameters
        ----------
        sample : bytes-like or ndarray
            What `gather` collected.
        codec : {"auto", "prefix", "zstd"}
            As `plan_tensor` takes it.

        Returns
        -------
        EncodePlan or None
            None if the CPU is to pack the tensor: it would not shrink, or not by prefix codes, or its sample
            is one word again and again, so that all of its bytes must be compared first. Of first bytes the
            first chunk is enough for that: the sample begins where words differ.
        """
        data = as_bytes(sample)
        if data.size != self.sample_bytes:
            raise ValueError(f"the sample has {self.sample_bytes} bytes, here are {data.size}")
        word = DTYPES[self.spec.dtype].word_bytes
        start = data if self._spread else data[: self._chunk_bytes]
        if not data.size or (start[word:] == start[:-word]).all():
            return None
        plan = plan_tensor(self.spec, data, codec)
        if plan is None or plan.header.codec != PREFIX.number:
            return None
        return _chosen(plan.header, plan.section)

    def measure(self, chosen: EncodePlan, scratch: int, stream: int) -> None:
        """Find out what chunks take, and where they go: two launches.

        Parameters
        ----------
        chosen : EncodePlan
            What `choose` gave.
        scratch : int
            Address of `chosen.scratch_bytes`, with `chosen.image` at `chosen.image_at`. The first
            `chosen.found_bytes` become what `found` takes.
        stream : int
            The stream's handle.
        """
        _check_address("scratch memory", scratch)
        job = scratch + chosen.image_at
        planes = chosen.defines["CODED"].bit_count()
        self._launch("expand", chosen.defines, max(planes, 1) * _PARTS, _EXPAND_THREADS, scratch, job, stream)
        blocks = -(-chosen.header.chunks // _MEASURE_WARPS)
        given = self.at, scratch, job, stream
        self._launch("measure", chosen.defines, blocks, 32 * _MEASURE_WARPS, *given)

    def found(self, chosen: EncodePlan, data: Any) -> Found:
        """What was measured.

        Parameters
        ----------
        chosen : EncodePlan
            What `choose` gave.
        data : bytes-like or ndarray
            The scratch memory's first `chosen.found_bytes`, after `measure`.

        Raises
        ------
        Corrupt
            If there is no such blob: scratch memory was written by others.
        """
        found = as_bytes(data)
        header, index = chosen.header, found[_SAID_BYTES : chosen.found_bytes]
        end, max_chunk, max_stream = (int(it) for it in found[:12].view("<u4"))
        blob_bytes = end << header.unit_log2
        layout = core_layout(header)
        core_chunks.index_check(layout, index, header.chunks_at, blob_bytes, max_chunk)
        if blob_bytes > header.chunks_at + native.core().tpde_encode_bound(
            layout, header.words, header.chunks
        ):
            raise Corrupt(f"chunks that end at {blob_bytes} take more than any do")
        header = with_results(
            header, blob_bytes=blob_bytes, max_chunk=max_chunk, max_stream=max_stream, digest=header.hash
        )
        return Found(header, chosen.section, index)

    def encode(self, chosen: EncodePlan, scratch: int, out: int, stream: int) -> None:
        """Write the chunks.

        Parameters
        ----------
        chosen : EncodePlan
            What `choose` gave.
        scratch : int
            As `measure` left it.
        out : int
            Address of the blob, of which `Found` says the size. What comes before the chunks is not written.
        stream : int
            The stream's handle.
        """
        _check_address("scratch memory", scratch)
        _check_address("a blob", out)
        blocks = -(-chosen.header.chunks // _ENCODE_WARPS)
        given = self.at, scratch, scratch + chosen.image_at, out, stream
        self._launch("encode", chosen.defines, blocks, 32 * _ENCODE_WARPS, *given)


def usual(spec: TensorSpec) -> dict[str, int]:
    """Macros of the kernels that large tensors of weights take: `gather` is the same in all."""
    dtype = DTYPES[spec.dtype]
    symbols = 1 << (dtype.word_bytes - 1)
    pairs = symbols if spec.dtype in ("BF16", "F32") else 0
    return {"WORD": dtype.word_bytes, "ROTATE": dtype.rotate, "CODED": symbols, "PAIRS": pairs}


def _chosen(header: BlobHeader, section: bytes) -> EncodePlan:
    """Lay out scratch memory, and write what kernels read."""
    tables = prefix_codes.PrefixCodec(core_layout(header), section).tables()
    job, coded, pairs = np.zeros(1, _JOB), 0, 0
    found_bytes = _SAID_BYTES + RECORD_BYTES * header.chunks
    blocks = -(-header.chunks // _MEASURE_WARPS)
    states_at = align(found_bytes, ALIGNMENT)
    headers_at = states_at + 8 * blocks
    coded_planes = sum(count > 0 for _, count in header.planes)
    image_at = align(headers_at + _LANE_HEADER * coded_planes * header.chunks, ALIGNMENT)
    at = image_at + _JOB.itemsize
    for number, table in enumerate(tables):
        size = table.entries.size
        bits = size.bit_length() - 1
        # In the order of their codewords, the first bit topmost.
        ordered = table.entries.reshape((2,) * bits).transpose().reshape(-1)
        escape = int(np.argmax(table.entries & 0x100))
        first = int(ordered[np.argmin(ordered & 0x100)])
        row = job["tables"][0, number : number + 1]
        row["entries"], row["bits"], row["raw_bits"] = at, bits, table.raw_bits
        row["escape"], row["escape_bits"] = escape, table.entries[escape] & 31
        row["pad"] = first >> 16
        at += 4 * size
    at = align(at, 128)  # lines of memory
    for plane, (first_table, count) in enumerate(header.planes):
        job["first_table"][0, plane], job["table_count"][0, plane] = first_table, count
        if not count:
            continue
        paired = tables[first_table].kind == _PAIRS
        coded |= 1 << plane
        pairs |= paired << plane
        job["planes"][0, plane] = at
        at += 4 * (1 + count) << (16 if paired else 8)
    job["words"], job["segment_words"], job["chunks"] = header.words, header.segment_words, header.chunks
    job["states"], job["headers"], job["blocks"] = states_at, headers_at, blocks
    job["segment_chunks"] = -(-header.segment_words // header.chunk_words)
    job["unit_log2"], job["first"] = header.unit_log2, header.chunks_at >> header.unit_log2
    image = np.concatenate([job.view(np.uint8), *(it.entries.view(np.uint8) for it in tables)])
    defines = {"WORD": header.word_bytes, "ROTATE": header.rotate, "CODED": coded, "PAIRS": pairs}
    return EncodePlan(header, section, image, image_at, at, found_bytes, defines)


def _check_address(what: str, at: int) -> None:
    if at % ALIGNMENT:
        raise ValueError(f"{what} at {at:#x}, which is no multiple of {ALIGNMENT}")
