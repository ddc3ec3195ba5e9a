"""Weights that models change themselves stay plain, and the models run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write
from support.models import VOCAB, assert_same_bits, torch

import tpde
from tpde.nn import PackedParameter, pack_module
from tpde.nn.unpackable import kept_plain

transformers = pytest.importorskip("transformers", reason="needs transformers")


def _rwkv() -> Any:
    return transformers.RwkvForCausalLM(
        transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=8, rescale_every=2)
    )


def _switch() -> Any:
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            vocab_size=VOCAB,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            decoder_start_token_id=0,
        )
    )


def test_what_is_looked_at_is_not_said_to_be_changed() -> None:
    model = torch.nn.TransformerEncoderLayer(64, 4, 128)
    for name, reason in kept_plain(model).items():
        assert "choose kernels by" in reason, name
    assert set(kept_plain(model)) == {"self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    reasons = kept_plain(_rwkv())
    assert all("is changed by the model" in it for it in reasons.values())
    assert len(reasons) == 16


def _inherit(model: Any) -> None:
    """Make modules of classes of somebody's own, which do what theirs do."""
    for module in model.modules():
        module.__class__ = type("Mine", (type(module),), {})


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("name", ["rwkv", "switch"])
def test_they_run(name: str, inherited: bool) -> None:
    torch.manual_seed(0)
    plain = (_rwkv if name == "rwkv" else _switch)().to(torch.bfloat16).eval()
    if inherited:
        _inherit(plain)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    ids = torch.arange(12).reshape(2, 6)
    took = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "switch" else {})
    with torch.no_grad():
        for _ in range(2):
            assert_same_bits(ours(**took).logits, plain(**took).logits)
    kinds = {it for it, parameter in ours.named_parameters() if isinstance(parameter, PackedParameter)}
    changed = "attention.output" if name == "rwkv" else "router.classifier"
    assert not any(changed in it for it in kinds)
    assert any("attention.key" in it or "SelfAttention.q" in it for it in kinds)
    tpde.unpack_module(ours)


@pytest.mark.parametrize("name", ["rwkv", "switch"])
def test_they_are_loaded(name: str, tmp_path: Path) -> None:
    """Of a packed directory, what the model changes is decoded."""
    torch.manual_seed(0)
    plain = (_rwkv if name == "rwkv" else _switch)().to(torch.bfloat16).eval()
    made = write(tmp_path, plain)
    ours = tpde.from_pretrained(made.packed)
    expected = kept_plain(plain)
    assert expected
    parameters = dict(ours.named_parameters())
    assert not [it for it in expected if isinstance(parameters[it], PackedParameter)]
    assert any(isinstance(it, PackedParameter) for it in parameters.values())
    ids = torch.arange(12).reshape(2, 6)
    took = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "switch" else {})
    with torch.no_grad():
        for _ in range(2):
            assert_same_bits(ours(**took).logits, plain(**took).logits)
