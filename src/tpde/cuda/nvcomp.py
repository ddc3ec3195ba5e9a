"""zstd blobs decoded on a GPU: frames by nvCOMP, from NVIDIA's wheels, planes put together by our kernel.

nvCOMP's Python API is used as it is in 5.2 and later, and in 6. It waits for the stream at each call, so
nothing here can be captured into a CUDA graph. Where it is missing or fails, the caller decodes on the CPU;
the first time in a process there is a warning that says why, and nvCOMP is left alone from then on.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from typing import Any

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
OLDEST, NEWEST = (5, 2), 6  # 5.1 cannot decode into memory that is given; each major changed the API
INSTALL = "pip install 'tpde[nvcomp]' (or 'tpde[nvcomp-cu12]' beside CUDA 12)"

_BLOB = np.dtype(
    [
        *((name, "<u8") for name in ("words", "segment_words", "blob_bytes", "chunks", "index_at")),
        *((name, "<u4") for name in ("chunk_words", "segment_chunks", "unit_log2", "number")),
        ("reserved", "<u8"),
    ]
)
_lock = threading.Lock()  # codecs are shared by all threads that use their stream
_given_up = False


def _give_up(why: str) -> None:
    """Warn, the first time; the CPU decodes from now on."""
    global _given_up  # noqa: PLW0603
    if not _given_up:
        _given_up = True
        warnings.warn(
            f"{why}; zstd blobs are decoded on the CPU and copied to the GPU from now on",
            RuntimeWarning,
            stacklevel=4,
        )


@functools.cache
def _module() -> Any:
    """`nvidia.nvcomp`, or what is wrong with it as a text."""
    try:
        found = importlib.import_module("nvidia.nvcomp")
    except ImportError as error:
        return f"nvCOMP, which decodes zstd on the GPU, is not installed ({error}): {INSTALL}"
    except Exception as error:  # its library may fail to load in any way
        return f"nvCOMP cannot be used ({type(error).__name__}: {error})"
    version = tuple(int(part) for part in found.__version__.split(".")[:2])
    if version < OLDEST or version[0] > NEWEST:
        needed = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST}.x"
        return f"nvCOMP {found.__version__} has another Python API than {needed}: {INSTALL}"
    return found


def available() -> bool:
    """Whether nvCOMP is there and has not failed in this process; warns the first time if not."""
    if not _given_up and isinstance(found := _module(), str):
        _give_up(found)
    return not _given_up


class _Memory:
    """Device memory as nvCOMP takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@functools.lru_cache(maxsize=16)
def _codec(device: int, stream: int) -> Any:
    nvcomp = _module()
    return nvcomp.Codec(
        algorithm="Zstd",
        bitstream_kind=nvcomp.BitstreamKind.RAW,
        device_id=device,
        cuda_stream=stream or 1,  # 1: the legacy default stream, where 0 might stand for none given
    )


def decode_frames(
    source: int,
    offsets: list[int],
    sizes: list[int],
    out: int,
    places: list[int],
    contents: list[int],
    device: int,
    stream: int,
) -> None:
    """Decode zstd frames from device memory into device memory.

    Parameters
    ----------
    source : int
        Address that `offsets` count from.
    offsets, sizes : list of int
        Where each frame lies.
    out : int
        Address that `places` count from.
    places, contents : list of int
        Where each frame's content goes, and its size.
    device, stream : int
        The device's number, and the stream's handle.

    Raises
    ------
    Exception
        Whatever nvCOMP raises. That it raises nothing does not tell that the content is right.
    """
    if not offsets:
        return
    nvcomp = _module()
    with _lock:
        codec = _codec(device, stream)
        if hasattr(nvcomp, "BatchArray"):  # 6.x carves one buffer
            whole = _Memory(source, max(map(sum, zip(offsets, sizes, strict=True))))
            room = _Memory(out, max(map(sum, zip(places, contents, strict=True))))
            codec.decode(
                nvcomp.as_arrays(whole, offsets, sizes), out=nvcomp.as_arrays(room, places, contents)
            )
        else:  # 5.x takes lists
            frames = [_Memory(source + at, size) for at, size in zip(offsets, sizes, strict=True)]
            targets: list[object] = [_Memory(out + at, n) for at, n in zip(places, contents, strict=True)]
            codec.decode(nvcomp.as_arrays(frames), out=targets)


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

    def __init__(self, header: BlobHeader, blob: Bytes, device: int, number: int = 0) -> None:
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
        step = SCRATCH_BYTES // header.chunk_words  # or one chunk's, if they are more
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
        if not available():
            return False
        header = self._header
        defines = {"WORD": header.word_bytes, "ROTATE": header.rotate}
        for first, last in self._runs:
            base, stop = self._slots[first], self._slots[last]
            try:
                decode_frames(
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
                _give_up(f"nvCOMP failed ({type(error).__name__}: {error})")
                return False
            merge = current().kernel(SOURCE, "merge", defines, self._device)
            merge.launch(last - first, THREADS, 0)(
                stream,
                np.uint64(descriptors),
                np.uint64(blob),
                np.uint64(first),
                np.uint64(base),
                np.uint64(scratch),
                np.uint64(out),
                np.uint64(status),
            )
        return True
