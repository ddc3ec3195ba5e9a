"""Blobs that lie on a device: what is brought of them, and where they are aligned. The device is made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.contents import fill
from support.kernels import Card, There
from support.packed import pack

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.errors import Corrupt  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.weights import resident  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402
from tpde.weights.resident import Resident  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> Card:
    return Card(monkeypatch, launch_on)


def _there(card: Card, shape: tuple[int, int] = (30, 20_001)) -> tuple[Any, bytes]:
    There.brought = []
    spec = TensorSpec("BF16", shape)
    data = fill("normal", spec)
    packed = pack(spec, data, "prefix")
    assert packed is not None
    return torch.from_numpy(packed.blob.copy()), data


@pytest.mark.parametrize("start", [resident._START_BYTES, 256])
def test_of_a_blob_on_a_device_its_head_is_brought(
    start: int, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_START_BYTES", start)
    blob, data = _there(card)
    packed = Resident(blob.as_subclass(There), "w")
    assert packed.device == torch.device("cuda", 0)
    head = packed.header.chunks_at
    assert There.brought == ([start] if start > head else [start, head])
    There.brought.clear()
    for begin, end in ((0, 1000), (20_000, 60_000)):
        out = np.zeros(end - begin, np.uint8)
        packed.decode_on_host(begin, end, out)
        assert out.tobytes() == data[begin:end]
    assert There.brought == [blob.numel()], "once, and kept"


@pytest.mark.parametrize("at", [0, 300, -8])
def test_a_damaged_head_on_a_device_is_told_of(at: int, card: Card) -> None:
    blob, _ = _there(card)
    header = Resident(blob.clone(), "w").header
    blob[at if at >= 0 else header.chunks_at - 8] ^= 1
    with pytest.raises(Corrupt, match="`w`") as caught:
        Resident(blob.as_subclass(There), "w")
    assert caught.value.tensor == "w"


def test_a_blob_that_moves_to_a_device_is_aligned_there(card: Card) -> None:
    blob, data = _there(card)
    packed = PackedTensor(Resident(blob, "w"))
    room = torch.zeros(blob.numel() + 64, dtype=torch.uint8)
    shift = -room.data_ptr() % 16 + 8
    there = room[shift : shift + blob.numel()].copy_(blob)
    packed.apply(lambda it: (there if it.numel() == blob.numel() else it).as_subclass(There))
    (source,) = packed.sources
    assert source.blob.data_ptr() % 16 == 0
    assert packed.device.type == "cuda"
    out = np.zeros(1000, np.uint8)
    source.decode_on_host(0, 1000, out)
    assert out.tobytes() == data[:1000]
