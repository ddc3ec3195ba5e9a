"""What a model needs beside its packed weights, term by term, in numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.checkpoints import write  # noqa: E402
from support.experts import moe  # noqa: E402
from support.llama import llama  # noqa: E402
from support.models import make  # noqa: E402

from tpde.integrations.transformers import budget_plan as model_planning  # noqa: E402
from tpde.integrations.transformers import expert_modules, model_footprint  # noqa: E402
from tpde.integrations.transformers.activations import activations_of  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402
from tpde.loading.footprint import FIXED_BYTES, module_calls, plain_bytes  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.layout import page_tables  # noqa: E402


def test_a_cache_of_keys_and_values() -> None:
    """Of 100 tokens: 2 heads x 16 x 2 x 2 bytes a token and layer; a quarter more, and a layer that grows."""
    layer = 2 * 16 * 2 * 2 * 100
    assert model_footprint.cache_bytes(llama(), 100, 2) == int(layer * 3 * 1.25) + layer
    assert (
        model_footprint.cache_bytes(llama(num_key_value_heads=4), 100, 2)
        == int(2 * layer * 3 * 1.25) + 2 * layer
    )
    only = {"model.layers.1.mlp.up_proj.weight"}
    assert model_footprint.cache_bytes(llama(), 100, 2, only) == int(layer * 1.25) + layer
    assert model_footprint.cache_bytes(llama(), 100, 2, set()) == 0


def test_a_cache_of_an_encoder_and_a_decoder() -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    layer = 4 * 16 * 4 * 100
    assert model_footprint.cache_bytes(model, 100, 4) == int(layer * 4 * 1.25) + layer


def test_states_and_the_one_that_is_replaced() -> None:
    """Of two convolutions of 64 channels over 3 tokens, in bfloat16; another layer has none."""
    model, states = make("lfm2"), 2 * 64 * 3 * 2
    assert model_footprint.state_bytes(model, 8) == 8 * (states + states // 2)
    one = [name for name, _ in model.named_parameters() if name.startswith("model.layers.2.")]
    assert model_footprint.state_bytes(model, 8, one) == 8 * (states // 2 + states // 4)
    assert model_footprint.state_bytes(llama(), 8) == 0


def test_plain_weights_are_counted_as_they_are_allocated() -> None:
    model = llama(tie_word_embeddings=True)
    names = dict(model.named_parameters(remove_duplicate=False))
    norms = 7 * 512  # of 128 bytes
    buffers = len({id(it) for it in model.buffers()}) * 512
    packed = {name for name, it in names.items() if it.dim() == 2} - {"lm_head.weight"}
    assert plain_bytes(model, packed) == norms + buffers, "the head is the embedding"
    assert plain_bytes(model, packed - {"model.embed_tokens.weight"}) == norms + buffers + 128_000
    assert plain_bytes(model, packed, {"model.norm.weight"}) == 512


def test_lists_of_modules_are_not_called() -> None:
    lists = [torch.nn.ModuleList([torch.nn.Linear(1, 1)]), torch.nn.ModuleDict({"a": torch.nn.ReLU()})]
    assert module_calls(torch.nn.Sequential(*lists)) == 3


def test_latent_attention_is_cached_expanded() -> None:
    """For each head: keys of both kinds and values, of 100 tokens in two bytes."""
    model = llama()
    for name, value in {"qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7}.items():
        setattr(model.config, name, value)
    layer = 4 * (5 + 3 + 7) * 2 * 100
    assert model_footprint.cache_bytes(model, 100, 2) == int(layer * 3 * 1.25) + layer


def test_models_that_cache_nothing() -> None:
    class NoCache(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any) -> Any:
            return input_ids

    model = llama()
    assert model_footprint.cache_bytes(NoCache(model.config), 100, 2) == 0
    model.config.is_decoder = True
    assert model_footprint.cache_bytes(model, 100, 2) > 0
    model.config.is_decoder = False
    assert model_footprint.cache_bytes(model.model, 100, 2) == 0, "an encoder"
    model = llama()
    vars(model.config)["num_attention_heads"] = None
    assert model_footprint.cache_bytes(model, 100, 2) == 0, "no attention"


def test_a_model_that_generates_caches_whatever_its_configuration_says() -> None:
    """GPT-NeoX says that it is no decoder."""
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    config = transformers.GPTNeoXConfig(**sizes, num_attention_heads=4)
    assert config.is_decoder is False
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    layer = 2 * 64 * 2 * 100
    assert model_footprint.cache_bytes(model, 100, 2) == int(layer * 3 * 1.25) + layer


class Layers(SimpleNamespace):
    """A configuration of layers that differ: what does cannot be asked of it."""

    is_heterogeneous = True

    def __init__(self, config: Any, *layers: dict[str, Any]) -> None:
        super().__init__(**{k: v for k, v in vars(config).items() if all(k not in it for it in layers)})
        self.per_layer_config = [SimpleNamespace(**(vars(config) | it)) for it in layers]
        self._all, self._differs = config, {name for it in layers for name in it}

    def __getattr__(self, name: str) -> Any:
        if name in self._differs:
            raise RuntimeError(f"'{name}' is a per-layer attribute")
        return getattr(self._all, name)

    def get_text_config(self) -> Any:
        return self


def test_layers_that_differ() -> None:
    """Each caches its own, and the largest grows; scores are those of the most heads."""
    model = llama(attn_implementation="eager")
    layers = [{"head_dim": 16, "num_attention_heads": 4}, {"head_dim": 32, "num_attention_heads": 8}] * 2
    model.config = Layers(model.config, *layers[:3])
    small, large = (2 * heads * 2 * 2 * 100 for heads in (16, 32))
    assert model_footprint.cache_bytes(model, 100, 2) == int((2 * small + large) * 1.25) + large
    only = {"model.layers.0.mlp.up_proj.weight"}
    assert model_footprint.cache_bytes(model, 100, 2, only) == int(small * 1.25) + small
    assert activations_of(model, 2).pair == 1 + 2 + 8 * (2 * 2 + 4)


def test_stages_that_differ() -> None:
    """Of a vision model: scores are those of the most heads."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=2
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.SwinModel(config)
    assert activations_of(model, 2).pair == 1 + 2 + 4 * (2 * 2 + 4)
    assert model_footprint.cache_bytes(model, 100, 2) == 0


