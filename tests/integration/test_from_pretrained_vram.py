"""Models loaded under a budget of device memory: bits, limits, refusals. The device is simulated."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.budgets import MIXED, PIECE, Opened, every, load, simulated
from support.card import DEVICE, GIB, Card
from support.checkpoints import Pair, checkpoint, write
from support.garbage import uncollected
from support.models import CAUSAL, NAMES, VOCAB, assert_same_bits, inputs, outputs, torch

import tpde
from tpde import nn as packed_nn
from tpde.errors import Corrupt, InvalidInput, OutOfMemory, PackedWeight, ReadError, UnsupportedDevice
from tpde.nn.experts import fused
from tpde.streaming.experts import expert_room

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.integrations.streaming import loading as loading_under  # noqa: E402
from tpde.integrations.streaming.loading import Streaming  # noqa: E402
from tpde.streaming.trace import Trace  # noqa: E402


@pytest.fixture(params=[("host",), ("disk",), MIXED], ids=["host", "disk", "mixed"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with simulated(monkeypatch, every(*request.param)) as found:
        yield found


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with simulated(monkeypatch, every("host")) as found:
        yield found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, opened: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    plain, model = pair.kind.from_pretrained(pair.plain), load(pair.packed)
    with torch.no_grad():
        assert_same_bits(outputs(name, model, 2), outputs(name, plain, 2), name)
        assert_same_bits(outputs(name, model, 1), outputs(name, plain, 1), name)
    assert type(model) is type(plain)
    (stats,) = model.tpde_streamer.stats().values()
    assert stats["copied_bytes"] > 0
    expected, found = plain.state_dict(), packed_nn.plain_state_dict(model)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)


def test_ties(opened: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "qwen2")
    plain, model = pair.kind.from_pretrained(pair.plain), load(pair.packed)
    model.tie_weights()
    with torch.no_grad():
        assert_same_bits(outputs("qwen2", model, 2), outputs("qwen2", plain, 2))


def test_where_units_are(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    def choose(names: Any) -> dict[str, str]:
        assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "lm_head"]
        return dict(zip(names, ["host", "packed", "disk", "plain", "host"], strict=True))

    with simulated(monkeypatch, choose) as opened:
        model = load(llama.packed)
    slots = {n: s for n, m in packed_nn.packed_modules(model) for s in m.tpde_slots.values()}
    parts = {name: slot.parts[0][0] for name, slot in slots.items()}
    assert not any(name.startswith("model.layers.2.") for name in parts)
    assert type(model.model.layers[2].mlp.up_proj) is torch.nn.Linear
    assert parts["model.layers.0.mlp.up_proj"].streams is None
    (streamer,) = model.tpde_streamer.streamers.values()
    for name in ("model.embed_tokens", "model.layers.1.mlp.up_proj", "lm_head"):
        assert parts[name].streams is streamer
        assert parts[name].blob.device.type == "meta"
    assert parts["lm_head"].supply is opened.memory[0]
    assert parts["model.layers.1.mlp.up_proj"].supply is opened.disks[0]


def test_a_head_larger_than_the_workspace(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    plain = llama.kind.from_pretrained(llama.plain)
    with simulated(monkeypatch, every("host"), tiled=("lm_head",), workspace=20 << 10):
        model = load(llama.packed)
        slot = model.lm_head.tpde_slots["weight"]
        assert slot.tile_bytes == 20 << 10 < slot.nbytes
        with torch.no_grad():
            for found, expected in zip(outputs("llama", model, 2), outputs("llama", plain, 2), strict=True):
                assert torch.allclose(found, expected, atol=1e-2)  # matrix libraries round tiles differently


def test_all_fits(monkeypatch: pytest.MonkeyPatch, llama: Pair, tmp_path: Path) -> None:
    """With room for everything nothing is streamed, and the model saves, moves and unpacks as others do."""
    with simulated(monkeypatch) as opened:
        model = load(llama.packed)
    assert not opened.devices
    assert not list(packed_nn.packed_modules(model.model.layers))
    assert not model.tpde_streamer.streamers
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        plain = llama.kind.from_pretrained(llama.plain)
        assert_same_bits(outputs("llama", model, 2), outputs("llama", plain, 2))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("how", ["dynamic", "static", "beams", "sample"])
def test_generation(name: str, how: str, hosted: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    took = inputs(name, 3, 5)["input_ids"]
    options: dict[str, Any] = {
        "dynamic": {"do_sample": False},
        "static": {"do_sample": False, "cache_implementation": "static"},
        "beams": {"do_sample": False, "num_beams": 3},
        "sample": {"do_sample": True, "temperature": 1.5},
    }[how]
    found = []
    for model in (pair.kind.from_pretrained(pair.plain), load(pair.packed)):
        torch.manual_seed(3)
        mask = torch.ones_like(took)
        found.append(model.generate(took, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **options))
    assert torch.equal(*found)


def test_long_prefill_computes_the_last_logits_only(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed)
    lengths = []
    model.lm_head.register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    model.generate(inputs("llama", 1, 60)["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert lengths == [1, 1, 1]


# ---- experts ----


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Pair]:
    return request.param, checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def _stats(model: Any) -> dict[str, int]:
    (found,) = model.tpde_streamer.stats().values()
    return dict(found)


def test_experts_are_fetched_as_routed_to(hosted: Opened, experts: tuple[str, Pair]) -> None:
    name, pair = experts
    plain, model = pair.kind.from_pretrained(pair.plain), load(pair.packed)
    ring, cache = hosted.devices
    slots = [slot for _, it in packed_nn.packed_modules(model) for slot in it.tpde_slots.values()]
    slots = [slot for slot in slots if slot.experts is not None]
    assert {slot.name for slot in slots} == {"gate_up_proj", "down_proj"}
    every = sum(part.extent.size for slot in slots for part, _ in slot.parts)
    token = inputs(name, 1, 1)
    with torch.no_grad():
        assert_same_bits(model(**token).logits, plain(**token).logits)
        stats = _stats(model)
        assert 0 < stats["expert_bytes"] < 0.7 * every
        assert stats["expert_hits"] == 0
        assert not any(".experts." in it for it in ring.copied)
        assert all(".experts." in it for it in cache.copied)
        assert_same_bits(model(**token).logits, plain(**token).logits)
        again = _stats(model)
        assert again["expert_hits"] == stats["expert_misses"] == again["expert_misses"]
        assert again["expert_bytes"] == stats["expert_bytes"]
        for batch in (1, 3):
            assert_same_bits(outputs(name, model, batch), outputs(name, plain, batch), name)
    took = inputs(name, 2, 5)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(took, **options), plain.generate(took, **options))
    assert _stats(model)["expert_bytes"] <= 1.1 * every  # there is room for all: each is copied once
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
    nothing = {"plain": 0, "fixed": 0, "index": 0, "decoded": 0}
    parts = nothing | {"experts": 1 << 16}
    with simulated(monkeypatch, every("host"), parts=parts, vram=1 << 16) as opened:
        model = load(pair.packed)
        modules = [module for _, module in packed_nn.packed_modules(model) if fused(module)]
        room = max(expert_room(fused(module), PIECE) for module in modules)
        assert len(opened.devices[1].memory) == (1 << 16) // room * room > 0
    for places in (2, 0):
        size = places * room + room // 2
        parts = nothing | {"experts": size}
        with simulated(monkeypatch, every("host"), parts=parts, vram=size) as opened, torch.no_grad():
            model = load(pair.packed)
            assert_same_bits(outputs(name, model, 2), expected, name)
            if places:
                assert len(opened.devices[1].memory) == places * room
                assert _stats(model)["expert_misses"] > places
            else:
                assert len(opened.devices) == 1  # they come with their blocks
                assert "expert_misses" not in _stats(model)


def test_experts_read_from_files_come_with_their_blocks(
    monkeypatch: pytest.MonkeyPatch, experts: tuple[str, Pair]
) -> None:
    name, pair = experts
    with simulated(monkeypatch, every("disk")) as opened:
        model = load(pair.packed)
        with torch.no_grad():
            model(**inputs(name, 1, 3))
        assert len(opened.devices) == 1
        assert "expert_hits" not in _stats(model)


def test_the_cache_is_traced_and_given_back(
    monkeypatch: pytest.MonkeyPatch, hosted: Opened, experts: tuple[str, Pair]
) -> None:
    monkeypatch.setattr(loading_under, "start_trace", lambda _: object())
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
    from tpde.integrations.transformers.experts import SEGMENT, cache_least
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
    one = sum(part.blob.numel() for slot in fused(module) for part, _ in slot.parts) // 4
    assert 2 * one < least < 2.5 * one + SEGMENT


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
    model = load(wordy.packed, max_tokens=40)
    took = inputs("llama", 9, 2)["input_ids"]
    options = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": True}
    copied = model.tpde_streamer.stats()
    with pytest.raises(OutOfMemory, match="choosing the next tokens of 9 sequences") as caught:
        model.generate(took, **options)
    assert model.tpde_streamer.stats() == copied  # nothing was begun
    found = re.search(r"at most (\d) .*max_tokens=(\d+)", str(caught.value))
    assert found is not None
    model.generate(took[: int(found[1])], **options)
    load(wordy.packed, max_tokens=int(found[2])).generate(took, **options)


def test_who_samples_nothing_may_have_as_many_sequences(hosted: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "bert")
    with torch.no_grad():
        load(pair.packed, max_tokens=40)(**inputs("bert", 40, 1))


def test_more_experts_than_can_be_copied(hosted: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    model = load(pair.packed, max_tokens=60)
    took = inputs("mixtral", 5, 3)["input_ids"]
    options = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(took, **options)
    model.set_experts_implementation("batched_mm")
    copied = model.tpde_streamer.stats()
    with pytest.raises(
        OutOfMemory, match=r"experts of 5 x 3 tokens, .*pass at most 1 x 3 at once, call"
    ) as caught:
        model.generate(took, **options)
    assert model.tpde_streamer.stats() == copied  # nothing was begun
    again = load(pair.packed, max_tokens=int(str(caught.value).split("max_tokens=")[1].strip("`")))
    again.set_experts_implementation("batched_mm")
    again.generate(took, **options)
    model.set_experts_implementation("eager")
    assert torch.equal(model.generate(took, **options), expected)


# ---- what cannot be ----


def test_arguments(llama: Pair) -> None:
    for options, match in (
        ({"ram": "1GiB"}, "`ram` is a part of a budget"),
        ({"max_tokens": 5}, "`max_tokens` is a part of a budget"),
        ({"vram": "1GiB", "device": "cpu"}, "goes to `cpu`"),
        ({"vram": "1GiB", "device_map": "cpu"}, "goes to `cpu`"),
        ({"vram": "1GiB", "device_map": {"model": 0, "lm_head": "disk"}}, "goes to `disk`"),
        ({"vram": "1GiB", "max_tokens": 0}, "at least one token"),
        ({"vram": "much"}, "`much` is no size"),
        ({"vram": 0}, "above zero"),
        ({"vram": "1GiB", "ram": "-1"}, "is no size"),
    ):
        with pytest.raises(InvalidInput, match=match):
            tpde.from_pretrained(llama.packed, **options)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDevice, match="no CUDA device"):
            tpde.from_pretrained(llama.packed, vram="1GiB")


def test_a_budget_that_cannot_work(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    with simulated(monkeypatch) as opened:
        with pytest.raises(OutOfMemory, match="least that works") as caught:
            load(llama.packed, vram=100 << 20)
        assert not opened.devices
        assert not opened.memory
        assert caught.value.least is not None
        load(llama.packed, vram=caught.value.least)


def test_a_streamed_model_stays_where_it_is(hosted: Opened, llama: Pair, tmp_path: Path) -> None:
    model = load(llama.packed)
    assert model.to("cpu") is model  # where it is
    for refused in (
        lambda: model.to("meta"),
        lambda: model.save_pretrained(tmp_path / "again"),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: tpde.unpack_module(model),
        lambda: model.to("meta"),
        lambda: torch.save(model.state_dict(), tmp_path / "state.pt"),
        lambda: {name: it.to("cpu") for name, it in model.state_dict().items()},
    ):
        with pytest.raises(PackedWeight):
            refused()
    with torch.no_grad():
        plain = llama.kind.from_pretrained(llama.plain)
        assert_same_bits(outputs("llama", model, 2), outputs("llama", plain, 2))


def test_hooks_of_accelerate(hosted: Opened, llama: Pair) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    blocks = {f"model.layers.{i}": "cpu" for i in range(3)}
    device_map = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    for attach in (
        lambda it: accelerate.dispatch_model(it, {"": "cpu"}, main_device="cpu", force_hooks=True),
        lambda it: accelerate.dispatch_model(it, device_map | blocks, main_device="cpu", force_hooks=True),
        lambda it: accelerate.cpu_offload(it, torch.device("cpu")),
    ):
        with pytest.raises(PackedWeight, match=r"accelerate's hooks|load the model again without `vram=`"):
            attach(load(llama.packed))


def test_generation_is_not_compiled(hosted: Opened, llama: Pair) -> None:
    assert not load(llama.packed).hf_quantizer.is_compileable
    assert tpde.from_pretrained(llama.packed).hf_quantizer.is_compileable


# ---- damage ----


def _damage(model: Any, part: Any) -> None:
    """Change a byte of a streamed weight, where it waits on the host."""
    (streamer,) = model.tpde_streamer.streamers.values()
    streamer._forget()  # what was copied ahead is sound
    part.supply._bytes(part.extent)[part.extent.offset + int(part.offsets[0]) + 40] ^= 1


def test_damage_after_the_first_use_is_raised_by_a_check(hosted: Opened, llama: Pair) -> None:
    model, took = load(llama.packed), inputs("llama", 1, 4)
    part = model.lm_head.tpde_slots["weight"].parts[0][0]
    with torch.no_grad():
        sound = model(**took).logits
        _damage(model, part)
        assert not torch.equal(model(**took).logits, sound), "this one has used it"
        with pytest.raises(Corrupt, match=r"`lm_head.weight`: chunk 0: .* was damaged since"):
            model.tpde_streamer.check()
        _damage(model, part)  # undone
        assert_same_bits(model(**took).logits, sound)
        model.tpde_streamer.check()
        _damage(model, part)
        model(**took)
        with pytest.raises(Corrupt, match="lm_head"):
            model(**took)


def test_damage_is_raised_by_closing(hosted: Opened, llama: Pair) -> None:
    model, took = load(llama.packed), inputs("llama", 1, 4)
    with torch.no_grad():
        model(**took)
        _damage(model, model.lm_head.tpde_slots["weight"].parts[0][0])
        model(**took)
    with pytest.raises(Corrupt, match="lm_head"):
        model.tpde_streamer.close()
    assert hosted.memory[0].closed
    model.tpde_streamer.close()


def test_damage_of_experts_is_raised_by_a_check(hosted: Opened, experts: tuple[str, Pair]) -> None:
    name, pair = experts
    model, took = load(pair.packed), inputs(name, 1, 9)
    (store,) = model.tpde_streamer.experts.values()
    module = next(it for _, it in packed_nn.packed_modules(model) if fused(it))
    with torch.no_grad():
        model(**took)
        store.cache.clear()
        for part, _ in fused(module)[0].parts:
            _damage(model, part)
        model(**took)
    with pytest.raises(Corrupt, match="experts"):
        model.tpde_streamer.check()


# ---- the end ----


def test_closing_gives_all_back_when_a_device_has_crashed() -> None:
    """The other device's memory, and the budgets, too."""
    given: list[str] = []

    class Crashed:
        def check(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        def close(self) -> None:
            given.append("crashed")
            self.check()

    class Sound:
        def check(self) -> None:
            pass

        def close(self) -> None:
            given.append("sound")

    streaming: Any = Streaming(1 << 30)
    streaming.streamers = {torch.device("cuda", 0): Sound(), torch.device("cuda", 1): Crashed()}
    streaming._finalizers.append(lambda: given.append("budget"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        streaming.close()
    assert sorted(given) == ["budget", "crashed", "sound"]


def test_closing(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed)
    model.tpde_streamer.close()
    assert hosted.memory[0].closed
    with pytest.raises(ReadError, match="closed"):
        model(**inputs("llama", 1, 4))
    model.tpde_streamer.close()


def test_a_model_that_is_dropped_gives_all_back(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed)
    with torch.no_grad():
        model(**inputs("llama", 1, 4))
    assert not hosted.memory[0].closed
    del model
    gc.collect()
    assert hosted.memory[0].closed


def test_what_was_dropped_is_gone_before_the_next_load(
    hosted: Opened, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What streams is in cycles, and collection is put off while a model is loaded."""
    gone, passes, collect, make = [], [], gc.collect, Streaming.decide

    def counted() -> int:
        passes.append(len(gone))
        return collect()

    def decide(self: Streaming, *args: Any, **options: Any) -> None:
        gone.append(streamer() is None)
        make(self, *args, **options)

    assert gc.isenabled()
    model = load(llama.packed)
    with torch.no_grad():
        model(**inputs("llama", 1, 4))
    gc.collect()  # what other tests have dropped
    load(llama.packed)  # and what is noted of it
    monkeypatch.setattr(gc, "collect", counted)
    monkeypatch.setattr(Streaming, "decide", decide)
    (made,) = model.tpde_streamer.streamers.values()
    streamer, weights = weakref.ref(made), weakref.ref(model.model.layers[0])
    with uncollected():
        del model, made
        assert weights() is None
        assert streamer() is not None
    model = load(llama.packed)
    (made,) = model.tpde_streamer.streamers.values()
    streamer = weakref.ref(made)
    other = load(llama.packed)
    assert gone == [True, False]
    assert passes == [0]  # nothing was dropped before the last
    del model, other


def test_a_device_that_has_crashed_leaves_nothing_open(
    hosted: Opened, experts: tuple[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pair = experts
    model = load(pair.packed)
    with torch.no_grad():
        model(**inputs(name, 1, 4))
    (streamer,) = model.tpde_streamer.streamers.values()
    owned = [*streamer.owned]
    assert len(owned) > 2  # a cache of experts, memory, files

    def crashed(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        for device in hosted.devices:
            patch.setattr(device, "wait", crashed)
            patch.setattr(device, "close", crashed)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            model.tpde_streamer.close()
    assert hosted.memory[0].closed
    assert not streamer.owned


def test_what_was_dropped_before_recording_does_not_count(
    hosted: Opened, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_under, "start_trace", lambda _: Trace(None, 0))
    model = load(llama.packed)
    with torch.no_grad():
        for _ in range(3):
            model(**inputs("llama", 1, 4))
            model.lm_head(torch.zeros(1, model.config.hidden_size, dtype=model.dtype))
    (stats,) = model.tpde_streamer.stats().values()
    assert stats["dropped_pieces"] > 0
    model.tpde_streamer.record()
    (device,) = model.tpde_streamer.streamers
    assert model.tpde_streamer.summary(device).dropped == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_loading_that_is_interrupted_gives_all_back(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    def fail(model: Any) -> None:
        raise error

    with simulated(monkeypatch, every("host", "disk")) as opened:
        monkeypatch.setattr("tpde.integrations.transformers.quantizer.finish", fail)
        with pytest.raises(error):
            load(llama.packed)
        assert opened.memory[0].closed
        assert opened.disks[0].closed


# ---- budgets that cannot work ----


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


def test_too_little_ram_beside_what_is_allocated(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process has allocated on the device counts towards `vram`, not towards `ram`."""
    from tpde.integrations import allowance
    from tpde.streaming.plan import too_little_ram

    monkeypatch.setattr(allowance, "_budgets", {})
    card.reserved = 3 * GIB

    def plan(vram: int) -> Any:
        raise too_little_ram(656 << 20, 256 << 20)

    with pytest.raises(OutOfMemory, match=r"^`ram` is 256 MiB, the least that works is 656 MiB") as caught:
        Streaming(8 * GIB).decide(DEVICE, plan)
    assert (caught.value.least, caught.value.budget) == (656 << 20, "ram")


def test_too_little_ram_for_several_devices(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    """Each that has packed weights has a share of `ram`; what would do is that of all."""
    from tpde.integrations.transformers import streamed
    from tpde.integrations.transformers.shape import opened_shape
    from tpde.streaming.plan import too_little_ram

    def plan(*_: Any, ram: int, **__: Any) -> Any:
        assert ram == 256 << 20
        raise too_little_ram(656 << 20, ram)

    monkeypatch.setattr(streamed, "plan_streaming", plan)
    made = streamed.ModelStreaming(streamed.Budget(GIB, 512 << 20, 64))
    with opened_shape(llama.packed) as (model, checkpoint, weights):
        where = dict.fromkeys(weights.runs, torch.device("cpu"))
        where["lm_head.weight"] = torch.device("meta")
        where["model.norm.weight"] = torch.device("cpu", 1)
        with pytest.raises(OutOfMemory, match=r"`ram` is 512 MiB, the least .* is 1312 MiB") as caught:
            made.plan(model, checkpoint, weights, where)
    assert caught.value.least == 1312 << 20


# ---- memory that runs out all the same ----


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.mark.parametrize("where", ["opening.CudaDevice", "streamed.CudaDevice"], ids=["ring", "experts"])
def test_no_room_to_copy_to(where: str, monkeypatch: pytest.MonkeyPatch, experts: tuple[str, Pair]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OutOfMemory("no room")

    with simulated(monkeypatch, every("host")) as opened:
        package = "streaming" if where.startswith("opening") else "transformers"
        monkeypatch.setattr(f"tpde.integrations.{package}.{where}", fail)
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
