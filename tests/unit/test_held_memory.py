"""What PyTorch holds of a card, and how much of it counts towards a budget. The card is made up."""

from __future__ import annotations

from typing import Any

import pytest

from tpde.errors import OutOfMemory

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, MIB, OUTSIDE, Card  # noqa: E402

from tpde.memory import allowance  # noqa: E402
from tpde.memory.allowance import Allowance  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_what_was_allocated_before_counts(card: Card) -> None:
    card.reserved, card.free = GIB, 3 * GIB
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert made.others == GIB
    made.start()
    assert card.allowed == 4 * GIB - OUTSIDE


def test_what_was_allocated_for_the_same_model_does_not_count(card: Card) -> None:
    card.reserved, card.free = GIB, 3 * GIB
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE, reserved=GIB // 4)
    assert made.others == GIB // 4
    with pytest.raises(OutOfMemory, match=r"3\.75 GiB of 16\.00 GiB are free"):
        Allowance(DEVICE, 5 * GIB, OUTSIDE, reserved=GIB // 4)
    assert Allowance(DEVICE, 3 * GIB, OUTSIDE, reserved=2 * GIB).others == GIB  # some was given back since


# ---- segments that PyTorch keeps ----


def test_what_pytorch_can_use_again_does_not_count(card: Card) -> None:
    """A plain model of 10 GiB was there; a workspace of 2 MiB keeps its segment."""
    card.keep(2 * MIB, 10 * GIB)
    made = Allowance(DEVICE, 12 * GIB, OUTSIDE)
    assert made.others == 2 * MIB
    assert made.held == (2 * MIB, 10 * GIB, 0)
    made.start()
    assert card.allowed == 12 * GIB - OUTSIDE
    # 5 GiB are free, and 10 in the segment.
    Allowance(DEVICE, 15 * GIB, OUTSIDE)
    with pytest.raises(OutOfMemory, match=r"15\.00 GiB of 16\.00 GiB are free"):
        Allowance(DEVICE, 16 * GIB, OUTSIDE)


def test_a_budget_below_what_pytorch_keeps(card: Card) -> None:
    card.keep(2 * MIB, 10 * GIB)
    says = (
        r"`vram=8\.00 GiB` is less than .* cuda:0 already: PyTorch holds 10\.00 GiB, 0\.00 GiB of it in "
        r"tensors and 10\.00 GiB unused, and keeps whole .* at least 10\.13 GiB, delete"
    )
    with pytest.raises(OutOfMemory, match=says):
        Allowance(DEVICE, 8 * GIB, OUTSIDE)
    Allowance(DEVICE, 10 * GIB + OUTSIDE + 2 * MIB, OUTSIDE).start()
    assert card.allowed == card.reserved  # the promise holds
    Allowance(DEVICE, 4 * GIB, OUTSIDE, whole=False)  # which limits nobody


@pytest.mark.parametrize(
    ("hole", "options"),
    [(31 * MIB, {}), (GIB, {"stream": 7}), (GIB, {"pool": (0, 1)})],
    ids=["too small", "another stream's", "a CUDA graph's"],
)
def test_holes_that_are_of_no_use_count(hole: int, options: dict[str, Any], card: Card) -> None:
    card.keep(2 * MIB, hole, 32 * MIB)
    card.keep(MIB, hole, **options)
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    small = hole if hole < 32 * MIB else 0
    assert made.others == 3 * MIB + hole + small
    assert made.held.reusable == 32 * MIB + hole - small


def test_a_budget_of_all_that_pytorch_keeps(card: Card) -> None:
    card.keep(GIB)
    assert Allowance(DEVICE, GIB + OUTSIDE, OUTSIDE).others == GIB
    with pytest.raises(OutOfMemory, match="is less than this process has") as caught:
        Allowance(DEVICE, GIB + OUTSIDE - 1, OUTSIDE)
    assert caught.value.least == caught.value.needed == GIB + OUTSIDE
    assert caught.value.found == GIB + OUTSIDE - 1


# ---- what a device holds ----


def test_what_pytorch_can_give_back_is_given_back_first(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.reserved, card.allocated = 5 * GIB, 2 * GIB

    def empty_cache() -> None:
        card.reserved = 2 * GIB

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert allowance.held(DEVICE) == (2 * GIB, 0, 0)
    assert Allowance(DEVICE, 4 * GIB, OUTSIDE).others == 2 * GIB


def test_holes_of_another_device_do_not_count(card: Card) -> None:
    card.keep(MIB, GIB)
    card.segments[0]["device"] = 1
    assert allowance.held(DEVICE) == (MIB, 0, GIB)


def test_segments_of_a_pytorch_that_names_no_pools(card: Card) -> None:
    card.keep(MIB, GIB)
    del card.segments[0]["segment_pool_id"]
    assert allowance.held(DEVICE) == (MIB, GIB, 0)


def test_memory_in_use_is_no_hole(card: Card) -> None:
    card.keep(GIB, 32 * MIB)
    found = allowance.held(DEVICE)
    assert found == (GIB, 32 * MIB, 0)
    assert (found.counted, found.reserved) == (GIB, GIB + 32 * MIB)
    # A snapshot of another moment may have more holes than there is.
    card.reserved = GIB + 33 * MIB
    card.segments[0]["blocks"].append({"size": GIB, "state": "inactive"})
    assert allowance.held(DEVICE).rest == 0


def test_what_is_held_is_told() -> None:
    assert allowance.describe(allowance.Held(GIB, 0, 0)) == "1.00 GiB in tensors"
    for idle in ((GIB, 0), (0, GIB)):
        found = allowance.describe(allowance.Held(2 * GIB, *idle))
        assert found == "3.00 GiB, 2.00 GiB of it in tensors and 1.00 GiB unused"
