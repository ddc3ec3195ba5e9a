"""A device whose memory is the host's, on which the launches of `decode.cu` are functions of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.backends import MadeBackend, MadeKernel
from tpde.codec.blob import BlobReader
from tpde.cuda import items
from tpde.errors import Corrupt
from tpde.io.sources import BytesSource
from tpde.weights import launch, source
from tpde.weights.resident import Resident


def memory(address: int, size: int) -> np.ndarray:
    """Give the bytes at an address of this process."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class Card:
    """A CUDA device, number 0, for what decodes whole blobs: stands in for a `torch.device`.

    Attributes
    ----------
    launches : list of dict
        The macros of each launch so far, with its `stream`.
    uploads : int
        Copies to it so far.
    current : int
        The current device.
    recording : bool
        The current stream is recording a graph.
    """

    type, index = "cuda", 0

    def __init__(self, patch: pytest.MonkeyPatch, launch_on: Callable[[Any], Any]) -> None:
        self.launches: list[dict[str, int]] = []
        self.uploads, self.current, self.recording = 0, 0, False
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.recording)
        patch.setattr(torch.cuda, "device", self._switch)
        launch_on(MadeBackend(self.kernel))
        upload = launch.upload

        def counted(data: Any, device: Any) -> torch.Tensor:
            self.uploads += 1
            return upload(data, torch.device("cpu"))

        patch.setattr(launch, "upload", counted)
        patch.setattr(source, "upload", counted)

    def _switch(self, index: int) -> Any:
        card, before = self, self.current

        class Switch:
            def __enter__(self) -> None:
                card.current = index

            def __exit__(self, *error: object) -> None:
                card.current = before

        return Switch()

    def kernel(self, source: str, name: str, defines: dict[str, int], device: int) -> MadeKernel:
        """What decodes."""

        def run(stream: int, *arguments: Any) -> None:
            assert self.current == self.index
            self.launches.append({**defines, "stream": stream})
            self._decode_on(stream, bool(defines["CHECK"]), *(int(it) for it in arguments))

        return MadeKernel(lambda grid, block, shared: run)

    def _decode_on(self, stream: int, check: bool, *arguments: int) -> None:
        _decode(check, *arguments)


def _decode(
    check: bool, descriptors: int, count: int, chunks: int, base: int, out: int, status: int, *rooms: int
) -> None:
    """Do what `decode_items` does: the last damaged chunk of all stays in the report if none was there."""
    rows = memory(descriptors, count * items.DESCRIPTOR_BYTES).view(items._ITEM)
    assert int(rows["count"].sum()) == chunks
    for row in rows:
        size = int(row["high"])
        blob = memory((base + int(row["blob"])) % (1 << 64), size)
        reader = BlobReader(BytesSource(blob, "blob"), 0, size)
        first, word = int(row["begin"]), reader.header.word_bytes
        for chunk in range(first, first + int(row["count"])):
            begin, end = (word * it for it in reader.header.chunk_range(chunk, chunk))
            words = np.empty(end - begin, np.uint8)
            try:
                reader.decode(chunk, chunk, words)
            except Corrupt:
                report = memory(status, 16).view("<u4")
                if check and not report[0]:
                    report[:] = [1, int(row["number"]), chunk & 0xFFFFFFFF, chunk >> 32]
            memory((out + int(row["out"]) + begin) % (1 << 64), end - begin)[:] = words


class OnCard(Resident):
    """A blob on a card."""

    def __init__(self, blob: torch.Tensor, name: str, card: Card) -> None:
        self._card = card
        super().__init__(blob, name)

    @property
    def device(self) -> Any:
        """The card."""
        return self._card


class There(torch.Tensor):
    """Memory that says that it is a device's. What is brought from there is counted."""

    brought: list[int]

    @property
    def device(self) -> Any:
        """The first one."""
        return torch.device("cuda", 0)

    def cpu(self) -> Any:
        """Bring it."""
        There.brought.append(self.numel())
        return self.as_subclass(torch.Tensor)

    def numpy(self) -> Any:
        """Refuse."""
        raise AssertionError("of memory that is not here")
