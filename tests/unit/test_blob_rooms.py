"""Rooms that blobs are read to: how large they are, which are kept, and which are given back first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.noted_reading import NotedReader, decode  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import tpde.torch as packed_torch  # noqa: E402
from tpde.io.sources import Extent  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.plain_weights import SCRATCH_LEAST  # noqa: E402
from tpde.loading.reading import Reader  # noqa: E402


class Rooms:
    """Notes the rooms that blobs are read to: how large, and that the one before is gone by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self._rooms: list[StorageWeakRef] = []
        self._beside: dict[int, bool] = {}  # by addresses: a room was there when this was allocated
        empty = torch.empty

        def noted(*args: Any, **options: Any) -> Any:
            beside = not all(it.expired() for it in self._rooms)
            made = empty(*args, **options)
            self._beside[made.data_ptr()] = beside
            return made

        monkeypatch.setattr(torch, "empty", noted)

    def reader(self, device: Any) -> Reader:
        """What reads."""
        return NotedReader(device, note=self._read)

    def _read(self, tensors: Sequence[Any], extents: Sequence[Extent]) -> None:
        room = tensors[0].untyped_storage()
        if self._rooms and not self._rooms[-1].expired():
            return
        assert not self._beside[room.data_ptr()], "the room before is still there"
        self.sizes.append(room.nbytes())
        self._rooms.append(StorageWeakRef(room))


def rooms_for(widths: Sequence[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], ...]:
    """Decode one row after the other; gives the rooms that were taken, and those that the blobs need."""
    rows = {f"{i}.weight": torch.randn(1, it).to(torch.bfloat16) for i, it in enumerate(widths)}
    packed_torch.save_file(rows, folder / "rows.safetensors")
    with torch.device("meta"):
        made = [torch.nn.Linear(it, 1, bias=False, dtype=torch.bfloat16) for it in widths]
    rooms = Rooms(monkeypatch)
    with Checkpoint([folder / "rows.safetensors"]) as checkpoint:
        decode(torch.nn.Sequential(*made), checkpoint, 0, rooms.reader)
        return rooms.sizes, [-(-checkpoint.packed[it].extent.size // 256) * 256 for it in rows]


def test_the_room_before_is_given_back_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than twice as much as is needed does not stay, nor do the blobs that were there."""
    rooms, needed = rooms_for([SCRATCH_LEAST, 9000, 9000], tmp_path, monkeypatch)
    assert needed[0] > SCRATCH_LEAST
    assert rooms == [needed[0], max(needed[1:])]


def test_a_small_room_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares a segment of the allocator with others, and would not go back."""
    rooms, needed = rooms_for([90_000, 9000, 8000], tmp_path, monkeypatch)
    assert rooms == [needed[0]]
    assert needed[0] > 2 * needed[1]
