"""zstd blobs decoded on a GPU: frames by nvCOMP, planes put together by our kernel."""

from __future__ import annotations

import numpy as np
import zstandard

from tpde.codec.blob import RECORD
from tpde.codec.native import Bytes
from tpde.codec.registry import Gpu, codec_of
from tpde.cuda.backend import current
from tpde.errors import Corrupt
from tpde.format.blob_header import BlobHeader, align
from tpde.format.constants import MODE_CODED, MODE_RAW, RECORD_BYTES

SOURCE = "merge.cu"
THREADS = 128  # as in the kernel
SCRATCH_BYTES = 64 << 20  # of planes decoded at a time: a thousand frames fill any device

_BLOB = np.dtype(
    [
        *((name, "<u8") for name in ("words", "segment_words", "blob_bytes", "chunks", "index_at")),
        *((name, "<u4") for name in ("chunk_words", "segment_chunks", "unit_log2", "number")),
        ("reserved", "<u8"),
    ]
)


class ZstdBlob:
    """A zstd blob whose frames have been found, to be decoded on a device.

    Parameters
    ----------
    header : BlobHeader
        Its header.
    blob : ndarray of uint8
        All of its bytes, on the host; not kept.
    device : int
        The device's number.
    number : int
        What the status names on damage.
    scratch_bytes : int
        Of planes that are decoded at a time, at most; one chunk's, if they are more.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the caller puts on the device, at a multiple of 16, for `launch`.
    scratch_bytes : int
        Size of the buffer that `launch` needs besides.

    Raises
    ------
    Corrupt
        If a frame does not lie in its chunk, or its content is not as large as its plane.
    """

    def __init__(
        self,
        header: BlobHeader,
        blob: Bytes,
        device: int,
        number: int = 0,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        codec = codec_of(header)
        if codec.gpu is not Gpu.NVCOMP:
            raise ValueError(f"nvCOMP does not decode codec {codec.number} ({codec.name})")
        self._header, self._device = header, device
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._contents: list[int] = []
        slots = [0]
        records = blob[header.index_at : header.index_at + RECORD_BYTES * header.chunks].view(RECORD)
        starts = [*(records["offset"].astype(np.int64) << header.unit_log2).tolist(), header.blob_bytes]
        for chunk, modes in enumerate(records["modes"].tolist()):
            self._find(blob, chunk, modes, starts[chunk], starts[chunk + 1])
            slots.append(len(self._offsets))
        self._slots = slots
        facts = np.zeros(1, _BLOB)
        for name in (
            "words",
            "segment_words",
            "blob_bytes",
            "chunks",
            "index_at",
            "chunk_words",
            "unit_log2",
        ):
            facts[name] = getattr(header, name)
        facts["segment_chunks"] = -(-header.segment_words // header.chunk_words)
        facts["number"] = number
        self.descriptors: Bytes = np.concatenate(
            [facts.view(np.uint8), np.array(slots, "<u8").view(np.uint8)]
        )
        step = scratch_bytes // header.chunk_words  # or one chunk's, if they are more
        self._runs: list[tuple[int, int]] = []
        first = 0
        while first < header.chunks:
            last = first + 1
            while last < header.chunks and slots[last + 1] - slots[first] <= step:
                last += 1
            self._runs.append((first, last))
            first = last
        most = max((slots[last] - slots[first] for first, last in self._runs), default=0)
        self.scratch_bytes = max(most * header.chunk_words, 16)

    def _find(self, blob: Bytes, chunk: int, modes: int, at: int, end: int) -> None:
        """Note where a chunk's frames lie (format.md 4.4, 6)."""
        begin, stop = self._header.chunk_range(chunk, chunk)
        n, planes = stop - begin, self._header.word_bytes
        mode = [modes >> (2 * p) & 3 for p in range(planes)]
        at += mode.count(MODE_RAW) * align(n, 16)
        for plane in range(planes):
            if mode[plane] != MODE_CODED:
                continue
            size = int.from_bytes(blob[at : at + 4].tobytes(), "little")
            if not at + 4 + size <= end <= blob.size:
                raise Corrupt(f"the chunk ends inside a zstd frame (plane {plane})", chunk=chunk)
            try:
                content = zstandard.frame_content_size(blob[at + 4 : at + 4 + size].data)
            except zstandard.ZstdError as error:
                raise Corrupt(f"a zstd frame is damaged: {error} (plane {plane})", chunk=chunk) from None
            if content != n:
                raise Corrupt(f"a zstd frame of {content} bytes, {n} are needed (plane {plane})", chunk=chunk)
            self._offsets.append(at + 4)
            self._sizes.append(size)
            self._contents.append(n)
            at += align(4 + size, 4)

    def launch(self, descriptors: int, status: int, stream: int, blob: int, scratch: int, out: int) -> bool:
        """Decode the blob. Waits for the stream; not for CUDA graphs.

        Parameters
        ----------
        descriptors : int
            Address of `descriptors` on the device, a multiple of 16.
        status : int
            Address of four uint32 on the device. They stay as they are, or if the first was 0 become 1, the
            blob's number, and the number of a chunk whose checksum does not match, lower half first.
        stream : int
            The stream's handle.
        blob, scratch : int
            Addresses of the blob, and of `scratch_bytes` bytes, multiples of 16.
        out : int
            Address of the tensor.

        Returns
        -------
        bool
            False if nvCOMP is missing or failed: decode on the CPU. The first time in a process warns.
        """
        nvcomp, header = current().nvcomp, self._header
        if not nvcomp.available():
            return False
        defines = {"WORD": header.word_bytes, "ROTATE": header.rotate}
        for first, last in self._runs:
            base, stop = self._slots[first], self._slots[last]
            try:
                nvcomp.decode(
                    blob,
                    self._offsets[base:stop],
                    self._sizes[base:stop],
                    scratch,
                    [i * header.chunk_words for i in range(stop - base)],
                    self._contents[base:stop],
                    self._device,
                    stream,
                )
            except Exception as error:  # nvCOMP raises RuntimeError, ValueError, and others between versions
                nvcomp.give_up(f"nvCOMP failed ({type(error).__name__}: {error})")
                return False
            merge = current().kernel(SOURCE, "merge", defines, self._device)
            launch = merge.launch(last - first, THREADS, 0)
            launch(stream, descriptors, blob, first, base, scratch, out, status)
        return True
