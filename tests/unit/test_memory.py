"""Device memory: what is free, and what is said when it does not do. The card is made up."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, Card  # noqa: E402

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.memory import device_memory  # noqa: E402
from tpde.memory.device_memory import allocate, free_bytes, require  # noqa: E402
from tpde.nn.workspace import Workspace  # noqa: E402
from tpde.streaming.cuda_device import CudaDevice  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_too_little_device_memory(card: Card) -> None:
    card.free, card.reserved, card.allocated = 3 * GIB, 2 * GIB, GIB
    require(4 * GIB, DEVICE, "the model")
    with pytest.raises(OutOfMemory, match=r"the model needs 5\.00 GiB on cuda:0, 4\.00 GiB are free"):
        require(5 * GIB, DEVICE, "the model")
    require(1 << 60, CPU, "the model")  # the system decides


def test_a_limit_counts(card: Card) -> None:
    card.free, card.reserved, card.allocated = 8 * GIB, 2 * GIB, GIB
    assert free_bytes(DEVICE) == 9 * GIB
    card.limit(0.25)
    assert free_bytes(DEVICE) == 3 * GIB
    card.limit(1 / 32)
    assert free_bytes(DEVICE) == 0


def test_running_out(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.limit(0.25)
    card.reserved = card.allocated = 3 * GIB
    card.exhaust(monkeypatch, 100)
    assert allocate(99, CPU, "a little").numel() == 99
    with pytest.raises(
        OutOfMemory,
        match=r"much needs 2\.00 GiB on cuda:0, 1\.00 GiB are free of the 4\.00 GiB .*another `vram`",
    ):
        allocate(2 * GIB, DEVICE, "much")
    with pytest.raises(OutOfMemory, match=r"1\.00 GiB are free but not in one piece of"):
        allocate(GIB, DEVICE, "some")


def test_no_room_for_the_ring(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    card.exhaust(monkeypatch, GIB)
    said = "the room that packed weights are copied to needs 2.00 GiB on cuda:0, 15.00 GiB are free"
    with pytest.raises(OutOfMemory, match=re.escape(said)):
        CudaDevice(DEVICE, 2 * GIB)


def test_no_room_for_the_workspace(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(CPU)
    space.reserve(1 << 20)
    with monkeypatch.context() as patch:
        card.exhaust(patch, 2 << 20)
        with pytest.raises(OutOfMemory, match=r"the workspace that weights are decoded to needs 0\.00 GiB"):
            space.reserve(2 << 20)
        assert space.buffer is None
    space.reserve(0)
    assert space.buffer is not None
    assert space.buffer.numel() == 2 << 20


def test_what_is_free_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.keep(2 * GIB, 1 * GIB)
    assert free_bytes(DEVICE) == card.free + 1 * GIB
    card.limit(0.5)
    assert free_bytes(DEVICE) == card.total // 2 - 2 * GIB
    require(free_bytes(DEVICE), DEVICE, "it")
    with pytest.raises(OutOfMemory, match=r"it needs 6\.00 GiB on cuda:0, 6\.00 GiB are free"):
        require(free_bytes(DEVICE) + 1, DEVICE, "it")


def test_buffers_made_in_inference_mode_are_ordinary() -> None:
    with torch.inference_mode():
        made = allocate(64, torch.device("cpu"), "it")
    assert not made.is_inference()


def test_a_pytorch_that_tells_no_limits(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.limit(0.25)
    assert device_memory.memory_limit(DEVICE) == 4 * GIB
    monkeypatch.delattr(torch.cuda.memory, "get_per_process_memory_fraction")
    assert device_memory.memory_fraction(DEVICE) is None
    assert device_memory.memory_limit(DEVICE) == 16 * GIB


@pytest.mark.parametrize(
    ("device", "said", "error"),
    [
        (CPU, "DefaultCPUAllocator: can't allocate memory", OutOfMemory),
        (CPU, "refused", RuntimeError),
        (DEVICE, "refused", RuntimeError),
    ],
)
def test_other_errors_of_an_allocation(
    device: torch.device, said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU they are no lack of memory, nor what the host's allocator does not say."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(error) as caught:
        allocate(3 * GIB, device, "it")
    assert type(caught.value) is error
    if error is OutOfMemory:
        assert "it needs 3.00 GiB of host memory, and the system refused" in str(caught.value)
        assert caught.value.needed == 3 * GIB


def test_what_is_needed_and_what_is_there_is_for_programs_too(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.exhaust(monkeypatch, 1)
    for refused in (require, allocate):
        with pytest.raises(OutOfMemory) as caught:
            refused(20 * GIB, DEVICE, "it")
        error = caught.value
        assert (error.where, error.found, error.needed) == ("cuda:0", 15 * GIB, 20 * GIB)
