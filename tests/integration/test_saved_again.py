"""Models of transformers, packed or unpacked in memory: what they compute, and what saving them writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint, write
from support.models import NAMES, VOCAB, assert_same_bits, inputs, make, outputs, torch

import tpde
import tpde.torch
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import packed_modules, plain_state_dict

transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")


def _same(name: str, folder: Path, pair: Pair, load: Any) -> None:
    with torch.no_grad():
        expected = outputs(name, pair.kind.from_pretrained(pair.plain), 2)
        assert_same_bits(outputs(name, load(folder), 2), expected, name)


def _is_plain(folder: Path) -> None:
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    for path in folder.glob("*.safetensors"):
        assert not any(name.endswith("_tpde") for name in tpde.torch.load_file(path))


# ---- what they compute ----


def _jamba() -> Any:
    config = transformers.JambaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=32,
        use_mamba_kernels=False,
    )
    return transformers.JambaForCausalLM(config)


def _falcon_mamba() -> Any:
    config = transformers.FalconMambaConfig(
        vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=2, time_step_rank=32
    )
    return transformers.FalconMambaForCausalLM(config)


@pytest.mark.parametrize("made", [_jamba, _falcon_mamba])
def test_models_that_compute_otherwise_where_quantized(made: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = made().to(torch.bfloat16).eval()
    for name, it in model.named_parameters():  # some are 0 at first, which hides the order of sums
        if "dt_proj" in name or "bias" in name:
            torch.nn.init.normal_(it, std=0.5)
    pair = write(tmp_path, model)
    took = inputs("llama", 2, 9)
    plain, packed = pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed)
    with torch.no_grad():
        expected = plain(**took).logits
        assert_same_bits(packed(**took).logits, expected)
        assert_same_bits(tpde.unpack_module(packed)(**took).logits, expected)
        assert_same_bits(tpde.pack_module(plain)(**took).logits, expected)


# ---- unpacked ----


@pytest.mark.parametrize("name", NAMES)
def test_an_unpacked_model_is_saved_plain(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    model = tpde.unpack_module(tpde.from_pretrained(pair.packed))
    model.save_pretrained(tmp_path / "again")
    _is_plain(tmp_path / "again")
    _same(name, tmp_path / "again", pair, pair.kind.from_pretrained)
    expected = tpde.torch.load_file(pair.plain / "model.safetensors")
    found = tpde.torch.load_file(tmp_path / "again" / "model.safetensors")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)
    model.save_pretrained(tmp_path / "twice")
    _is_plain(tmp_path / "twice")


def test_a_model_that_kept_nothing_packed_is_saved_plain(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    model = tpde.from_pretrained(pair.packed, dtype=torch.float32)
    assert not list(packed_modules(model))
    model.save_pretrained(tmp_path / "again")
    _is_plain(tmp_path / "again")
    again = pair.kind.from_pretrained(tmp_path / "again")
    expected = pair.kind.from_pretrained(pair.plain, dtype=torch.float32)
    with torch.no_grad():
        assert_same_bits(outputs("mixtral", again, 2), outputs("mixtral", expected, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_an_adapter_is_merged(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    pair, found = checkpoint(tmp_path, name), []
    for model in (pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed)):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, lora)
        tpde.unpack_module(adapted)
        found.append(adapted.merge_and_unload())
    plain, merged = found
    merged.save_pretrained(tmp_path / "merged")
    _is_plain(tmp_path / "merged")
    with torch.no_grad():
        expected = outputs(name, plain.eval(), 2)
        assert_same_bits(outputs(name, merged.eval(), 2), expected)
        assert_same_bits(outputs(name, pair.kind.from_pretrained(tmp_path / "merged"), 2), expected)


# ---- packed in memory ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loaded", [True, False])
def test_a_model_packed_in_memory_is_saved_packed(name: str, loaded: bool, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    model = tpde.pack_module(pair.kind.from_pretrained(pair.plain) if loaded else make(name))
    model.save_pretrained(tmp_path / "again")
    assert tpde.verify(tmp_path / "again") == []
    _same(name, tmp_path / "again", pair, tpde.from_pretrained)
    tpde.unpack(tmp_path / "again", tmp_path / "restored")
    expected = tpde.torch.load_file(pair.plain / "model.safetensors")
    found = tpde.torch.load_file(tmp_path / "restored" / "model.safetensors")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)
    tpde.unpack_module(model).save_pretrained(tmp_path / "plain again")
    _is_plain(tmp_path / "plain again")
    _same(name, tmp_path / "plain again", pair, pair.kind.from_pretrained)


def test_experts_that_were_packed_as_one_are_saved_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fused weight is cut where it lies: no other is decoded meanwhile."""
    monkeypatch.setattr("tpde.loading.runs.STRIP_BYTES", 1)  # of rows as short as these
    pair = checkpoint(tmp_path, "mixtral")
    model = tpde.pack_module(pair.kind.from_pretrained(pair.plain))
    model.save_pretrained(tmp_path / "again")
    assert "decoded and packed again" not in caplog.text
    _same("mixtral", tmp_path / "again", pair, tpde.from_pretrained)
    tpde.unpack(tmp_path / "again", tmp_path / "restored")
    expected = tpde.torch.load_file(pair.plain / "model.safetensors")
    found = tpde.torch.load_file(tmp_path / "restored" / "model.safetensors")
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)


