"""Experts of two blobs each in a file, and a store that fetches them to a simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.packed import pack
from support.simulated import MemoryFeed, SimulatedDevice
from tpde.format.container import TensorSpec
from tpde.io.sources import Extent, FileSource
from tpde.nn import PackedParameter, PackedTensor
from tpde.nn.slot import Slot
from tpde.streaming.experts import ExpertStore, expert_room
from tpde.streaming.streamed_source import Streamed
from tpde.streaming.streamer import Streamer

CPU = torch.device("cpu")
PIECE = 32 << 10


class Fixture:
    """Experts of two blobs each, in a file, and a store for them."""

    def __init__(
        self, folder: Path, experts: int, places: int, kind: Any = SimulatedDevice, **device: Any
    ) -> None:
        self.data, blobs, at = [], [], 0
        path = folder / "experts.bin"
        with path.open("wb") as file:
            for i in range(2 * experts):
                values = np.random.default_rng(i).normal(size=20_000).astype(np.float32)
                data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
                packed = pack(TensorSpec("BF16", (100, 200)), data)
                assert packed is not None
                file.seek(at)
                file.write(packed.blob.tobytes())
                self.data.append(np.frombuffer(data, np.uint8))
                blobs.append((at, packed.blob.size))
                at += -(-packed.blob.size // 256) * 256
        self.source, self.feed = FileSource(path), MemoryFeed()
        self.device = kind(4 << 20, **device)
        streamer = Streamer(self.device, 0, 0)  # brings nothing
        made = [
            Streamed(Extent(self.source, *place, f"e{i}"), streamer, CPU, self.feed)
            for i, place in enumerate(blobs)
        ]
        shape = (experts, 100, 200)
        self.slots = [
            Slot(name, PackedParameter(PackedTensor([made[2 * e + i] for e in range(experts)], shape)))
            for i, name in enumerate(("up", "down"))
        ]
        self.slots[1].offset = 1 << 20
        room = expert_room(self.slots, PIECE)
        self.store = ExpertStore(self.device, 512, places * room, room, PIECE)
        self.experts = self.store.module(self.slots)
        self.out = torch.full((2 << 20,), 0xFF, dtype=torch.uint8)

    def wrong(self, numbers: list[int]) -> list[int]:
        """Which of some experts are not in their places in the buffer."""
        found = self.out.numpy()
        return [
            e
            for e in numbers
            for i, slot in enumerate(self.slots)
            if not np.array_equal(found[slot.offset + 40_000 * e :][:40_000], self.data[2 * e + i])
        ]

    def close(self) -> None:
        self.device.close()
        self.source.close()
