"""Models that vLLM loads or uses in ways of their own: the plain model's bits, or a refusal by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.vllm import VOCABULARY, close, engine, generated, kernels, save_experts, save_tokenizer

import tpde
from tpde.errors import InvalidInput

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")

Models = dict[str, Path]
TPDE = {"quantization": "tpde"}
SIZES = {
    "vocab_size": VOCABULARY,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 1,
    "dtype": "bfloat16",
    "initializer_range": 0.06,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def saved(at: Path, name: str, **more: Any) -> Path:
    """A model by the name of its classes in transformers, plain in a folder."""
    import transformers

    torch.manual_seed(0)
    kind = name.removesuffix("Text")
    made = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**(SIZES | more))
    ).to(torch.bfloat16)
    for parameter, value in made.named_parameters():
        if parameter.endswith("bias"):
            value.data.normal_(0, 0.1)
    made.save_pretrained(at / "plain")
    save_tokenizer(at / "plain")
    return at / "plain"


def packed(plain: Path) -> Path:
    tpde.pack(plain, plain.with_name("packed"))
    return plain.with_name("packed")


@pytest.mark.quick
def test_weights_that_are_changed_by_their_names(tmp_path: Path) -> None:
    """Before any mapper of names is asked: Llama 4's rotary projections are permuted."""
    plain = saved(
        tmp_path,
        "Llama4Text",
        pad_token_id=0,
        intermediate_size=192,
        intermediate_size_mlp=192,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    )
    wanted = generated(plain)
    assert generated(packed(plain)) == wanted
    assert generated(plain, **TPDE) == wanted


def test_names_of_consolidated_files(tmp_path: Path) -> None:
    """Mistral's own, which vLLM renames, and permutes."""
    from safetensors.torch import load_file, save_file

    plain = saved(tmp_path, "Mistral", intermediate_size=256)
    wanted = generated(plain)
    names = {
        "model.": "",
        "self_attn.": "attention.",
        "mlp.": "feed_forward.",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "q_proj": "wq",
        "k_proj": "wk",
        "v_proj": "wv",
        "o_proj": "wo",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        for new, old in names.items():
            name = name.replace(new, old)  # noqa: PLW2901
        tensors[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    renamed = generated(plain)
    assert renamed != wanted, "queries are permuted"
    assert generated(packed(plain)) == renamed


@pytest.mark.quick
@pytest.mark.parametrize("how", ["plain", "packed", "exact"])
def test_values_that_come_past_a_layers_loader(tmp_path: Path, how: str) -> None:
    """Into weights that are not there until all values have come: gpt-oss's experts."""
    plain = saved(
        tmp_path,
        "GptOss",
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
    )
    options = {"plain": TPDE, "packed": {}, "exact": kernels("exact")}[how]
    model = packed(plain) if how == "packed" else plain
    with pytest.raises(InvalidInput, match=r"no values came for .*model\.layers\.0\.mlp\.experts"):
        engine(model, **options)


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_in_no_file(models: Models, tmp_path: Path, missing: str) -> None:
    """Of norms vLLM says it, as of plain models; of a layer we do."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(models["llama"], tmp_path / "plain")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "plain/model.safetensors", {"format": "pt"})
    for model, options in ((tmp_path / "plain", TPDE), (packed(tmp_path / "plain"), {})):
        with pytest.raises(
            (ValueError, InvalidInput), match=r"not initialized from checkpoint|no values came"
        ):
            engine(model, **options)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "missing", "text"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight", "qkv_proj`, and none for its part `k`"),
        ("llama", "model.layers.0.mlp.up_proj.weight", "gate_up_proj`, and none for its part `1`"),
        ("experts", "model.layers.1.mlp.experts.3.up_proj.weight", "w13_weight`, and none for 1 of 16 t"),
        ("experts", "model.layers.1.mlp.experts.3.down_proj.weight", "w2_weight`, and none for 1 of 8 te"),
    ],
)
def test_parts_of_merged_weights_that_are_in_no_file(
    models: Models, tmp_path: Path, name: str, missing: str, text: str
) -> None:
    """Plain vLLM runs with what was in memory there."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(models[name], tmp_path / "plain")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "plain/model.safetensors", {"format": "pt"})
    for model, options in ((tmp_path / "plain", TPDE), (packed(tmp_path / "plain"), {})):
        with pytest.raises(InvalidInput, match=text):
            engine(model, **options)


@pytest.mark.parametrize("options", [TPDE, kernels("exact")], ids=["fused", "exact"])
def test_embeddings_of_texts_by_a_model_with_a_head(models: Models, options: dict[str, Any]) -> None:
    """vLLM makes the head, and reads nothing into it."""

    def embedded(**more: Any) -> list[list[float]]:
        llm = engine(models["llama"], runner="pooling", convert="embed", **more)
        try:
            return [it.outputs.embedding for it in llm.embed(["t1 t2 t3", "t9"])]
        finally:
            close(llm)

    assert embedded(**options) == embedded()


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_of_two_rows_of_its_head(tmp_path: Path, tied: bool) -> None:
    plain = saved(tmp_path, "Qwen3", intermediate_size=256, head_dim=32, tie_word_embeddings=tied)
    rerank = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["t7", "t8"],
        "is_original_qwen3_reranker": True,
    }

    def scores(model: Path, **more: Any) -> list[float]:
        llm = engine(model, runner="pooling", hf_overrides=rerank, **more)
        try:
            return [it.outputs.score for it in llm.score("t1 t2", ["t3 t4 t5", "t9"])]
        finally:
            close(llm)

    wanted = scores(plain)
    assert len(set(wanted)) == 2
    assert scores(plain, **TPDE) == wanted
    assert scores(packed(plain)) == wanted


def test_a_tied_head_of_transformers_own_code(tmp_path: Path) -> None:
    """vLLM changes the model's class for all that comes in this process: it is none of other tests'."""
    plain = saved(tmp_path, "Qwen2", intermediate_size=256, tie_word_embeddings=True)
    wanted = generated(plain, model_impl="transformers")
    assert generated(plain, model_impl="transformers", **TPDE) == wanted
    assert generated(packed(plain), model_impl="transformers") == wanted


def test_experts_in_transformers_own_code(tmp_path: Path) -> None:
    """Their router has two names, and values come by one of them."""
    plain = save_experts(tmp_path / "plain")
    wanted = generated(plain, model_impl="transformers")
    assert generated(plain, model_impl="transformers", **TPDE) == wanted
    assert generated(packed(plain), model_impl="transformers") == wanted


@pytest.mark.quick
def test_methods_of_files_may_be_in_capitals(models: Models, tmp_path: Path) -> None:
    """vLLM takes them so."""
    shutil.copytree(models["llama-packed"], tmp_path / "model")
    path = tmp_path / "model/config.json"
    said = {"quantization_config": {"quant_method": "TPDE", "version": 1}}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    close(engine(tmp_path / "model"))


def test_ways_of_reading_that_decode_nothing(models: Models) -> None:
    with pytest.raises(InvalidInput, match="`--load-format npcache` brings weights in a way of its own"):
        engine(models["llama-packed"], load_format="npcache")


def save_chatglm(at: Path) -> Path:
    """A ChatGLM of random weights, in the form of its own files: transformers has no code of it."""
    import json

    from safetensors.torch import save_file

    config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "num_layers": 2,
        "padded_vocab_size": VOCABULARY,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "kv_channels": 32,
        "num_attention_heads": 4,
        "seq_length": 256,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "apply_residual_connection_post_layernorm": False,
        "post_layer_norm": True,
        "original_rope": True,
        "layernorm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": VOCABULARY - 1,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCABULARY, 128),
        "encoder.final_layernorm.weight": (128,),
    }
    for i in range(2):
        shapes |= {
            f"encoder.layers.{i}.input_layernorm.weight": (128,),
            f"encoder.layers.{i}.mlp.dense_4h_to_h.weight": (128, 256),
            f"encoder.layers.{i}.mlp.dense_h_to_4h.weight": (512, 128),
            f"encoder.layers.{i}.post_attention_layernorm.weight": (128,),
            f"encoder.layers.{i}.self_attention.dense.weight": (128, 128),
            f"encoder.layers.{i}.self_attention.query_key_value.bias": (256,),
            f"encoder.layers.{i}.self_attention.query_key_value.weight": (256, 128),
        }
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"transformer.{name}": (0.06 * torch.randn(shape, generator=draw) + ("norm" in name)).bfloat16()
        for name, shape in shapes.items()
    }
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    save_file(tensors, at / "model.safetensors", {"format": "pt"})
    save_tokenizer(at)
    return at


