"""Packed tensors that live in torch tensors, and rebuilding many of them with one call, on CPU or GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tpde.codec.blob import BlobReader
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput, Truncated, UnsupportedDevice, UnsupportedVersion
from tpde.format.blob import MAX_FIXED_BYTES, parse_blob_header
from tpde.format.constants import CODEC_CONSTANT, CODEC_ZSTD
from tpde.format.source import BytesSource
from tpde.frameworks import torch_dtype
from tpde.packing.writer import default_threads

# At the start of a status that is complete; while it is written, a kernel has something else there.
REPORTED = 1
# Of a blob: header, tables and index map of up to 8e7 words of bf16, or there is a second copy.
_START_BYTES = 128 << 10
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watched(Protocol):
    """Something whose damage shows only after it was used."""

    def report(self) -> None:
        """Raise `Corrupt` if its last use was of damaged bytes, as far as that is known by now."""


class Streams(Protocol):
    """What decodes tensors whose chunks are elsewhere than on the device: see `tpde.streaming`."""

    def unit(self, items: Sequence[tuple[Any, int]]) -> Callable[[torch.Tensor], None]:
        """What rebuilds tensors, each at its byte offset, into a buffer: called as a `Materializer` is."""

    def chunks(self, packed: Any, first: int, last: int, offset: int) -> Callable[[torch.Tensor], None]:
        """What rebuilds chunks `first` to `last` of a tensor into a buffer, from byte `offset` on."""

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Raise `ReadError` if the chunks were given up; inside, nobody gives them up."""

    def watch(self, reader: Watched) -> None:
        """Raise what a reader of rows has found so far; somebody will ask it again."""


