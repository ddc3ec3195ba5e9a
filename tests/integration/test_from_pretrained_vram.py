"""Models loaded under a budget of device memory: bits, places, refusals. The device is simulated."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.budgets import MIXED, PIECE, Opened, every, load, only_stats, simulated
from support.checkpoints import Pair, checkpoint
from support.models import CAUSAL, NAMES, assert_same_bits, inputs, outputs, torch

import tpde
from tpde import nn as packed_nn
from tpde.errors import InvalidInput, PackedWeight, UnsupportedDevice

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.loading import homes


@pytest.fixture(params=[("host",), ("disk",), MIXED], ids=["host", "disk", "mixed"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with simulated(monkeypatch, every(*request.param)) as found:
        yield found


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


def test_weights_that_transformers_keeps_in_float32(opened: Opened, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "t5")
    plain = pair.kind.from_pretrained(pair.plain, dtype=torch.float16)
    plain.save_pretrained(tmp_path / "half")
    tpde.pack(tmp_path / "half", tmp_path / "half packed")
    model = load(tmp_path / "half packed")
    assert model.decoder.block[0].layer[2].DenseReluDense.wo.weight.dtype is torch.float32
    with torch.no_grad():
        assert_same_bits(outputs("t5", model, 2), outputs("t5", copy.deepcopy(plain), 2))


def test_where_units_are(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    def choose(names: Any) -> dict[str, str]:
        assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "lm_head"]
        return dict(zip(names, ["host", "packed", "disk", "plain", "host"], strict=True))

    with simulated(monkeypatch, choose) as opened:
        model = load(llama.packed)
    slots = {n: s for n, m in packed_nn.packed_modules(model) for s in m.tpde_slots.values()}
    parts = {name: slot.packed.sources[0] for name, slot in slots.items()}
    assert not any(name.startswith("model.layers.2.") for name in parts)
    assert type(model.model.layers[2].mlp.up_proj) is torch.nn.Linear
    assert parts["model.layers.0.mlp.up_proj"].settled
    (streamer,) = model.tpde_streamer.streamers.values()
    for name in ("model.embed_tokens", "model.layers.1.mlp.up_proj", "lm_head"):
        assert not parts[name].settled
        assert parts[name].in_host_memory(streamer) == (name != "model.layers.1.mlp.up_proj")
    assert parts["lm_head"].feed is opened.memory[0]
    assert parts["model.layers.1.mlp.up_proj"].feed is opened.disks[0]


def test_a_head_larger_than_the_workspace(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    plain = llama.kind.from_pretrained(llama.plain)
    with simulated(monkeypatch, every("host"), tiled=("lm_head",), workspace=20 << 10):
        model = load(llama.packed)
        slot = model.lm_head.tpde_slots["weight"]
        assert slot.packed.tile_bytes == 20 << 10 < slot.nbytes
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


def test_plain_weights_are_decoded_in_what_the_rest_leaves(
    monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    """Beside them, other plain weights, libraries, page tables and index maps are there by then, or come."""
    decode, rooms = homes.decode_runs, []

    def decoded(*args: Any) -> None:
        rooms.append(args[4])
        decode(*args)

    monkeypatch.setattr(homes, "decode_runs", decoded)
    sizes = {"plain": 1, "fixed": 20, "pages": 300, "index": 4000, "decoded": 50000}
    parts = sizes | {"ring": 600000, "kept": 600000, "cache": 600000}  # these come later
    with simulated(monkeypatch, every("plain"), parts=parts):
        load(llama.packed, vram=1 << 30)
    assert rooms == [(1 << 30) - 54321]


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


def test_what_is_left_over_keeps_weights(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    """The same bits, and so many bytes less to copy."""
    plain = llama.kind.from_pretrained(llama.plain)
    with torch.no_grad():
        expected = outputs("llama", plain, 2)
    copied = []
    for kept in (0, 2 * PIECE, 100 * PIECE):
        with simulated(monkeypatch, every("host"), parts={"kept": kept}) as opened, torch.no_grad():
            model = load(llama.packed)
            assert len(opened.devices[0].memory) == 4 * PIECE + kept
            assert_same_bits(outputs("llama", model, 2), expected)
            before = only_stats(model)["copied_bytes"]
            assert_same_bits(outputs("llama", model, 2), expected)
            copied.append(only_stats(model)["copied_bytes"] - before)
            model.tpde_streamer.close()
    assert copied[0] > copied[1] > copied[2] == 0


def test_weights_from_a_disk_are_kept_first(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    plain = llama.kind.from_pretrained(llama.plain)
    with torch.no_grad():
        expected = outputs("llama", plain, 2)
    with (
        simulated(monkeypatch, every("host", "disk"), parts={"kept": 100 * PIECE}) as opened,
        torch.no_grad(),
    ):
        model = load(llama.packed)
        for _ in range(2):
            assert_same_bits(outputs("llama", model, 2), expected)
        (disk,) = opened.disks
        read, copied = len(disk.requested), only_stats(model)["copied_bytes"]
        assert_same_bits(outputs("llama", model, 2), expected)
        assert len(disk.requested) == read
        assert only_stats(model)["copied_bytes"] > copied, "of the others"
        model.tpde_streamer.close()


def test_arguments(llama: Pair) -> None:
    for options, match in (
        ({"ram": "1GiB"}, "`ram` is a part of a budget"),
        ({"max_tokens": 5}, "`max_tokens` is a part of a budget"),
        ({"vram": "1GiB", "device": "cpu"}, "goes to `cpu`"),
        ({"vram": "1GiB", "device_map": "cpu"}, "goes to `cpu`"),
        ({"vram": "1GiB", "device_map": {"model": 0, "lm_head": "disk"}}, "goes to `disk`"),
        ({"vram": "1GiB", "max_tokens": 0}, "at least one token"),
        ({"vram": "1GiB", "max_tokens": "12"}, "give a whole number"),
        ({"vram": "1GiB", "max_tokens": 12.5}, "give a whole number"),
        ({"vram": "much"}, "`much` is no size"),
        ({"vram": "9" * 5000}, "is no size"),
        ({"vram": "9" * 400 + ".5GiB"}, "is no size"),
        ({"vram": 0}, "above zero"),
        ({"vram": "1GiB", "ram": "-1"}, "is no size"),
    ):
        with pytest.raises(InvalidInput, match=match):
            tpde.from_pretrained(llama.packed, **options)
    if not torch.cuda.is_available():
        for options in (
            {"vram": "1GiB"},
            {"vram": "1GiB", "device_map": "auto"},
            {"vram": "1GiB", "device_map": {"": 0}},
            {"device_map": {"": 0}},
            {"device_map": "cuda"},
            {"device": 0},
        ):
            with pytest.raises(UnsupportedDevice, match="no CUDA device") as caught:
                tpde.from_pretrained(llama.packed, **options)
            assert ("`vram`" in str(caught.value.hint)) == ("vram" in options)


def test_a_streamed_model_stays_where_it_is(hosted: Opened, llama: Pair, tmp_path: Path) -> None:
    model = load(llama.packed)
    assert model.to("cpu") is model  # where it is
    for refused in (
        lambda: model.to("meta"),
        lambda: model.save_pretrained(tmp_path / "again"),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: tpde.unpack_module(model),
        lambda: torch.save(model.state_dict(), tmp_path / "state.pt"),
        lambda: {name: it.to("meta") for name, it in model.state_dict().items()},
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
    plain, took = llama.kind.from_pretrained(llama.plain), inputs("llama", 2, 4)
    for mapped in ({"": "cpu"}, device_map | blocks):  # weights are where they are wanted
        model = load(llama.packed)
        accelerate.dispatch_model(model, mapped, main_device="cpu", force_hooks=True)
        with torch.no_grad():
            assert_same_bits(model(**took).logits, plain(**took).logits)
    with pytest.raises(PackedWeight, match="load the model again without `vram=`"):
        accelerate.cpu_offload(load(llama.packed), torch.device("cpu"))


def test_generation_is_not_compiled(hosted: Opened, llama: Pair) -> None:
    assert not load(llama.packed).hf_quantizer.is_compileable
    assert tpde.from_pretrained(llama.packed).hf_quantizer.is_compileable
