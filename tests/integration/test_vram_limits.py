"""Budgets of device memory: tokens, what cannot work, memory that runs out. The device is simulated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.budgets import Opened, every, load, simulated
from support.card import DEVICE, GIB, Card
from support.checkpoints import Pair, checkpoint, write
from support.models import assert_same_bits, inputs, outputs, torch

from tpde import nn as packed_nn
from tpde.errors import OutOfMemory

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402

# ---- the number of tokens ----


def test_more_tokens_than_there_is_room_for(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed, max_tokens=20)
    with torch.no_grad():
        model(**inputs("llama", 2, 10))
        model(inputs("llama", 1, 20)["input_ids"])
        for took in (
            {"args": (inputs("llama", 3, 7)["input_ids"],)},
            {"kwargs": inputs("llama", 1, 21)},
            {"kwargs": {"inputs_embeds": torch.zeros(3, 7, 64, dtype=torch.bfloat16)}},
        ):
            copied = model.tpde_streamer.stats()
            with pytest.raises(OutOfMemory, match=r"= 21 tokens.*more than the 20.*`max_tokens=21`"):
                model(*took.get("args", ()), **took.get("kwargs", {}))
            assert model.tpde_streamer.stats() == copied  # nothing was begun


def test_the_cache_counts(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed, max_tokens=20)
    took = inputs("llama", 2, 8)["input_ids"]
    assert model.generate(took, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 11)
    with pytest.raises(OutOfMemory, match="2 x 11 = 22 tokens"):
        model.generate(took, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(OutOfMemory, match="6 x 8 = 48 tokens"):
        model.generate(took, max_new_tokens=2, num_beams=3, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        legacy = transformers.DynamicCache(config=model.config)
        model(took, past_key_values=legacy)
        with pytest.raises(OutOfMemory, match="2 x 16 = 32 tokens"):
            model(took, past_key_values=legacy)


def test_a_static_cache_counts_as_a_whole(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed, max_tokens=20)
    cache = transformers.StaticCache(config=model.config, max_cache_len=21)
    with torch.no_grad(), pytest.raises(OutOfMemory, match="1 x 21 = 21 tokens"):
        model(**inputs("llama", 1, 2), past_key_values=cache)
    assert not cache.layers[0].is_initialized
    model(
        **inputs("llama", 1, 2),
        past_key_values=transformers.StaticCache(config=model.config, max_cache_len=20),
    )


def test_an_encoder_counts(hosted: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "t5")
    model = load(pair.packed, max_tokens=20)
    took = inputs("t5", 2, 7)
    with torch.no_grad():
        made = model(**took, use_cache=True)  # 7 of the encoder, 3 of the decoder
        again = {
            "encoder_outputs": (made.encoder_last_hidden_state,),
            "past_key_values": made.past_key_values,
            "decoder_input_ids": took["decoder_input_ids"][:, :1],
        }
        with pytest.raises(OutOfMemory, match="2 x 11 = 22 tokens"):
            model(**again)
        with pytest.raises(OutOfMemory, match="3 x 10 = 30 tokens"):
            model(**inputs("t5", 3, 7))


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model whose logits take most of its memory."""
    config = transformers.LlamaConfig(
        vocab_size=5000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    folder = tmp_path_factory.mktemp("wordy")
    return write(folder, transformers.LlamaForCausalLM(config).to(torch.bfloat16))


def test_more_sequences_than_can_be_sampled_from(hosted: Opened, wordy: Pair) -> None:
    model = load(wordy.packed, max_tokens=40, max_batch=1)
    took = inputs("llama", 9, 2)["input_ids"]
    options = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": True}
    copied = model.tpde_streamer.stats()
    with pytest.raises(OutOfMemory, match="choosing the next tokens of 9 sequences") as caught:
        model.generate(took, **options)
    assert model.tpde_streamer.stats() == copied  # nothing was begun
    found = re.search(r"at most (\d) .*max_batch=(\d+)", str(caught.value))
    assert found is not None
    model.generate(took[: int(found[1])], **options)
    load(wordy.packed, max_tokens=40, max_batch=int(found[2])).generate(took, **options)


def test_who_samples_nothing_may_have_as_many_sequences(hosted: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "bert")
    with torch.no_grad():
        load(pair.packed, max_tokens=40)(**inputs("bert", 40, 1))


def test_more_experts_than_can_be_copied(hosted: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    model = load(pair.packed, max_tokens=60, max_batch=2)
    took = inputs("mixtral", 5, 3)["input_ids"]
    options = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(took, **options)
    model.set_experts_implementation("batched_mm")
    copied = model.tpde_streamer.stats()
    with pytest.raises(OutOfMemory, match=r"experts of 5 x 3 tokens, .*pass fewer at once, call") as caught:
        model.generate(took, **options)
    assert model.tpde_streamer.stats() == copied  # nothing was begun
    found = re.search(r"max_batch=(\d+)", str(caught.value))
    assert found is not None
    again = load(pair.packed, max_tokens=60, max_batch=int(found[1]))
    again.set_experts_implementation("batched_mm")
    again.generate(took, **options)
    model.set_experts_implementation("eager")
    assert torch.equal(model.generate(took, **options), expected)


def test_an_encoder_is_not_run_with_more_than_there_is_room_for(hosted: Opened, tmp_path: Path) -> None:
    """`generate` calls it by itself, before it calls the model."""
    model = load(checkpoint(tmp_path, "t5").packed, max_tokens=20)
    took = inputs("t5", 3, 7)["input_ids"]
    called: list[Any] = []
    model.get_encoder().block[0].register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(OutOfMemory, match="3 x 7 = 21 tokens"):
        model.generate(took, max_new_tokens=2, do_sample=False)
    assert not called
    model.generate(took[:2], max_new_tokens=2, do_sample=False)
    assert called


def test_sounds_count_as_what_is_left_of_them(hosted: Opened, tmp_path: Path) -> None:
    """Of a Whisper, one token for two frames."""
    config = transformers.WhisperConfig(
        vocab_size=520,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    pair = write(tmp_path, transformers.WhisperForConditionalGeneration(config).to(torch.bfloat16))
    model = load(pair.packed, max_tokens=2 * 24)
    heard = torch.randn(3, 16, 40).bfloat16()
    words = torch.full((3, 4), 7)
    with torch.no_grad():
        model(input_features=heard[:2], decoder_input_ids=words[:2])
        with pytest.raises(OutOfMemory, match="3 x 24 = 72 tokens"):
            model(input_features=heard, decoder_input_ids=words)
        with pytest.raises(OutOfMemory, match="2 x 25 = 50 tokens"):
            model(input_features=heard[:2], decoder_input_ids=torch.full((2, 5), 7))
        with pytest.raises(OutOfMemory, match="3 x 20 = 60 tokens"):
            model.get_encoder()(heard)


def test_more_sequences_than_states(hosted: Opened, tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, state_size=8)
    pair = write(tmp_path, transformers.MambaForCausalLM(config).to(torch.bfloat16))
    model = load(pair.packed, max_tokens=60, max_batch=2)
    took = inputs("llama", 3, 4)["input_ids"]
    with torch.no_grad():
        model(took[:2])
        with pytest.raises(OutOfMemory, match=r"states of 3 sequences .* those of 2.*`max_batch=3`"):
            model(took)
        load(pair.packed, max_tokens=60, max_batch=3)(took)


# ---- budgets that cannot work ----


def test_a_budget_that_cannot_work(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    with simulated(monkeypatch) as opened:
        with pytest.raises(OutOfMemory, match="least that works") as caught:
            load(llama.packed, vram=100 << 20)
        assert not opened.devices
        assert not opened.memory
        assert caught.value.least is not None
        load(llama.packed, vram=caught.value.least)


@pytest.mark.parametrize("ram", [None, 1 << 30])
def test_a_budget_for_a_model_none_of_whose_weights_stays_packed(
    ram: int | None, monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    with simulated(monkeypatch):
        with pytest.raises(OutOfMemory, match="the least that works") as caught:
            load(llama.packed, dtype=torch.float64, vram=1 << 20, ram=ram)
        assert caught.value.budget == "vram"
        model = load(llama.packed, dtype=torch.float64, ram=ram)
        assert list(model.tpde_streamer.plans) == [torch.device("cpu")]
        load(llama.packed, dtype=torch.float64, vram=caught.value.least, ram=ram)


def test_too_little_ram_beside_what_is_allocated(card: Card) -> None:
    """What the process has allocated on the device counts towards `vram`, not towards `ram`."""
    from tpde.planning.shortages import too_little_ram

    card.reserved = 3 * GIB

    def plan(vram: int) -> Any:
        raise too_little_ram(656 << 20, 256 << 20)

    with pytest.raises(OutOfMemory, match=r"^`ram` is 256 MiB, the least that works is 656 MiB") as caught:
        Streaming(Budget(8 * GIB)).decide(DEVICE, plan)
    assert (caught.value.least, caught.value.budget) == (656 << 20, "ram")


def test_page_tables_are_not_left_to_pytorch(card: Card) -> None:
    from tpde.loading.footprint import FIXED_BYTES, OUTSIDE_BYTES, TYPICAL
    from tpde.planning.planner import make_plan
    from tpde.planning.units import Footprint, Unit

    units, needs = (
        [Unit("linear", 40 * GIB, 60 * GIB, 1 << 20, tile=1 << 24)],
        Footprint(0, 0, 0, FIXED_BYTES),
    )
    streaming = Streaming(Budget(8 * GIB))
    streaming.decide(DEVICE, lambda vram: make_plan(units, needs, vram, None, TYPICAL, calls=1))
    assert card.allowed == 8 * GIB - OUTSIDE_BYTES - (80 << 20)
    streaming.close()


# ---- memory that runs out all the same ----


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.mark.parametrize("rooms", [0, 1], ids=["ring", "experts"])
def test_no_room_to_copy_to(rooms: int, monkeypatch: pytest.MonkeyPatch, experts: tuple[str, Pair]) -> None:
    with simulated(monkeypatch, every("host")) as opened:
        opened.rooms = rooms
        with pytest.raises(OutOfMemory, match="no room"):
            load(experts[1].packed)
        (memory,) = opened.memory
        assert memory.closed


def _workspace_bytes(model: Any) -> int:
    _, module = next(packed_nn.packed_modules(model.model.layers))
    (slot, *_) = module.tpde_slots.values()
    return int(slot.group.pool.capacity)


def test_no_room_for_the_workspace(card: Card, monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    with simulated(monkeypatch, every("host")):
        nbytes = _workspace_bytes(load(llama.packed))
    with simulated(monkeypatch, every("host")) as opened:
        card.exhaust(monkeypatch, nbytes)
        with pytest.raises(OutOfMemory, match="the workspace that weights are decoded to needs"):
            load(llama.packed)
        assert opened.memory[0].closed


def test_no_room_for_the_workspace_in_a_call(
    card: Card, monkeypatch: pytest.MonkeyPatch, hosted: Opened, llama: Pair
) -> None:
    """Compiled code and backward passes have it given up for a moment; then others may take the memory."""
    plain, model = llama.kind.from_pretrained(llama.plain), load(llama.packed)
    _, module = next(packed_nn.packed_modules(model.model.layers))
    (slot, *_) = module.tpde_slots.values()
    assert slot.group.release() == _workspace_bytes(model)
    with torch.no_grad():
        with monkeypatch.context() as patch:
            card.exhaust(patch, _workspace_bytes(model))
            with pytest.raises(OutOfMemory, match="the workspace that weights are decoded to needs"):
                outputs("llama", model, 2)
        assert_same_bits(outputs("llama", model, 2), outputs("llama", plain, 2))


def test_no_room_for_plain_weights(card: Card, monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    with simulated(monkeypatch, every("plain")):
        card.exhaust(monkeypatch, 4096)
        with pytest.raises(OutOfMemory, match=r"needs .* on cpu, .* are free"):
            load(llama.packed)
