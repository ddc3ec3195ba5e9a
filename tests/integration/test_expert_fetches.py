"""Experts under a budget of device memory: fetched as routed to, and cached. The device is simulated."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.budgets import PIECE, Opened, every, load, only_stats, simulated
from support.checkpoints import Pair, write
from support.models import VOCAB, assert_same_bits, inputs, outputs, torch

import tpde
from tpde import nn as packed_nn
from tpde.errors import ReadError
from tpde.nn.routing import fused
from tpde.streaming.experts import expert_room

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


def test_experts_are_fetched_as_routed_to(hosted: Opened, experts: tuple[str, Pair]) -> None:
    name, pair = experts
    plain, model = pair.kind.from_pretrained(pair.plain), load(pair.packed)
    ring, cache = hosted.devices
    slots = [slot for _, it in packed_nn.packed_modules(model) for slot in it.tpde_slots.values()]
    slots = [slot for slot in slots if slot.experts is not None]
    assert {slot.name for slot in slots} == {"gate_up_proj", "down_proj"}
    every = sum(slot.packed.packed_bytes for slot in slots)
    token = inputs(name, 1, 1)
    with torch.no_grad():
        assert_same_bits(model(**token).logits, plain(**token).logits)
        stats = only_stats(model)
        assert 0 < stats["expert_bytes"] < 0.7 * every
        assert stats["expert_hits"] == 0
        assert not any(".experts." in it for it in ring.copied)
        assert all(".experts." in it for it in cache.copied)
        assert_same_bits(model(**token).logits, plain(**token).logits)
        again = only_stats(model)
        assert again["expert_hits"] == stats["expert_misses"] == again["expert_misses"]
        assert again["expert_bytes"] == stats["expert_bytes"]
        for batch in (1, 3):
            assert_same_bits(outputs(name, model, batch), outputs(name, plain, batch), name)
    took = inputs(name, 2, 5)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(took, **options), plain.generate(took, **options))
    assert only_stats(model)["expert_bytes"] <= 1.1 * every  # there is room for all: each is copied once
    model.tpde_streamer.close()
    assert cache.closed
    assert hosted.memory[0].closed
    with pytest.raises(ReadError, match="closed"):
        slots[0].experts.fetch([0], torch.empty(1 << 20, dtype=torch.uint8))


def test_small_caches(monkeypatch: pytest.MonkeyPatch, experts: tuple[str, Pair]) -> None:
    """A cache takes what the budget leaves, in whole places; what it evicts is copied again."""
    name, pair = experts
    plain = pair.kind.from_pretrained(pair.plain)
    with torch.no_grad():
        expected = outputs(name, plain, 2)
    with simulated(monkeypatch, every("host"), parts={"experts": 1 << 16}, vram=1 << 16) as opened:
        model = load(pair.packed)
        modules = [module for _, module in packed_nn.packed_modules(model) if fused(module)]
        room = max(expert_room(fused(module), PIECE) for module in modules)
        assert len(opened.devices[1].memory) == (1 << 16) // room * room > 0
    for places in (2, 0):
        size = places * room + room // 2
        with (
            simulated(monkeypatch, every("host"), parts={"experts": size}, vram=size) as opened,
            torch.no_grad(),
        ):
            model = load(pair.packed)
            assert_same_bits(outputs(name, model, 2), expected, name)
            if places:
                assert len(opened.devices[1].memory) == places * room
                assert only_stats(model)["expert_misses"] > places
            else:
                assert len(opened.devices) == 1  # they come with their blocks
                assert "expert_misses" not in only_stats(model)


def test_experts_read_from_files_come_with_their_blocks(
    monkeypatch: pytest.MonkeyPatch, experts: tuple[str, Pair]
) -> None:
    name, pair = experts
    with simulated(monkeypatch, every("disk")) as opened:
        model = load(pair.packed)
        with torch.no_grad():
            model(**inputs(name, 1, 3))
        assert len(opened.devices) == 1
        assert "expert_hits" not in only_stats(model)


def test_the_cache_is_traced_and_given_back(
    monkeypatch: pytest.MonkeyPatch, hosted: Opened, experts: tuple[str, Pair]
) -> None:
    name, pair = experts
    model = load(pair.packed)
    model.tpde_streamer.record()
    ring, cache = hosted.devices
    assert ring.trace is cache.trace is not None
    ring.trace = None
    with torch.no_grad():
        model(**inputs(name, 1, 4))
    del model
    gc.collect()
    assert cache.closed
    assert hosted.memory[0].closed


def test_a_plan_has_room_for_two_experts(tmp_path: Path) -> None:
    from tpde.integrations.transformers.expert_modules import SEGMENT, cache_least
    from tpde.integrations.transformers.shape import opened_shape

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    pair = write(tmp_path, transformers.MixtralForCausalLM(config).to(torch.bfloat16))
    with opened_shape(pair.packed) as (shape, _, plan):
        least = cache_least(shape, plan.runs, None)
        assert cache_least(shape, plan.runs, []) == 0
    model = tpde.from_pretrained(pair.packed)
    (module,) = [module for _, module in packed_nn.packed_modules(model) if fused(module)]
    one = sum(slot.packed.packed_bytes for slot in fused(module)) // 4
    assert 2 * one < least < 2.5 * one + SEGMENT
