"""Models to serve: random weights with a trained model's statistics, and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.data.synthetic import shards_of, weight
from benchmarks.harness.report import note
from tpde.format.container import TensorSpec
from tpde.format.container_writer import canonical_header

# hidden, intermediate, layers, heads, key-value heads, head size, vocabulary, experts, experts a token
SHAPES = {
    "tiny": (256, 512, 2, 4, 2, 64, 10240, 0, 0),  # vLLM's `bench latency` draws tokens below 10,000
    "tiny-experts": (128, 96, 2, 4, 2, 32, 10240, 8, 2),
    "llama-8b": (4096, 14336, 32, 32, 8, 128, 128256, 0, 0),
    "llama-13b": (5120, 13824, 40, 40, 40, 128, 32000, 0, 0),
    "qwen3-30b-a3b": (2048, 768, 48, 32, 4, 128, 151936, 128, 8),
}
# The longest word. vLLM refuses prompts of more characters than its length times the tokens that may be.
UNKNOWN = "<unknown>"
THREADS = 8  # each writes a file: one alone waits for the device, or for the pages of its file

Sizes = tuple[int, ...]


def sizes_of(shape: str, layers: int | None) -> Sizes:
    """What `SHAPES` has, with another number of layers if one is given."""
    first, middle, found, *rest = SHAPES[shape]
    return (first, middle, layers or found, *rest)


def title_of(shape: str, layers: int | None) -> str:
    """What such a model, and its folder, is called."""
    return f"{shape}-{layers}-layers" if layers else shape


def config_of(sizes: Sizes) -> dict[str, Any]:
    """The `config.json` of a model."""
    hidden, middle, layers, heads, key_heads, head, vocabulary, experts, chosen = sizes
    common = {
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if not experts:
        return common | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return common | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": middle,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint."""
    hidden, middle, layers, heads, key_heads, head, vocabulary, experts, _ = sizes
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        at = f"model.layers.{number}"
        found[f"{at}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", heads * head), ("k", key_heads * head), ("v", key_heads * head)):
            found[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head)
        if experts:
            found[f"{at}.self_attn.q_norm.weight"] = found[f"{at}.self_attn.k_norm.weight"] = (head,)
            found[f"{at}.mlp.gate.weight"] = (experts, hidden)
        found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for part in [f"experts.{it}." for it in range(experts)] or [""]:
            found[f"{at}.mlp.{part}gate_proj.weight"] = (middle, hidden)
            found[f"{at}.mlp.{part}up_proj.weight"] = (middle, hidden)
            found[f"{at}.mlp.{part}down_proj.weight"] = (hidden, middle)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def make(directory: Path, shape: str, seed: int, layers: int | None = None) -> int:
    """Write a plain model whose weights have a trained one's statistics, and a tokenizer; gives its bytes."""
    sizes = sizes_of(shape, layers)
    shapes = shapes_of(sizes)
    files = shards_of(shapes)
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]

    def write(file: str, tensors: list[str]) -> int:
        return write_file(directory / file, {name: shapes[name] for name in tensors}, seed)

    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(write, names, files))
    places = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    make_tokenizer(directory, sizes[6])
    (directory / "config.json").write_text(json.dumps(config_of(sizes)))  # last: by it a model is there
    return total


def write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> int:
    """Write a file of safetensors, one tensor made at a time; gives its tensors' bytes."""
    import torch

    specs = {name: TensorSpec("BF16", shape) for name, shape in shapes.items()}
    header = canonical_header(specs, {"format": "pt"})
    with path.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(shapes):  # the header's order
            out.write(weight(name, shapes[name], seed).cpu().reshape(-1).view(torch.uint8).numpy())
    note(f"wrote {path.name}")
    return sum(it.nbytes for it in specs.values())


def make_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer of words `t0`, `t1`, ..., so that prompts of random tokens keep their length."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {UNKNOWN: 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, unk_token=UNKNOWN, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
