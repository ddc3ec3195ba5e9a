"""Models built straight from packed files compute the plain models' bits."""

from __future__ import annotations

import copy
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.budgets import load, simulated
from support.checkpoints import checkpoint, same_model, write
from support.models import CAUSAL, NAMES, VOCAB, assert_same_bits, inputs, make, outputs, torch

import tpde
from tpde import nn as packed_nn
from tpde.files.reader import PackedFile

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.integrations.transformers.shape import opened_shape  # noqa: E402


@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    packed = same_model(name, pair)
    assert packed.hf_quantizer.decoded == 0
    with PackedFile(pair.packed / "model.safetensors") as file:
        names = {
            slot.packed.name for _, it in packed_nn.packed_modules(packed) for slot in it.tpde_slots.values()
        }
        assert names <= set(file.packed_names())
        parts = {
            source.name
            for _, it in packed_nn.packed_modules(packed)
            for slot in it.tpde_slots.values()
            for source in slot.packed.sources
        }
        assert parts == set(file.packed_names())  # every one, and nothing was decoded


@pytest.mark.parametrize("name", CAUSAL)
def test_generation(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    took = inputs(name, 2, 5)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = pair.kind.from_pretrained(pair.plain).generate(took, **options)
    assert torch.equal(tpde.from_pretrained(pair.packed).generate(took, **options), expected)


@pytest.mark.parametrize("options", [{}, {"kernels": "fused"}, {"dtype": torch.float32}], ids=str)
def test_what_is_loaded_in_inference_mode_can_be_trained_around(options: Any, tmp_path: Path) -> None:
    """As a plain model can, whose weights transformers loads in threads of its own."""
    path = checkpoint(tmp_path, "llama").packed
    with torch.inference_mode():
        model = tpde.from_pretrained(path, device="cpu", **options)
        assert torch.is_inference_mode_enabled()
    assert not any(it.is_inference() for it in (*model.parameters(), *model.buffers()))
    head = torch.nn.Linear(model.config.hidden_size, 1, dtype=model.dtype)
    head(model.model(**inputs("llama", 1, 4)).last_hidden_state).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "t5"])
def test_sharded(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name, max_shard_size="120KB")
    assert len(list(pair.packed.glob("*.safetensors"))) > 1
    same_model(name, pair)


def test_experts_are_many_parts_of_one_weight(tmp_path: Path) -> None:
    packed = tpde.from_pretrained(checkpoint(tmp_path, "mixtral").packed)
    experts = packed.model.layers[0].mlp.experts
    names = [it.name.rpartition("experts.")[2] for it in experts.gate_up_proj.packed.sources]
    assert names == [f"{i}.{w}.weight" for i in range(4) for w in ("w1", "w3")]
    assert len(experts.down_proj.packed.sources) == 4


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    packed = tpde.from_pretrained(checkpoint(tmp_path, "t5").packed)
    modules = [packed.shared, packed.encoder.embed_tokens, packed.decoder.embed_tokens, packed.lm_head]
    assert len({id(module.weight) for module in modules}) == 1
    packed.tie_weights()  # as some code does again later
    assert len({id(module.weight) for module in modules}) == 1


def test_tied_by_the_model_but_not_by_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make("qwen2")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.02)
    model.config.tie_word_embeddings = False
    pair = write(tmp_path, model)
    for folder in (pair.plain, pair.packed):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with caplog.at_level(logging.INFO, "tpde"):
        same_model("qwen2", pair)
    assert "are not tied" in caplog.text


def test_the_same_weight_twice_in_the_files_is_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    pair = checkpoint(tmp_path, "qwen2")
    state = load_file(pair.plain / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, pair.plain / "model.safetensors", {"format": "pt"})
    tpde.pack(pair.plain, pair.packed, force=True)
    packed = same_model("qwen2", pair)
    assert packed.lm_head.weight is packed.model.embed_tokens.weight


def test_a_head_that_the_files_lack_is_initialised(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "bert")
    kind = transformers.BertForSequenceClassification
    torch.manual_seed(1)
    plain = kind.from_pretrained(pair.plain)
    torch.manual_seed(1)
    packed = tpde.from_pretrained(pair.packed, model_class=kind)
    with torch.no_grad():
        assert_same_bits(packed(**inputs("bert", 2, 7)).logits, plain(**inputs("bert", 2, 7)).logits)


