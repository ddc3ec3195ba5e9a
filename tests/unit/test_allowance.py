"""Budgets of device memory: how they add up, end, and keep to the user's limit. The card is made up."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tpde.errors import OutOfMemory

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import DEVICE, GIB, OUTSIDE, Card  # noqa: E402

from tpde.memory.allowance import Allowance  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_budgets_add_up_and_end(card: Card) -> None:
    first = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert card.fraction == 1.0  # until it starts
    first.start()
    assert card.allowed == 4 * GIB - OUTSIDE
    card.reserved, card.free = 3 * GIB, 12 * GIB
    second = Allowance(DEVICE, 2 * GIB, OUTSIDE)
    assert second.others == 0  # they are the first one's
    second.start(GIB // 16)  # of which others take more, as its plan says
    assert card.allowed == 6 * GIB - 2 * OUTSIDE - GIB // 16
    first.close()
    first.close()
    assert card.allowed == 2 * GIB - OUTSIDE - GIB // 16
    second.close()
    assert card.fraction == 1.0


@pytest.mark.parametrize("while_", ["a budget ends", "a budget starts", "a budget is made"])
def test_garbage_that_is_collected_meanwhile_may_hold_a_budget(
    while_: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever allocates may set a collection off, which closes the budget of a dropped model."""
    dropped, other = Allowance(DEVICE, 2 * GIB, OUTSIDE), Allowance(DEVICE, 3 * GIB, OUTSIDE)
    dropped.start()
    if while_ == "a budget ends":
        other.start()
    fraction = torch.cuda.memory.get_per_process_memory_fraction

    def collecting(device: Any) -> float:
        dropped.close()
        return fraction(device)

    def work() -> None:
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", collecting)
        if while_ == "a budget ends":
            other.close()
        elif while_ == "a budget starts":
            other.start()
        else:
            Allowance(DEVICE, GIB, OUTSIDE)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert card.allowed == (3 * GIB - OUTSIDE if while_ == "a budget starts" else card.total)


def test_a_budget_that_was_never_started_ends_quietly(card: Card) -> None:
    first, other = Allowance(DEVICE, 4 * GIB, OUTSIDE), Allowance(DEVICE, 2 * GIB, OUTSIDE)
    first.start()
    other.close()
    assert card.allowed == 4 * GIB - OUTSIDE
    first.close()
    assert card.fraction == 1.0


