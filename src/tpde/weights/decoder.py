"""Rebuilding many packed tensors that are on one device with one call, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tpde.codec.registry import Gpu
from tpde.errors import Corrupt, UnsupportedDevice
from tpde.weights.launch import DecodeLaunch, Launch, capturing
from tpde.weights.source import Source, require_on

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Frames:
    """A zstd blob on a CUDA device, whose frames nvCOMP decodes there."""

    def __init__(self, packed: Source) -> None:
        from tpde.cuda.zstd_blob import ZstdBlob

        self._packed = packed
        try:
            blob = ZstdBlob(packed.header, packed.blob.cpu().numpy(), packed.device.index)
        except Corrupt as error:
            raise error.of_tensor(packed.name) from error
        self._scratch_bytes = blob.scratch_bytes
        self._launch = Launch([blob], packed.device)

    def __call__(self, out: torch.Tensor) -> bool:
        """Decode into `out` on the current stream, and wait for it; False if nvCOMP cannot."""
        blob = self._packed.blob
        scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=blob.device)
        done = self._launch(0, blob.data_ptr(), scratch.data_ptr(), out.data_ptr())
        if done:
            self._launch.report([self._packed.name])
        return done


def _frames(packed: Source) -> _Frames | None:
    """What decodes a zstd blob on its device; None, after one warning a process, without nvCOMP."""
    from tpde.cuda.backend import current

    return _Frames(packed) if packed.codec.gpu is Gpu.NVCOMP and current().nvcomp.available() else None


def repeat(packed: Source, out: torch.Tensor) -> None:
    """Fill a buffer with the word of a constant tensor."""
    b = packed.header.word_bytes
    word = int.from_bytes(packed.header.constant[:b], "little", signed=b > 1)
    out.view(_WORDS[b]).fill_(word)


class Materializer:
    """Rebuilds a fixed list of packed tensors, all on one device, into one buffer.

    Parameters
    ----------
    items : sequence of (Source, int)
        Each with its byte offset in the buffer; none may overlap.
    device : torch.device
        Where all blobs are.

    Notes
    -----
    On a CUDA device everything that a call needs is put there now, and kernels are compiled: a call allocates
    nothing, synchronizes nothing and may be recorded in a CUDA graph. Exceptions are blobs that the kernels
    cannot decode (zstd): nvCOMP decodes those, or without it the CPU, from which they are copied.
    """

    def __init__(self, items: Sequence[tuple[Source, int]], device: torch.device) -> None:
        self.items, self.device = tuple(items), device
        require_on(device, (packed for packed, _ in items))
        self._fills: list[tuple[Source, int]] = []
        self._others: list[tuple[Source, int, _Frames | None]] = []
        self._names: list[str] = []
        self._launch: DecodeLaunch | None = None
        self._verified = False
        self._on_gpu = device.type == "cuda"  # kept: a device makes a string of its type each time
        if self._on_gpu:
            self._prepare()

    def _prepare(self) -> None:
        from tpde.cuda.decode import WorkList

        index = self.device.index
        assert index is not None
        items = []
        for packed, offset in self.items:
            if packed.codec.gpu is Gpu.FILL:
                self._fills.append((packed, offset))
                continue
            item = packed.item(offset)
            if item is None:
                self._others.append((packed, offset, _frames(packed)))
                continue
            self._names.append(packed.name)
            items.append(item)
        if items:
            work = WorkList(items, index)
            work.prepare()
            self._launch = Launch([work], self.device)

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
                    f"`{packed.name}` is packed with zstd, which cannot be decoded in a CUDA graph",
                    hint="pack it with `--codec prefix`, or run without graphs",
                )
            if frames is not None and frames(out[offset : offset + packed.nbytes]):
                continue
            host = np.empty(packed.nbytes, np.uint8)
            packed.decode_on_host(0, host.size, host)
            out[offset : offset + host.size].copy_(torch.from_numpy(host))
        if self._launch is None:
            return
        self._launch(0, out.data_ptr(), check, 0)
        if check and not recording:
            self._launch.report(self._names)
            self._verified = True


class ChunkDecoder:
    """Rebuilds some chunks of a packed tensor that is where it is decoded."""

    def __init__(self, packed: Source, first: int, last: int, offset: int) -> None:
        self._packed, self._first, self._last, self._offset = packed, first, last, offset
        header = packed.header
        self._launch: DecodeLaunch | None = None
        self._verified = False
        begin, end = header.chunk_range(first, last)
        self._begin, self._size = begin * header.word_bytes, (end - begin) * header.word_bytes
        self._fill = packed.codec.gpu is Gpu.FILL
        if packed.device.type == "cuda" and not self._fill:
            from tpde.cuda.decode import WorkList
            from tpde.cuda.items import StagedChunks

            part = StagedChunks(first, last, 0, header.blob_bytes)
            item = packed.item(offset - self._begin, part)
            if item is not None:
                assert packed.device.index is not None
                self._launch = Launch([WorkList([item], packed.device.index)], packed.device)

    def __call__(self, out: torch.Tensor) -> None:
        """Decode them, on the current stream: see `Materializer`."""
        target = out[self._offset : self._offset + self._size]
        if self._fill:
            repeat(self._packed, target)
            return
        if self._launch is None:
            host = target.numpy() if out.device.type == "cpu" else np.empty(self._size, np.uint8)
            self._packed.decode_on_host(self._begin, self._begin + self._size, host)
            if out.device.type != "cpu":
                target.copy_(torch.from_numpy(host))
            return
        self._launch(0, out.data_ptr(), not self._verified, 0)
        if not self._verified and not capturing(self._packed.device):
            self._launch.report([self._packed.name])
            self._verified = True