@pytest.mark.quick
def test_a_head_that_is_given_the_embeddings_weight(tmp_path: Path) -> None:
    """By an assignment, where other models call a method: ChatGLM's."""
    plain = save_chatglm(tmp_path / "plain")
    wanted = generated(plain)
    assert generated(plain, **TPDE) == wanted
    assert generated(packed(plain)) == wanted


def test_weights_that_are_given_other_loaders(tmp_path: Path) -> None:
    """After their layers were made: those of Mamba 2's mixers, whose one group both workers have."""
    sizes = {"num_heads": 8, "head_dim": 32, "n_groups": 1, "expand": 2, "state_size": 32, "chunk_size": 64}
    plain = saved(tmp_path, "Mamba2", **sizes)
    two = {"tensor_parallel_size": 2}
    wanted = generated(plain, **two)
    assert generated(packed(plain), **two) == wanted


@pytest.mark.quick
@pytest.mark.parametrize("how", ["plain", "packed"])
def test_layers_with_biases_are_packed_while_files_are_read(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once its last tensor came, so that no others wait on the device."""
    from support.vllm import save_llama

    from tpde.integrations.vllm import linear_method, loader

    held: list[str] = []
    by_then: list[list[str]] = []
    hold, read = linear_method.hold, loader.TpdeModelLoader.get_all_weights

    def noted(report: Any, plain: Any, name: str, **options: Any) -> Any:
        held.append(name)
        return hold(report, plain, name, **options)

    def all_read(self: Any, *args: Any) -> Any:
        yield from read(self, *args)
        by_then.append(list(held))

    monkeypatch.setattr(linear_method, "hold", noted)
    monkeypatch.setattr(loader.TpdeModelLoader, "get_all_weights", all_read)
    plain = save_llama(tmp_path / "plain", biases=True)
    if how == "packed":
        generated(packed(plain))
    else:
        generated(plain, **TPDE)
    assert by_then == [held]
    assert len(held) == 2 + 2 * 4