def test_blocks_of_unknown_kinds_cache_all() -> None:
    """Where there are more blocks than layers, it is not known which of them cache."""
    model, only = llama(num_hidden_layers=4), {"model.layers.1.mlp.up_proj.weight"}
    every = model_footprint.cache_bytes(model, 100, 2)
    assert model_footprint.cache_bytes(model, 100, 2, only) < every
    model.config.num_hidden_layers = 3
    every = model_footprint.cache_bytes(llama(), 100, 2)
    assert model_footprint.cache_bytes(model, 100, 2, only) == every


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", "`max_tokens`"),
        ("mixtral", "`max_tokens` or `max_batch`"),  # whose experts are copied
        ("lfm2", "`max_tokens` or `max_batch`"),  # whose layers have states
    ],
)
def test_all_that_a_model_needs(name: str, said: str) -> None:
    model = moe(name, "grouped_mm") if name == "mixtral" else make(name)
    needs = model_footprint.footprint_of(model, set(), 100, 4, torch.bfloat16)
    assert needs.plain == plain_bytes(model, set())
    states = model_footprint.state_bytes(model, 4)
    assert (states > 0) == (name == "lfm2")
    assert needs.cache == model_footprint.cache_bytes(model, 100, 2) + states
    made = activations_of(model, 2)
    assert needs.activations == made.bytes(100, 4)
    assert made.copies == (name == "mixtral")
    assert (needs.fixed, needs.column, needs.argument) == (FIXED_BYTES, 200, said)
    one = [it for it, _ in model.named_parameters() if ".layers.1." in it]
    here = model_footprint.footprint_of(model, set(), 100, 4, torch.bfloat16, one)
    assert here.plain == plain_bytes(model, set(), one)
    assert here.cache == (
        model_footprint.cache_bytes(model, 100, 2, one) + model_footprint.state_bytes(model, 4, one)
    )
    assert here.activations == needs.activations


def test_the_dtype_of_most_numbers() -> None:
    many, few = torch.zeros(10, dtype=torch.float16), torch.zeros(9, dtype=torch.bfloat16)
    assert model_footprint.activation_dtype([few, many]) is torch.float16
    assert model_footprint.activation_dtype([few, many, few]) is torch.bfloat16, "all of one dtype together"
    assert model_footprint.activation_dtype([]) is torch.float32


def test_what_a_plan_of_a_model_counts(tmp_path: Path) -> None:
    """Of several devices: what the others have comes through page tables only."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 9}
    with opened_shape(write(tmp_path, moe("mixtral", **sizes)).packed) as (shape, files, plan):
        budget = Budget(1 << 40, None, 64)
        assert not model_planning.plan_streaming(shape, files, plan, budget).parts["pages"]
        here = {name for name in plan.runs if ".layers." in name and ".layers.0." not in name}
        plan.runs["again"] = plan.runs[min(here)]  # of the same bytes
        parts = {it: name in here for name, run in plan.runs.items() for it in run.parts}
        parts |= dict.fromkeys(plan.runs["again"].parts, True)
        others = [it for it, ours in parts.items() if not ours]
        for it in others:  # nobody reads them
            it.extent = it.extent._replace(size=it.extent.size << 16)
        made = model_planning.plan_streaming(shape, files, plan, budget, only=here)
        assert made.parts["pages"] == page_tables(sum(it.extent.size for it in others)) > 100 << 20
        assert not made.parts["experts"], "nothing is streamed"
        packed = sum(it.extent.size for it, ours in parts.items() if ours)
        budget = replace(budget, vram=made.used - made.parts["decoded"] + packed)
        made = model_planning.plan_streaming(shape, files, plan, budget, only=here)
        assert made.parts["experts"] == expert_modules.cache_least(shape, plan.runs, here) > 0