def test_a_base_model_from_a_larger_one(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    plain = transformers.AutoModel.from_pretrained(pair.plain)
    packed = tpde.from_pretrained(pair.packed, model_class=transformers.AutoModel)
    with torch.no_grad():
        took = inputs("llama", 2, 7)
        assert_same_bits(packed(**took).last_hidden_state, plain(**took).last_hidden_state)


def wide() -> Any:
    """A model of which nothing is too small to be packed."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}
    return (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).half().eval()
    )


def with_float32_norms() -> Any:
    model = make("llama", torch.float16)
    for it in model.modules():
        if "Norm" in type(it).__name__:
            it.float()
    return model


@pytest.mark.parametrize("maker", [partial(make, "gpt2", torch.float16), wide, with_float32_norms])
def test_dtype_of_a_config_that_names_none(maker: Any, tmp_path: Path) -> None:
    """Is that of the first tensor, though transformers sees plain ones only."""
    pair = write(tmp_path, maker())
    for folder in (pair.plain, pair.packed):
        config = json.loads((folder / "config.json").read_text())
        config.pop("dtype")
        (folder / "config.json").write_text(json.dumps(config))
    packed = same_model("causal", pair)
    assert packed.dtype is torch.float16
    with opened_shape(pair.packed) as (planned, _, weights):
        assert planned.dtype is torch.float16
        assert not any("is stored as" in reason for _, reason in weights.decoded)
        assert packed.hf_quantizer.decoded == len(weights.decoded), "norms that are packed"


@pytest.mark.parametrize("way", ["packed", "as it comes", "packed in memory"])
def test_weights_that_transformers_keeps_in_float32(way: str, tmp_path: Path) -> None:
    """The `wo` of a T5 in fp16."""
    pair = checkpoint(tmp_path, "t5")
    plain = pair.kind.from_pretrained(pair.plain, dtype=torch.float16)
    kept = {name for name, it in plain.state_dict().items() if it.dtype is torch.float32}
    assert kept
    plain.save_pretrained(tmp_path / "half")
    if way == "packed":
        tpde.pack(tmp_path / "half", tmp_path / "half packed")
    elif way == "packed in memory":
        tpde.pack_module(copy.deepcopy(plain), min_bytes=0).save_pretrained(tmp_path / "half packed")
    folder = tmp_path / ("half" if way == "as it comes" else "half packed")
    model = tpde.from_pretrained(folder, pack=way == "as it comes")
    assert model.hf_quantizer.decoded == 0
    assert kept <= {f"{path}.weight" for path, _ in packed_nn.packed_modules(model)}
    for key, value in plain.state_dict().items():
        assert_same_bits(packed_nn.plain_state_dict(model)[key], value, key)
    with torch.no_grad():
        assert_same_bits(outputs("t5", model, 2), outputs("t5", copy.deepcopy(plain), 2))


@pytest.mark.parametrize("budget", [False, True])
def test_a_row_that_transformers_makes_zero_is_told(
    budget: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of padding, in a Funnel; the packed model has the file's."""
    sizes = {"vocab_size": VOCAB, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
    model = transformers.FunnelModel(transformers.FunnelConfig(**sizes, block_sizes=[1], pad_token_id=7))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    pair = write(tmp_path, model)
    plain = pair.kind.from_pretrained(pair.plain)
    assert not plain.get_input_embeddings().weight[7].any()
    plain.save_pretrained(tmp_path / "zero")
    tpde.pack(tmp_path / "zero", tmp_path / "zero packed")
    for folder, told in (pair.packed, True), (tmp_path / "zero packed", False):
        caplog.clear()
        with simulated(monkeypatch):
            packed = load(folder) if budget else tpde.from_pretrained(folder)
            row = packed.get_input_embeddings()(torch.tensor([7]))
        assert row.any() == told
        assert ("row 7 of `embeddings.word_embeddings.weight`" in caplog.text) == told


def test_zstd_blobs(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    tpde.pack(pair.plain, pair.packed, codec="zstd", force=True)
    same_model("llama", pair)
