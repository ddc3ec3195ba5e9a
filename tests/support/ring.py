"""A file of packed tensors, a streamer over it on a simulated device, and what reads rows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.models import torch
from support.packed import pack
from support.simulated import MemoryFeed, SimulatedDevice, probed
from tpde.format.container import TensorSpec
from tpde.io.sources import Extent, FileSource
from tpde.streaming.damage import DecodedPieces
from tpde.streaming.retained import Retained
from tpde.streaming.streamed_source import Streamed
from tpde.streaming.streamer import StreamedUnit, Streamer
from tpde.weights.launch import Launch
from tpde.weights.rows import RowReader

CPU = torch.device("cpu")
ROOM = 128 << 10


def weights(words: int, seed: int) -> bytes:
    """Normal numbers in bf16."""
    values = np.random.default_rng(seed).normal(size=words).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


class Fixture:
    """A file of packed tensors, and a streamer over it.

    Attributes
    ----------
    probe : Probe
        The streamer's lock.
    """

    def __init__(
        self,
        folder: Path,
        sizes: list[int],
        places: int = 4,
        offset: int = 0,
        apart: int = 0,
        keep: int = 0,
        kind: Callable[..., Any] = SimulatedDevice,
        **device: object,
    ) -> None:
        self.data, extents, at = [], [], offset
        self.path = folder / "model.bin"
        with self.path.open("wb") as file:
            for i, size in enumerate(sizes):
                self.data.append(weights(size, i))
                packed = pack(TensorSpec("BF16", (size,)), self.data[-1])
                assert packed is not None
                file.seek(at)
                file.write(packed.blob.tobytes())
                extents.append((at, packed.blob.size))
                at += -(-packed.blob.size // 256) * 256 + apart
        self.source = FileSource(self.path)
        self.feed = MemoryFeed()
        self.device = kind(places * ROOM + keep, **device)
        retained = Retained[DecodedPieces](places * ROOM, keep, self.source.size)
        self.streamer, self.probe = probed(lambda: Streamer(self.device, places, ROOM, retained))
        self.streamer.own(self.feed, self.source)
        self.tensors = [
            Streamed(Extent(self.source, at, size, f"t{i}"), self.streamer, CPU, self.feed)
            for i, (at, size) in enumerate(extents)
        ]

    def units(self, *groups: tuple[int, ...]) -> list[tuple[StreamedUnit, bytes]]:
        """Units of tensors by their numbers, and the bytes that each must give."""
        made = []
        for group in groups:
            items, expected = [], b""
            for i in group:
                items.append((self.tensors[i], len(expected)))
                expected += self.data[i].ljust(-(-len(self.data[i]) // 512) * 512, b"\xa5")
            made.append((self.streamer.unit(items), expected))
        return made

    def __enter__(self) -> Fixture:
        return self

    def __exit__(self, *error: object) -> None:
        self.streamer.close()


def filled(unit: StreamedUnit, size: int) -> bytes:
    out = torch.full((size,), 0xA5, dtype=torch.uint8)
    unit(out)
    return bytes(out.numpy().tobytes())


SIZES = [150_000, 40_000, 300_000, 3000, 90_000, 250_000]


def sized(unit: tuple[StreamedUnit, bytes]) -> tuple[StreamedUnit, int]:
    return unit[0], len(unit[1])


def replace_shape(header: Any, shape: tuple[int, ...]) -> Any:
    return dataclasses.replace(header, spec=TensorSpec(header.spec.dtype, shape))


class Rows(RowReader):
    """One whose kernel says that chunk 7 is damaged, if it is to look, and the device has come so far."""

    def __init__(self, packed: Streamed) -> None:
        super().__init__(packed)
        self._verified, self.checked = True, list[bool]()
        self._reports = torch.zeros(1, 4, dtype=torch.int32)
        nothing = SimpleNamespace(descriptors=np.zeros(0, np.uint8), launch=None)
        self._rows = Launch([nothing], CPU, self._reports)

    def _launch(self, ids: torch.Tensor, out: torch.Tensor, check: bool) -> None:
        self.checked.append(check)

    def find(self) -> None:
        self._reports[0] = torch.tensor([1, 0, 7, 0], dtype=torch.int32)