class PackedTensor:
    """A blob (docs/format.md 2) in a tensor, and what decoding it needs beside it.

    Parameters
    ----------
    blob : torch.Tensor
        One-dimensional, uint8, contiguous, on a CPU or CUDA device; at an address divisible by 16.
    name : str
        What errors call it.

    Raises
    ------
    InvalidInput
        If `blob` is not such a tensor.
    Truncated, UnsupportedVersion, Corrupt
        If header, tables or index map are not valid. They are checked here, on the host; chunks are when they
        are decoded.

    Attributes
    ----------
    blob : torch.Tensor
        The blob now.
    header : BlobHeader
        What it says of its tensor.
    version : int
        Counts the blobs so far.
    streams : Streams or None
        What brings the chunks, if they are not in `blob`.
    """

    streams: Streams | None = None

    def __init__(self, blob: torch.Tensor, name: str) -> None:
        self.name, self.version = name, 0
        self._open(blob)

    def _open(self, blob: torch.Tensor) -> None:
        if blob.dtype is not torch.uint8 or blob.dim() != 1 or not blob.is_contiguous():
            raise InvalidInput(
                f"`{self.name}`: a blob is one-dimensional, contiguous and uint8; this is {blob.dtype} "
                f"of shape {list(blob.shape)}"
            )
        if blob.device.type == "meta":
            raise InvalidInput(
                f"`{self.name}`: the blob is on the `meta` device and has no data; load it first"
            )
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
            raise named(error, self.name) from error
        self.header = header
        self._section = reader.section
        self._place(blob, reader if blob.device.type == "cpu" else None)

    def _place(self, blob: torch.Tensor, reader: BlobReader | None) -> None:
        self.blob, self._host = blob, reader
        self._device_tables: tuple[Any, torch.Tensor] | None = None
        self.version += 1

    @property
    def device(self) -> torch.device:
        """Where the tensor is rebuilt."""
        return self.blob.device

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return torch_dtype(self.header.spec.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, plain."""
        return self.header.spec.nbytes

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the same blob where a function moves it."""
        blob = fn(self.blob)
        if blob is self.blob:
            return
        if blob.device.type == "cpu":
            self._open(blob)
        else:
            self._place(blob, None)

    def load(self, blob: torch.Tensor, *, assign: bool = False) -> None:
        """Take another blob of the same dtype and shape.

        Parameters
        ----------
        blob : torch.Tensor
            On any device.
        assign : bool
            Take it as it is, instead of a copy on the device of the one before.

        Raises
        ------
        InvalidInput
            If it holds a tensor of another dtype or shape.
        Truncated, UnsupportedVersion, Corrupt
            If it is not valid; the one before is kept.
        """
        if blob is self.blob:
            return
        other = PackedTensor(blob, self.name)
        if other.header.spec != self.header.spec:
            raise InvalidInput(
                f"`{self.name}` is {self.header.spec.dtype} of shape {list(self.header.spec.shape)}, the "
                f"blob holds {other.header.spec.dtype} of shape {list(other.header.spec.shape)}"
            )
        if not assign:
            if blob.numel() == self.blob.numel() and torch.equal(blob.to(self.blob.device), self.blob):
                return  # a tied weight, the second time
            blob = blob.to(self.blob.device, copy=True)
        self._open(blob)

    def __getstate__(self) -> dict[str, Any]:
        blob = self.blob
        if blob.untyped_storage().nbytes() > blob.numel():  # a piece of a larger one, which stays behind
            blob = blob.clone()
        return {"blob": blob, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.version = state["name"], 0
        self._open(state["blob"])

    def host_reader(self) -> BlobReader:
        """A reader of the blob in host memory; the bytes of one on a GPU are copied once and kept."""
        if self._host is None:
            self._host = BlobReader(BytesSource(self.blob.cpu().numpy(), self.name), 0, self.blob.numel())
        return self._host

    def device_tables(self) -> tuple[Any, torch.Tensor] | None:
        """Expanded tables, and their image on the blob's device; None if the kernels cannot decode it."""
        from tpde.cuda.items import lookup_tables

        if self._device_tables is None:
            tables = lookup_tables(self.header, self._section)
            if tables is None:
                return None
            self._device_tables = tables, upload(tables.image, self.device)
        return self._device_tables

    def item(self, offset: int, chunks: Any = None) -> Any:
        """What the kernels take: an `Item`, of some chunks or all; None if they cannot decode it there."""
        from tpde.cuda.items import Item

        tables = self.device_tables()
        if tables is None:
            return None
        at = self.blob.data_ptr()
        return Item(self.header, tables[0], at, tables[1].data_ptr(), offset, chunks=chunks)

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
            raise named(error, self.name) from error


class _Start(BytesSource):
    """The first bytes of a blob whose rest is elsewhere: enough for a `BlobReader` that decodes nothing."""

    def __init__(self, data: Bytes, name: str, size: int) -> None:
        super().__init__(data, name)
        self.size = size


def named(error: Corrupt | Truncated | UnsupportedVersion, name: str) -> Exception:
    """The same error with the tensor's name, and its chunk if it has one."""
    if not isinstance(error, Corrupt):
        return type(error)(f"`{name}`: {error}")
    where = "" if error.chunk is None else f" chunk {error.chunk}:"
    return Corrupt(f"`{name}`:{where} {error}", tensor=name, chunk=error.chunk)


def upload(data: Bytes, device: torch.device) -> torch.Tensor:
    """Bytes on a device; at least 16, since an empty tensor has no address."""
    padded = np.zeros(max(data.size, 16), np.uint8)
    padded[: data.size] = data
    with torch.inference_mode(False):
        return torch.from_numpy(padded).to(device)


class _Frames:
    """A zstd blob on a CUDA device, whose frames nvCOMP decodes there."""

    def __init__(self, packed: PackedTensor) -> None:
        from tpde.cuda.nvcomp import ZstdBlob

        self._packed, device = packed, packed.blob.device
        try:
            self._blob = ZstdBlob(packed.header, packed.blob.cpu().numpy(), device.index)
        except Corrupt as error:
            raise named(error, packed.name) from error
        self._descriptors = upload(self._blob.descriptors, device)
        self._status = upload(np.zeros(16, np.uint8), device)

    def __call__(self, out: torch.Tensor) -> bool:
        """Decode into `out` on the current stream, and wait for it; False if nvCOMP cannot."""
        blob = self._packed.blob
        scratch = torch.empty(self._blob.scratch_bytes, dtype=torch.uint8, device=blob.device)
        done = self._blob.launch(
            blob.data_ptr(),
            self._descriptors.data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
            self._status.data_ptr(),
            stream_handle(blob.device),
        )
        if done:
            raise_damage(self._status, [self._packed])
        return done


def _frames(packed: PackedTensor) -> _Frames | None:
    """What decodes a zstd blob on its device; None, after one warning a process, without nvCOMP."""
    from tpde.cuda import nvcomp

    return _Frames(packed) if packed.header.codec == CODEC_ZSTD and nvcomp.available() else None


def repeat(packed: PackedTensor, out: torch.Tensor) -> None:
    """Fill a buffer with the word of a constant tensor."""
    b = packed.header.word_bytes
    word = int.from_bytes(packed.header.constant[:b], "little", signed=b > 1)
    out.view(_WORDS[b]).fill_(word)


_HERE = contextlib.nullcontext()


def capturing(device: torch.device) -> bool:
    """Whether the current stream is recording a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_handle(device: torch.device) -> int:
    """Handle of a CUDA device's current stream.

    As compiled code asks for it: `torch.cuda.current_stream` makes an object each time, and a model's forward
    pass asks twice for every block.
    """
    assert device.index is not None
    return torch._C._cuda_getCurrentRawStream(device.index)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one: the default stream, whose handle is 0, is the current device's."""
    if torch._C._cuda_getDevice() == device.index:
        return _HERE
    return torch.cuda.device(device)


class Materializer:
    """Rebuilds a fixed list of packed tensors, all on one device, into one buffer.

    Parameters
    ----------
    items : sequence of (PackedTensor, int)
        Each with its byte offset in the buffer; none may overlap.
    device : torch.device
        Where all blobs are.

    Notes
    -----
    On a CUDA device everything that a call needs is put there now, and kernels are compiled: a call allocates
    nothing, synchronizes nothing and may be recorded in a CUDA graph. Exceptions are blobs that the kernels
    cannot decode (zstd): nvCOMP decodes those, or without it the CPU, from which they are copied.
    """

    def __init__(self, items: Sequence[tuple[PackedTensor, int]], device: torch.device) -> None:
        self.items, self.device = tuple(items), device
        for packed, _ in items:
            if packed.device != device:
                raise InvalidInput(
                    f"`{packed.name}` is on {packed.device}, the weights decoded with it on {device}; "
                    "move the whole block to one device"
                )
        self._fills: list[tuple[PackedTensor, int]] = []
        self._others: list[tuple[PackedTensor, int, _Frames | None]] = []
        self._names: list[PackedTensor] = []
        self._verified = False
        self._on_gpu = device.type == "cuda"  # kept: a device makes a string of its type each time
        if self._on_gpu:
            self._prepare()

    def _prepare(self) -> None:
        from tpde.cuda.decode import WorkList

        index = self.device.index
        assert index is not None
        work = []
        for packed, offset in self.items:
            if packed.header.codec == CODEC_CONSTANT:
                self._fills.append((packed, offset))
                continue
            item = packed.item(offset)
            if item is None:
                self._others.append((packed, offset, _frames(packed)))
                continue
            self._names.append(packed)
            work.append(item)
        self._work = WorkList(work, index) if work else None
        if self._work is not None:
            self._work.prepare()
            with torch.inference_mode(False):
                self._status = torch.zeros(16, dtype=torch.uint8, device=self.device)
            self._descriptors = upload(self._work.descriptors, self.device)  # which waits for both

    def __call__(self, out: torch.Tensor, check: bool | None = None) -> None:
        """Decode everything into a buffer, on the current stream.

        Parameters
        ----------
        out : torch.Tensor
            One-dimensional, uint8, contiguous, on the device.
        check : bool, optional
            Compare checksums on the GPU, and wait to see the result unless a graph is being recorded. By
            default on the first call only: what is in device memory stays as it is. The CPU always compares.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        if not self._on_gpu:
            target = out.numpy()
            for packed, offset in self.items:
                packed.decode_on_host(0, packed.nbytes, target[offset : offset + packed.nbytes])
            return
        check = not self._verified if check is None else check
        recording = bool(check or self._others) and capturing(self.device)
        for packed, offset in self._fills:
            repeat(packed, out[offset : offset + packed.nbytes])
        for packed, offset, frames in self._others:
            if recording:
                raise UnsupportedDevice(
                    f"`{packed.name}` is packed with zstd, which cannot be decoded in a CUDA graph: pack "
                    "it with `--codec prefix`, or run without graphs"
                )
            with on_device(self.device):
                if frames is not None and frames(out[offset : offset + packed.nbytes]):
                    continue
            host = np.empty(packed.nbytes, np.uint8)
            packed.decode_on_host(0, host.size, host)
            out[offset : offset + host.size].copy_(torch.from_numpy(host))
        if self._work is None:
            return
        stream = stream_handle(self.device)
        with on_device(self.device):
            self._work.launch(
                self._descriptors.data_ptr(), out.data_ptr(), self._status.data_ptr(), stream, check
            )
        if check and not recording:
            raise_damage(self._status, self._names)
            self._verified = True


class _Chunks:
    """Rebuilds some chunks of a packed tensor that is where it is decoded."""

    def __init__(self, packed: PackedTensor, first: int, last: int, offset: int) -> None:
        self._packed, self._first, self._last, self._offset = packed, first, last, offset
        header, self._work = packed.header, None
        begin, end = header.chunk_range(first, last)
        self._begin, self._size = begin * header.word_bytes, (end - begin) * header.word_bytes
        if packed.device.type == "cuda" and header.codec != CODEC_CONSTANT:
            from tpde.cuda.decode import WorkList
            from tpde.cuda.items import Chunks

            part = Chunks(first, last, 0, header.blob_bytes)
            item = packed.item(offset - self._begin, part)
            if item is not None:
                assert packed.device.index is not None
                self._work = WorkList([item], packed.device.index)
                self._descriptors = upload(self._work.descriptors, packed.device)
                self._status = upload(np.zeros(16, np.uint8), packed.device)
                self._verified = False

    def __call__(self, out: torch.Tensor) -> None:
        target = out[self._offset : self._offset + self._size]
        if self._packed.header.codec == CODEC_CONSTANT:
            repeat(self._packed, target)
            return
        if self._work is None:
            host = target.numpy() if out.device.type == "cpu" else np.empty(self._size, np.uint8)
            self._packed.decode_on_host(self._begin, self._begin + self._size, host)
            if out.device.type != "cpu":
                target.copy_(torch.from_numpy(host))
            return
        stream = stream_handle(out.device)
        with on_device(out.device):
            self._work.launch(
                self._descriptors.data_ptr(),
                out.data_ptr(),
                self._status.data_ptr(),
                stream,
                not self._verified,
            )
        if not self._verified and not capturing(out.device):
            raise_damage(self._status, [self._packed])
            self._verified = True


def materializer(items: Sequence[tuple[PackedTensor, int]]) -> Callable[[torch.Tensor], None]:
    """What rebuilds tensors, each at its byte offset, into a buffer on their device.

    Raises
    ------
    InvalidInput
        If they are on several devices.
    """
    streams = next((packed.streams for packed, _ in items if packed.streams is not None), None)
    return Materializer(items, items[0][0].device) if streams is None else streams.unit(items)


def chunk_decoder(packed: PackedTensor, first: int, last: int, offset: int) -> Callable[[torch.Tensor], None]:
    """What rebuilds chunks `first` to `last` of a tensor into a buffer, from byte `offset` on."""
    if packed.streams is not None and packed.header.codec != CODEC_CONSTANT:  # which has no chunks
        return packed.streams.chunks(packed, first, last, offset)
    return _Chunks(packed, first, last, offset)


class _Named(Protocol):
    name: str


def raise_damage(status: torch.Tensor, items: Sequence[_Named]) -> None:
    """Raise `Corrupt` if a kernel reported a damaged chunk in `status`.

    Waits for the current stream if `status` is on a device. In page-locked memory, it says what is
    known by now.
    """
    found, number, low, high = np.frombuffer(status.cpu().numpy()[:16].tobytes(), "<u4").tolist()
    if found != REPORTED:
        return
    status.zero_()
    name, chunk = items[number].name, high << 32 | low
    raise Corrupt(
        f"`{name}`: chunk {chunk}: its checksum does not match; the weights are damaged, load them again",
        tensor=name,
        chunk=chunk,
    )
