"""Which experts are not multiplied as they are packed, but decoded, and that this is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.experts import experts_of, ids, moe, packed
from support.models import assert_same_bits, torch

nn = torch.nn


def test_it_is_told_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    model.config._experts_implementation = "sonicmoe"
    made = packed(model)
    assert not any(it.multiplies for it in experts_of(made))
    assert "experts of `MixtralExperts` are decoded" in caplog.text
    assert "'sonicmoe' computes them" in caplog.text


def test_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    class OwnExperts(nn.Module):
        """Experts that nobody knows."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 64, 64).mul(0.02).bfloat16())

        def forward(self, x: Any) -> Any:
            return torch.einsum("ti,eoi->teo", x, self.weight)

    plain, x = OwnExperts(), torch.randn(3, 64).bfloat16()
    made = packed(plain)
    assert not made.weight.packed.multiplies
    assert (
        "experts of `OwnExperts` are decoded, and not multiplied as they are packed: their forward"
        in caplog.text
    )
    with torch.no_grad():
        assert_same_bits(made(x), plain(x))


def test_convolutions_are_no_experts(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Conv1d(64, 64, 3), nn.Flatten(), nn.Linear(640, 64)).bfloat16()
    made, x = packed(plain), torch.randn(2, 64, 12).bfloat16()
    assert not made[0].weight.packed.multiplies
    assert made[2].weight.packed.multiplies
    assert not caplog.text
    with torch.no_grad():
        assert_same_bits(made(x), plain(x))


def test_many_escapes_and_half_packed_modules_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    with torch.no_grad():
        it = model.model.layers[0].mlp.experts.down_proj
        it[:, :, ::2] = torch.exp2(torch.randint(-60, 60, it[:, :, ::2].shape).float()).bfloat16()
    made = packed(model)
    assert [it.multiplies for it in experts_of(made)][-2:] == [True, True]
    assert not any(it.multiplies for it in experts_of(made)[:-2])
    assert "MixtralExperts" in caplog.text
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, model(ids(2, 7)).logits)


def test_other_dtypes_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = moe("mixtral", dtype=torch.float32)
    made = packed(model)
    assert "the experts of" not in caplog.text
    assert "no weight is multiplied as it is packed" in caplog.text
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, model(ids(2, 7)).logits)


def test_shared_experts_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    one, two = (it.mlp.experts for it in model.model.layers)
    two.gate_up_proj, two.down_proj = one.gate_up_proj, one.down_proj
    made = packed(model)
    assert not any(it.multiplies for it in experts_of(made))
    assert "another module has their weights too" in caplog.text
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, model(ids(2, 7)).logits)
