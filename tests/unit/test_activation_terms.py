"""What a call needs for activations, term by term: states, scans, logits, experts, scores."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.experts import moe
from support.llama import llama

from tpde.integrations.transformers.activations import Activations, activations_of
from tpde.integrations.transformers.recurrent import Recurrent, Scan


class _Scan:
    def bytes(self, tokens: int, batch: int) -> int:
        return 7 * tokens * batch


ROOM = Activations(states=10, inside=0, pair=0, experts=0, logits=0, sampling=0)


def test_the_largest_of_what_follows_each_other() -> None:
    assert ROOM.tokens(100, 4) == 1000
    assert ROOM._replace(inside=3, pair=2).tokens(100, 4) == 1000 + 300 + 20_000
    assert ROOM._replace(logits=5, sampling=6).tokens(100, 4) == 1000 + 500 + 24
    assert ROOM._replace(sampling=6).tokens(3, 8) == 30 + 18, "no more sequences than tokens"
    scanning = Recurrent(states=0, scan=_Scan())  # type: ignore[arg-type]
    assert ROOM._replace(recurrent=scanning).tokens(100, 4) == 1000 + 2800
    every = ROOM._replace(inside=3, logits=5, recurrent=scanning)
    assert every.tokens(100, 4) == 1000 + 2800, "one after the other"


def test_copies_of_experts_come_on_top() -> None:
    copying = ROOM._replace(experts=11, copies=True)
    assert copying.bytes(100, 4) == 1000 + 44
    assert copying.bytes(2, 4) == 20 + 22
    assert copying._replace(copies=False).bytes(100, 4) == 1000


def test_activations_of_a_model() -> None:
    found = activations_of(llama(), 2)
    assert found.states == 64 * (2 * 2 + 3 * 4)
    assert found.inside == 2 * 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    assert (found.logits, found.sampling, found.experts) == (2000, 40_000, 0)
    scaled = llama()
    scaled.config.final_logit_softcapping = 30.0
    assert activations_of(scaled, 2).logits == 4000, "and a copy that is scaled"


# ---- terms that few models have ----


def test_the_larger_of_two_scans() -> None:
    one, other = Scan(1, 5.0, 3), Scan(4, 2.0, 6)
    assert one.most(other) == other.most(one) == Scan(4, 5.0, 6)
    assert Scan(7, 0.5, 11).bytes(10, 3) == 70 + 50 + 33


@pytest.mark.parametrize(
    ("named", "copies"),
    [
        ({}, 1),
        ({"final_logit_softcapping": None}, 1),
        ({"final_logit_softcapping": 30.0}, 2),
        ({"logit_scale": 0.25}, 2),
        ({"logits_scaling": 8.0}, 2),
        ({"output_multiplier": 2.0}, 2),
        ({"lm_head_multiplier": 2.0}, 2),
        ({"softcap": 20.0}, 2),
        ({"attn_logit_softcapping": 50.0}, 1),
        ({"router_logits_scale": 50.0}, 1),
        ({"logit_scale_init_value": 2.6}, 1),
    ],
)
def test_logits_that_are_scaled_are_there_twice(named: dict[str, Any], copies: int) -> None:
    model = llama()
    for name, value in named.items():
        setattr(model.config, name, value)
    assert activations_of(model, 2).logits == copies * 2000


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager", None])
def test_experts_are_copied_where_generate_does(implementation: str | None) -> None:
    for model, experts in ((llama(), False), (moe("mixtral"), True)):
        model.config._experts_implementation = implementation
        copies = experts and implementation in ("grouped_mm", "batched_mm")
        assert activations_of(model, 2).copies == copies


def test_attention_that_is_never_fused_has_scores() -> None:
    model = llama()
    assert activations_of(model, 2).pair == 1 + 2
    model.set_attn_implementation("eager")
    assert activations_of(model, 2).pair == 1 + 2 + 4 * (2 * 2 + 4)
