"""Experts that a source fetches when their block wants them: in the forward pass, and again for gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import X, torch

from tpde.errors import PackedWeight
from tpde.nn import finish, pack_module, routing


class Fused(torch.nn.Module):
    """Experts, of whose weight something is kept for the backward pass."""

    work: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 96, 64), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.work(x, self.w)


class Fetches:
    """Decodes all experts, or leaves zeros, and notes which were wanted."""

    zeros = False

    def __init__(self, slot: Any) -> None:
        self.slot, self.wanted = slot, list[Any]()

    def fetch(self, numbers: Any, out: Any) -> None:
        self.wanted.append(list(numbers))
        self.slot.decode_into(out[self.slot.offset :])
        if self.zeros:
            out[self.slot.offset : self.slot.offset + self.slot.nbytes] = 0


@pytest.mark.parametrize(
    ("work", "most"),  # bytes that are decoded again
    [
        (lambda x, w: x @ w[2].t(), 96 * 128),
        (lambda x, w: x * w[3, 95], 128),
        (lambda x, w: x * w[0, ::5][1], 128),
        (lambda x, w: x @ w[1:3].transpose(0, 1)[7].t(), 100 * 128),
        (lambda x, w: x * w[1, :, 3][:64], 64 * 128),
        (lambda x, w: x @ w.view(384, 64).t(), 384 * 128),
        (lambda x, w: x * w[3, 95, 63], 2),
        (lambda x, w: x * w.view(-1)[8129:8193], 128),  # the last one is the first of a chunk
    ],
)
@pytest.mark.filterwarnings("ignore:which experts")
def test_of_experts_only_pieces_are_decoded_again(
    work: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Fused().to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    slot = ours.tpde_slots["w"]
    source = Fetches(slot)
    routing.route_experts(ours, source)
    finish(ours)
    asked: list[int] = []
    span = type(slot.packed).span
    monkeypatch.setattr(
        type(slot.packed), "span", lambda self, a, b: (asked.append(b - a), span(self, a, b))[1]
    )
    grads = []
    for model in (plain, ours):
        model.work = work
        x = X.clone().requires_grad_()
        model(x).float().square().sum().backward()
        grads.append(x.grad)
    assert_same_bits(grads[1], grads[0])
    assert source.wanted == [[0, 1, 2, 3]]
    assert asked
    assert max(asked) <= most
    assert not ours.tpde_group().workspace.some


def test_the_rest_of_a_routed_block_is_decoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are fetched when they are wanted, again for each call, and are there only then."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.experts = torch.nn.Linear(64, 64), Fused()

        def forward(self, x: Any) -> Any:
            return self.experts(self.experts(self.up(x)))

    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Mixed().to(torch.bfloat16)]).requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    slot = ours[0].experts.tpde_slots["w"]
    source = Fetches(slot)
    routing.route_experts(ours[0].experts, source)
    finish(ours)
    for model in (plain, ours):
        model[0].experts.work = lambda x, w: x @ w[2, :64]
    decoded: list[Any] = []
    into = type(slot.packed).decode_into
    monkeypatch.setattr(
        type(slot.packed), "decode_into", lambda self, out: (decoded.append(self), into(self, out))[1]
    )
    with torch.no_grad():
        assert_same_bits(ours[0](X), plain[0](X))
        assert source.wanted == [[0, 1, 2, 3]] * 2
        assert decoded == [slot.packed] * 2, "by the source, and by nobody else"
        one = ours[0].__dict__["tpde_forward"].group
        flat = one.materialize(torch.empty(0))  # compiled code has all of them
        assert_same_bits(slot.in_buffer(flat), plain[0].experts.w)
        up = ours[0].up.tpde_slots["weight"]
        assert_same_bits(up.in_buffer(flat), plain[0].up.weight)

        def touch(x: Any, w: Any) -> Any:
            ours[0].up.weight.detach().mul_(1)
            return x

        ours[0].experts.work, source.zeros = touch, True
        # Experts that are not there are no change.
        with pytest.raises(PackedWeight, match=r"`0\.up\.weight` is packed"):
            ours[0](X)


def test_experts_that_are_read_by_others_are_all_there() -> None:
    """By a block, which has not called them yet, or has."""

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.experts = torch.nn.Linear(64, 64), Fused()

        def forward(self, x: Any) -> Any:
            first = self.up(x) @ self.experts.w[1, :64]
            self.experts(x)
            return first + x @ self.experts.w[3, :64]

    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Reads().to(torch.bfloat16)]).requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    source = Fetches(ours[0].experts.tpde_slots["w"])
    source.zeros = True
    routing.route_experts(ours[0].experts, source)
    finish(ours)
    for model in (plain, ours):
        model[0].experts.work = lambda x, w: x
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert_same_bits(ours[0](X), plain[0](X))
