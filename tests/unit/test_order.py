"""Tensors are stored block by block, in the order of a forward pass."""

from __future__ import annotations

import random

import pytest

from tpde.files.forward_order import block_of, forward_order

LLAMA = """model.embed_tokens.weight
model.layers.{i}.input_layernorm.weight
model.layers.{i}.self_attn.q_proj.weight
model.layers.{i}.self_attn.k_proj.weight
model.layers.{i}.self_attn.v_proj.weight
model.layers.{i}.self_attn.o_proj.weight
model.layers.{i}.post_attention_layernorm.weight
model.layers.{i}.mlp.gate_proj.weight
model.layers.{i}.mlp.up_proj.weight
model.layers.{i}.mlp.down_proj.weight
model.norm.weight
lm_head.weight"""
GPT2 = """wpe.weight
wte.weight
h.{i}.ln_1.bias
h.{i}.ln_1.weight
h.{i}.attn.c_attn.bias
h.{i}.attn.c_attn.weight
h.{i}.attn.c_proj.bias
h.{i}.attn.c_proj.weight
h.{i}.ln_2.bias
h.{i}.ln_2.weight
h.{i}.mlp.c_fc.bias
h.{i}.mlp.c_fc.weight
h.{i}.mlp.c_proj.bias
h.{i}.mlp.c_proj.weight
ln_f.bias
ln_f.weight"""
BERT = """bert.embeddings.position_embeddings.weight
bert.embeddings.word_embeddings.weight
bert.encoder.layer.{i}.attention.self.query.weight
bert.encoder.layer.{i}.attention.self.key.weight
bert.encoder.layer.{i}.attention.self.value.weight
bert.encoder.layer.{i}.attention.output.dense.weight
bert.encoder.layer.{i}.attention.output.LayerNorm.weight
bert.encoder.layer.{i}.intermediate.dense.weight
bert.encoder.layer.{i}.output.dense.weight
bert.encoder.layer.{i}.output.LayerNorm.weight
bert.pooler.dense.weight
classifier.weight"""
MIXTRAL = """model.embed_tokens.weight
model.layers.{i}.input_layernorm.weight
model.layers.{i}.self_attn.q_proj.weight
model.layers.{i}.post_attention_layernorm.weight
model.layers.{i}.block_sparse_moe.gate.weight
model.layers.{i}.block_sparse_moe.experts.0.w1.weight
model.layers.{i}.block_sparse_moe.experts.10.w1.weight
model.layers.{i}.block_sparse_moe.experts.0.w3.weight
model.layers.{i}.block_sparse_moe.experts.10.w3.weight
model.layers.{i}.block_sparse_moe.experts.0.w2.weight
model.layers.{i}.block_sparse_moe.experts.10.w2.weight
lm_head.weight"""


def _names(template: str) -> list[str]:
    """Give a model of twelve blocks: names with two digits come after those with one."""
    names: list[str] = []
    lines = template.split("\n")
    inside = [line for line in lines if "{i}" in line]
    first = lines.index(inside[0])
    names += lines[:first]
    names += [line.format(i=i) for i in range(12) for line in inside]
    return names + lines[first + len(inside) :]


@pytest.mark.parametrize("template", [LLAMA, GPT2, BERT, MIXTRAL], ids=["llama", "gpt2", "bert", "mixtral"])
def test_models_are_ordered_as_they_compute(template: str) -> None:
    wanted = _names(template)
    shuffled = random.Random(0).sample(wanted, len(wanted))
    found = forward_order(shuffled)
    assert sorted(found) == sorted(wanted)
    outside = [n for n in wanted if block_of(n) is None]
    assert [n for n in found if block_of(n) is not None] == [n for n in wanted if block_of(n) is not None]
    for name in outside:
        early = any(word in name for word in ("embed", "wte", "wpe"))
        assert (found.index(name) < len(found) // 2) == early, name


@pytest.mark.parametrize(
    "order",
    [
        ["z.embed", "x.0.w", "a"],
        ["WTE", "x.0.w", "a.norm"],
        ["b.embed2", "b.embed10", "b.wpe", "x.0.w", "ln_f.bias", "head", "norm"],
        ["patch.w", "time_in", "x.0.w", "z.final", "z.ln_f", "z.norm_f", "z.pooler", "a.lm_head", "a"],
        ["conv_in.w", "shared", "x.0.w", "z.norm_f", "a.classifier", "b.proj_out", "c.conv_out", "0a", "b"],
        ["x.0.w", "x.1.w", "x.2.w", "x.10.w", "y.0.w"],
        ["x.0.z.q_proj", "x.0.k_proj", "x.0.b.v_proj", "x.0.a.o_proj", "x.0.a.w1", "x.0.a.w3", "x.0.a.w2"],
        ["x.0.norm1", "x.0.to_q", "x.0.to_out", "x.0.norm2", "x.0.fc1", "x.0.fc2", "x.0.a"],
        ["x.0.w1.2", "x.0.w1.10", "x.0.w1.10.a", "x.0.w2.1"],
    ],
)
def test_what_comes_first_is_told_by_parts_of_names(order: list[str]) -> None:
    for seed in range(5):
        assert forward_order(random.Random(seed).sample(order, len(order))) == order


def test_t5_keeps_encoder_and_decoder_blocks_together() -> None:
    names = [
        f"{side}.block.{i}.layer.{j}.{part}.weight"
        for side in ("decoder", "encoder")
        for i in (0, 2, 10)
        for j, part in ((0, "SelfAttention.q"), (0, "SelfAttention.o"), (1, "DenseReluDense.wi"))
    ]
    names += ["shared.weight", "encoder.final_layer_norm.weight", "lm_head.weight"]
    found = forward_order(random.Random(1).sample(names, len(names)))
    blocks = [block_of(n) for n in found]
    runs = [b for i, b in enumerate(blocks) if i == 0 or blocks[i - 1] != b]
    sides = [f"{side}.block.{i}" for side in ("decoder", "encoder") for i in (0, 2, 10)]
    assert runs == [None, *sides, None]
    assert found[0] == "shared.weight"
    assert found[-1] == "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.7.mlp.up_proj.weight", "model.layers.7"),
        ("0.weight", "0"),
        ("layers.3", "layers.3"),
        ("model.layers.7.experts.12.w1", "model.layers.7"),
        ("layer1.conv.weight", None),
        ("ln_1.weight", None),
        ("", None),
    ],
)
def test_a_block_is_the_name_up_to_its_first_number(name: str, block: str | None) -> None:
    assert block_of(name) == block


def test_the_order_depends_on_the_names_alone() -> None:
    names = _names(LLAMA) + _names(GPT2) + ["a", "B", "é", "0", "x.1.y", "x.01.y"]
    orders = {tuple(forward_order(random.Random(i).sample(names, len(names)))) for i in range(20)}
    assert len(orders) == 1
