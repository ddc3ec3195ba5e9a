"""Budgets of device memory, with a card that is made up."""

from __future__ import annotations

from typing import Any

import pytest

from tpde.errors import OutOfMemory

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.integrations import allowance  # noqa: E402

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)
OUTSIDE = GIB // 8


class Card:
    """What the driver and PyTorch's allocator say, and what they were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.free, self.reserved, self.fraction = 16 * GIB, 15 * GIB, 0, 1.0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(cuda, "memory_reserved", lambda _: self.reserved)
        monkeypatch.setattr(cuda, "mem_get_info", lambda _: (self.free, self.total))
        properties = type("P", (), {"total_memory": self.total})
        monkeypatch.setattr(cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(cuda.memory, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(allowance, "_shares", {})

    def limit(self, fraction: float, _: Any) -> None:
        self.fraction = fraction

    @property
    def allowed(self) -> int:
        return round(self.fraction * self.total)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_budgets_add_up_and_end(card: Card) -> None:
    first = allowance.Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert card.fraction == 1.0  # until it starts
    first.start()
    assert card.allowed == 4 * GIB - OUTSIDE
    card.reserved, card.free = 3 * GIB, 12 * GIB
    second = allowance.Allowance(DEVICE, 2 * GIB, OUTSIDE)
    assert second.others == 0  # they are the first one's
    second.start()
    assert card.allowed == 6 * GIB - 2 * OUTSIDE
    first.close()
    first.close()
    assert card.allowed == 2 * GIB - OUTSIDE
    second.close()
    assert card.fraction == 1.0


def test_what_was_allocated_before_counts(card: Card) -> None:
    card.reserved, card.free = GIB, 3 * GIB
    made = allowance.Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert made.others == GIB
    made.start()
    assert card.allowed == 4 * GIB - OUTSIDE


def test_more_than_is_free(card: Card) -> None:
    card.free = 3 * GIB
    with pytest.raises(OutOfMemory, match=r"4\.00 GiB` is more than cuda:0 has: 3\.00 GiB of 16\.00 GiB"):
        allowance.Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert card.fraction == 1.0
    allowance.Allowance(DEVICE, 3 * GIB, OUTSIDE)
