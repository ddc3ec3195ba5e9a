"""Models whose experts are in the window layout: on the CPU all is as with plain weights."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
from support.experts import NAMES, WAYS, experts_of, fused_model, ids, layers, moe, packed, plain_model  # noqa: F401
from support.models import assert_same_bits, torch

import tpde
from tpde.errors import PackedWeight
from tpde.nn import PackedParameter, add_deltas, modules, plain_state_dict, set_kernels, unpack_module
from tpde.weights.expert_products import Experts
from tpde.weights.windowed_experts import WindowedExperts

nn = torch.nn


def stored(model: Any) -> list[bytes]:
    return [source.stored().numpy().tobytes() for it in experts_of(model) for source in it.sources]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_files_are_the_plain_model_s(name: str, how: str) -> None:
    plain = moe(name, how)
    exact = packed(plain, "exact")
    before = stored(exact)
    model = set_kernels(exact, "fused")
    assert [it.multiplies for it in experts_of(model)] == [True] * 4
    assert all(isinstance(it.sources[0], WindowedExperts) for it in experts_of(model))
    for batch, length in ((1, 1), (2, 9), (3, 40)):
        with torch.no_grad():
            assert_same_bits(model(ids(batch, length)).logits, plain(ids(batch, length)).logits)
        assert_same_bits(model(ids(batch, length)).logits, plain(ids(batch, length)).logits)
    assert stored(model) == before
    for key, value in plain.state_dict().items():
        assert_same_bits(plain_state_dict(model)[key], value, key)
    set_kernels(model, "exact")
    assert not any(it.multiplies for it in experts_of(model))
    with torch.no_grad():
        assert_same_bits(model(ids(2, 9)).logits, plain(ids(2, 9)).logits)
    assert stored(model) == before


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_inputs(name: str, how: str) -> None:
    plain = moe(name, how)
    model, found = packed(plain), []
    for it in (plain, model):
        x = plain.get_input_embeddings()(ids(2, 5)).detach().requires_grad_()
        it(inputs_embeds=x).logits.float().square().sum().backward()
        norm = it.model.norm.weight
        found.append((x.grad, norm.grad))
        norm.grad = None
    assert_same_bits(*found)


def test_only_chosen_experts_are_decoded(plain: Any, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Experts.decode_some, []

    def decode_some(self: Experts, numbers: Any, out: Any) -> None:
        seen.append(list(numbers))
        real(self, numbers, out)

    monkeypatch.setattr(Experts, "decode_some", decode_some)
    with torch.no_grad():
        assert_same_bits(fused(ids(1, 1)).logits, plain(ids(1, 1)).logits)
    assert len(seen) == 4
    assert all(len(it) == 2 for it in seen)


def test_blocks_do_not_decode_them(fused: Any) -> None:
    for module in layers(fused):
        slots = list(module.tpde_slots.values())
        assert all(it.group is module.__dict__["tpde_own_group"] for it in slots)
        assert slots[0].group.slots == slots


def test_twice_is_once(fused: Any) -> None:
    before = [it.sources[0] for it in experts_of(fused)]
    groups = [slot.group for it in layers(fused) for slot in it.tpde_slots.values()]
    set_kernels(fused, "fused")
    assert [it.sources[0] for it in experts_of(fused)] == before
    assert [slot.group for it in layers(fused) for slot in it.tpde_slots.values()] == groups


@pytest.mark.parametrize("theirs", ["exact", "fused"])
@pytest.mark.parametrize("mine", ["exact", "fused"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_either_kind(plain: Any, mine: Any, theirs: Any, assign: bool) -> None:
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for it in other.parameters():
            it.mul_(1.5)
    model = packed(plain, mine)
    model.load_state_dict(packed(other, theirs).state_dict(), assign=assign)
    assert [it.multiplies for it in experts_of(model)] == [mine == "fused"] * 4
    with torch.no_grad():
        assert_same_bits(model(ids(2, 7)).logits, other(ids(2, 7)).logits)


def test_copies_and_pickles(plain: Any, fused: Any) -> None:
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    loaded = packed(plain)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        needed = plain(ids(2, 7)).logits
        for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), loaded):
            assert all(it.multiplies for it in experts_of(made))
            assert_same_bits(made(ids(2, 7)).logits, needed)
        one = copy.deepcopy(layers(fused)[0])
        x, index = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [2, 0]])
        scores = torch.rand(3, 2).bfloat16()
        for made in (one, pickle.loads(pickle.dumps(layers(fused)[0]))):
            assert_same_bits(made(x, index, scores), layers(fused)[0](x, index, scores))


def test_moving_keeps_the_bytes(plain: Any, fused: Any) -> None:
    before = [it.sources[0].memory.clone() for it in experts_of(fused)]
    fused.to("cpu").share_memory()
    assert all(it.sources[0].memory.is_shared() for it in experts_of(fused))
    assert all(torch.equal(a, it.sources[0].memory) for a, it in zip(before, experts_of(fused), strict=True))
    for wrong in (lambda: fused.to("meta"), fused.float):
        with pytest.raises(PackedWeight):
            wrong()
    with torch.no_grad():
        assert_same_bits(fused(ids(2, 7)).logits, plain(ids(2, 7)).logits)
    moved = copy.deepcopy(fused)
    moved._apply(lambda it: it.clone())
    with torch.no_grad():
        assert_same_bits(moved(ids(2, 7)).logits, plain(ids(2, 7)).logits)


def test_updates_in_place(plain: Any) -> None:
    other, model = copy.deepcopy(plain), packed(plain)
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj[2, ::3] *= 1.5
        other.model.layers[0].mlp.experts.gate_up_proj[0, 5] = 1e30
    delta = tpde.make_delta(dict(plain.state_dict()), dict(other.state_dict()))
    for _ in range(2):
        assert tpde.apply_delta(model, delta) >= 0
        assert all(it.multiplies for it in experts_of(model))
        with torch.no_grad():
            assert_same_bits(model(ids(2, 7)).logits, other(ids(2, 7)).logits)
    with pytest.raises(PackedWeight, match="window layout"):
        add_deltas(model, {"math": tpde.make_delta(dict(other.state_dict()), dict(plain.state_dict()))})


def test_unpacked_is_what_it_was(plain: Any, fused: Any) -> None:
    model = unpack_module(fused)
    for key, value in plain.state_dict().items():
        assert_same_bits(model.state_dict()[key], value, key)
    with torch.no_grad():
        assert_same_bits(model(ids(2, 7)).logits, plain(ids(2, 7)).logits)


def test_code_that_takes_the_parameter(plain: Any, fused: Any) -> None:
    ours, theirs = layers(fused)[0].down_proj, plain.model.layers[0].mlp.experts.down_proj
    assert isinstance(ours, PackedParameter)
    assert_same_bits(ours[1], theirs[1])
    x = torch.randn(theirs.shape[0], 3, theirs.shape[1]).bfloat16()
    assert_same_bits(torch.bmm(x, ours), torch.bmm(x, theirs))
    for wrong in (theirs, ours):
        with pytest.raises(RuntimeError):
            nn.functional.linear(torch.randn(3, theirs.shape[2]).bfloat16(), wrong)
        with pytest.raises(RuntimeError, match="2-D"):
            nn.functional.embedding(torch.tensor([0]), wrong)


def test_autocast_and_replaced_weights(plain: Any, fused: Any) -> None:
    mine, theirs = layers(fused)[0], plain.model.layers[0].mlp.experts
    x, index, scores = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [2, 0]]), torch.rand(3, 2)
    for lower in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", lower):
            assert_same_bits(
                mine(x, index, scores.bfloat16()), theirs(x, index, scores.bfloat16()), str(lower)
            )
    given = {name: torch.ones(it.shape).bfloat16() for name, it in theirs.named_parameters()}
    call = (x, index, scores.bfloat16())
    with torch.no_grad():
        assert_same_bits(
            torch.func.functional_call(mine, given, call), torch.func.functional_call(theirs, given, call)
        )


@pytest.mark.parametrize("how", WAYS)
def test_compiled(how: str) -> None:
    plain = moe("qwen3_moe", how)
    model = packed(plain)
    made = torch.compile(model, backend="aot_eager", fullgraph=how != "eager")
    reference = torch.compile(plain, backend="aot_eager", fullgraph=how != "eager")
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, reference(ids(2, 7)).logits)


def test_graphs_have_all_experts(plain: Any, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens: another replay has other choices, for which nobody may wait."""
    monkeypatch.setattr(modules, "capturing", lambda device: True)
    monkeypatch.setattr(modules, "needed", lambda *_: pytest.fail("the router is waited for"))
    with torch.no_grad():
        assert_same_bits(fused(ids(1, 1)).logits, plain(ids(1, 1)).logits)
