"""Memory that extents are read to: blocks of a GPU, pieces of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, Card  # noqa: E402

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.loading.reading import Extent, Reader, read_extents  # noqa: E402

CPU = torch.device("cpu")


class Allocator:
    """Notes what is allocated, and on which device; all of it is on the CPU.

    Attributes
    ----------
    fails : callable
        Called with the number of bytes; raises what the allocation does.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], None] = lambda _: None
    ) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.fails, self._empty = fails, torch.empty
        monkeypatch.setattr(torch, "empty", self)

    def __call__(self, size: int, *, dtype: Any, device: Any) -> Any:
        self.sizes.append((str(device), size))
        self.fails(size)
        return self._empty(size, dtype=dtype)


MIB = 1 << 20


def allocated(sizes: Sequence[int], device: Any) -> list[Any]:
    """Give the tensors that extents of these sizes are read to."""
    extents = []
    for size in sizes:
        source: Any = SimpleNamespace(name="file", size=size, read_into=lambda *_: None)
        extents.append(Extent(source, 0, size, "x"))
    return read_extents(extents, device, make_reader=lambda _: Reader(CPU))


def test_large_tensors_come_out_of_one_block_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each a multiple of 512 bytes; small ones come out of the allocator's small blocks."""
    made = Allocator(monkeypatch)
    sizes = [MIB, 3 * MIB + 1, 5, MIB + 512]
    with torch.inference_mode():
        tensors = allocated(sizes, DEVICE)
    assert made.sizes == [("cuda:0", it) for it in (4 * MIB + 1024, *sizes)]
    assert [it.numel() for it in tensors] == sizes
    assert not any(it.is_inference() for it in tensors)
    for device, wanted in ((DEVICE, [MIB, 7]), (CPU, [2 * MIB])):
        made.sizes.clear()
        allocated(wanted, device)
        assert made.sizes == [(str(device), it) for it in wanted]


def _no_more_than(most: int) -> Callable[[int], None]:
    def fails(size: int) -> None:
        if size > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    return fails


def test_memory_in_pieces_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch, _no_more_than(2 * MIB))
    assert [it.numel() for it in allocated([2 * MIB, 2 * MIB], DEVICE)] == [2 * MIB, 2 * MIB]


def test_weights_that_do_not_fit_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    Allocator(monkeypatch, _no_more_than(GIB))
    with pytest.raises(
        OutOfMemory, match=r"need 4\.00 GiB on cuda:0; 15\.00 GiB are free, but not in one"
    ) as one:
        allocated([2 * GIB, 2 * GIB], DEVICE)
    assert (one.value.where, one.value.needed) == ("cuda:0", 4 * GIB)
    card.free = 3 * GIB
    with pytest.raises(
        OutOfMemory, match=r"the packed weights needs 4\.00 GiB on cuda:0, 3\.00 GiB are free"
    ):
        allocated([2 * GIB, 2 * GIB], DEVICE)


@pytest.mark.parametrize(
    ("device", "said", "error"),
    [
        (CPU, "you tried to allocate 12 bytes", OutOfMemory),
        (CPU, "an illegal instruction", RuntimeError),
        (DEVICE, "CUDA cannot allocate: illegal memory access", RuntimeError),
    ],
)
def test_what_a_system_refuses(
    device: Any, said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(size: int) -> None:
        raise RuntimeError(said)

    Allocator(monkeypatch, fails)
    with pytest.raises(error) as caught:
        allocated([12], device)
    assert type(caught.value) is error
    if error is OutOfMemory:
        assert "host memory, and the system refused" in str(caught.value)
        assert caught.value.needed == 12
    else:
        assert str(caught.value) == said