def _inner(model: Any) -> Any:
    """The largest model that is in one."""
    return next(it for it in model.children() if isinstance(it, transformers.PreTrainedModel))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2"])
@pytest.mark.parametrize("how", ["loaded", "packed", "the inner one packed"])
def test_the_model_within_a_model_is_saved(name: str, how: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    plain = pair.kind.from_pretrained(pair.plain)
    _inner(plain).save_pretrained(tmp_path / "plain inner")
    if how == "loaded":
        model = tpde.from_pretrained(pair.packed)
    else:
        model = pair.kind.from_pretrained(pair.plain)
        tpde.pack_module(model if how == "packed" else _inner(model))
    inner = _inner(model)
    inner.save_pretrained(tmp_path / "inner")
    found = tpde.from_pretrained(tmp_path / "inner")
    assert next(packed_modules(found), None) is not None
    expected = type(inner).from_pretrained(tmp_path / "plain inner").state_dict()
    state = plain_state_dict(found)
    assert set(state) == set(expected)
    for key, value in expected.items():
        assert_same_bits(state[key], value, key)
    if how == "the inner one packed":
        with pytest.raises(PackedWeight, match="pack all, not a part"):
            model.save_pretrained(tmp_path / "outer")
    else:
        model.save_pretrained(tmp_path / "outer")
        _same(name, tmp_path / "outer", pair, tpde.from_pretrained)
    _inner(tpde.unpack_module(model)).save_pretrained(tmp_path / "unpacked")
    _is_plain(tmp_path / "unpacked")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
def test_an_adapter_on_a_tied_head_is_saved_without_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    pair = checkpoint(tmp_path, "qwen2")
    lora = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tpde.from_pretrained(pair.packed), lora)
    with pytest.raises(PackedWeight, match="of an adapter on embeddings or the head, pass it `save_emb"):
        model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(tpde.from_pretrained(pair.packed), tmp_path / "adapter")
    took = inputs("qwen2", 1, 4)
    assert_same_bits(again(**took).logits, model(**took).logits)


# ---- other configurations ----


def test_a_configuration_that_is_passed(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    config = transformers.AutoConfig.from_pretrained(pair.plain)
    for passed in (config, pair.plain, str(pair.plain), transformers.AutoConfig.from_pretrained(pair.packed)):
        model = tpde.from_pretrained(pair.packed, config=passed)
        assert list(packed_modules(model))
        _same("llama", pair.packed, pair, lambda _, model=model: model)
    assert not hasattr(config, "quantization_config")
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(InvalidInput, match="quantized with `fp8`"):
        tpde.from_pretrained(pair.packed, config=config)
    with pytest.raises(InvalidInput, match="`config` is a dict"):
        tpde.from_pretrained(pair.packed, config={})