def test_a_budget_below_its_fixed_part_is_left_to_the_plan(card: Card) -> None:
    """Which knows what else there must be, and names the least."""
    assert Allowance(DEVICE, OUTSIDE // 2, OUTSIDE).others == 0


# ---- what is free ----


def test_more_than_is_free(card: Card) -> None:
    card.free = 3 * GIB
    with pytest.raises(OutOfMemory, match=r"4\.00 GiB` is more than cuda:0 has: 3\.00 GiB of 16\.00 GiB"):
        Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert card.fraction == 1.0
    Allowance(DEVICE, 3 * GIB, OUTSIDE)


def test_a_budget_of_all_that_is_free(card: Card) -> None:
    card.free = 3 * GIB
    Allowance(DEVICE, 3 * GIB + OUTSIDE, OUTSIDE)
    with pytest.raises(OutOfMemory, match="is more than cuda:0 has"):
        Allowance(DEVICE, 3 * GIB + OUTSIDE + 1, OUTSIDE)
    card.keep(GIB)  # which counts towards the budget, and is there
    Allowance(DEVICE, 3 * GIB + OUTSIDE, OUTSIDE)


def test_budgets_may_add_up_to_more_than_a_card_where_the_user_has_set_no_limit(card: Card) -> None:
    """Each is what a model may take; whether so much is free is asked of the card."""
    Allowance(DEVICE, 12 * GIB, OUTSIDE).start()
    Allowance(DEVICE, 12 * GIB, OUTSIDE)


# ---- limits that others set ----


def test_the_users_limit_is_back_afterwards(card: Card) -> None:
    card.limit(0.3)
    before = card.fraction
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    made.start()
    assert card.allowed == 4 * GIB - OUTSIDE
    made.close()
    assert card.fraction == before


def test_the_users_limit_is_never_raised(card: Card) -> None:
    made = [Allowance(DEVICE, 4 * GIB, OUTSIDE) for _ in range(2)]
    made[0].start()
    card.limit(0.3)  # 4.8 GiB, while a budget is in force
    made[1].start()
    assert card.allowed == int(0.3 * card.total)
    made[0].close()
    assert card.allowed == 4 * GIB - OUTSIDE
    made[1].close()
    assert card.allowed == int(0.3 * card.total)


def test_a_limit_that_the_user_sets_meanwhile_stays(card: Card) -> None:
    for fraction in (0.1, 0.9):
        made = Allowance(DEVICE, GIB, OUTSIDE)
        made.start()
        card.limit(fraction)
        made.close()
        assert card.allowed == int(fraction * card.total)


def test_more_than_the_users_limit(card: Card) -> None:
    card.limit(0.25)
    Allowance(DEVICE, 4 * GIB, OUTSIDE)
    with pytest.raises(OutOfMemory, match=r"may allocate 4\.00 GiB, by `torch.cuda.set_per_process"):
        Allowance(DEVICE, 5 * GIB, OUTSIDE)
    Allowance(DEVICE, 3 * GIB, OUTSIDE).start()
    with pytest.raises(OutOfMemory, match=r"may allocate 1\.12 GiB, by"):
        Allowance(DEVICE, 2 * GIB, OUTSIDE)


def test_a_budget_of_all_that_the_user_allows(card: Card) -> None:
    card.limit(0.25)
    Allowance(DEVICE, 4 * GIB + OUTSIDE, OUTSIDE)
    with pytest.raises(OutOfMemory, match=r"by `torch\.cuda\.set_per_process"):
        Allowance(DEVICE, 4 * GIB + OUTSIDE + 1, OUTSIDE)


def test_a_limit_that_is_set_after_a_budget_has_ended_is_the_users(card: Card) -> None:
    """Also where it is the one that the budget had set."""
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    made.start()
    ours = card.fraction
    made.close()
    card.limit(ours)
    other = Allowance(DEVICE, GIB, OUTSIDE)
    other.start()
    other.close()
    assert card.fraction == ours


def test_a_pytorch_that_tells_no_limits(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda.memory, "get_per_process_memory_fraction")
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    made.start()
    assert card.allowed == 4 * GIB - OUTSIDE
    made.close()
    assert card.fraction == 1.0


# ---- budgets of one model ----


def test_others_come_on_top_of_one_models_budget(card: Card) -> None:
    card.reserved, card.free, before = 2 * GIB, 12 * GIB, card.fraction
    made = Allowance(DEVICE, 4 * GIB, OUTSIDE, whole=False)
    assert made.others == 0
    made.start()
    assert card.fraction == before
    card.reserved = 6 * GIB
    whole = Allowance(DEVICE, 4 * GIB, OUTSIDE)
    assert whole.others == 2 * GIB + OUTSIDE  # what is the other model's is not counted
    made.close()
    assert card.fraction == before


def test_a_budget_of_the_process_grows_by_one_models(card: Card) -> None:
    whole, made = Allowance(DEVICE, 4 * GIB, OUTSIDE), Allowance(DEVICE, 2 * GIB, OUTSIDE, whole=False)
    whole.start()
    made.start()
    assert card.allowed == 6 * GIB - 2 * OUTSIDE
    whole.close()
    assert card.fraction == 1.0
    whole.start()
    made.close()
    assert card.allowed == 4 * GIB - OUTSIDE


def test_one_models_budget_needs_memory_too(card: Card) -> None:
    card.reserved, card.free = 2 * GIB, 3 * GIB
    with pytest.raises(OutOfMemory, match="is more than cuda:0 has"):
        Allowance(DEVICE, 4 * GIB, OUTSIDE, whole=False)
    card.free = 14 * GIB
    card.limit(0.25)
    with pytest.raises(OutOfMemory, match=r"may allocate 2\.00 GiB, by"):
        Allowance(DEVICE, 4 * GIB, OUTSIDE, whole=False)
