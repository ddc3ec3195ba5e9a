"""Tiny models that vLLM serves, and what it generates with them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: an error is the one raised
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # two workers share what cores there are

VOCABULARY = 512
KV_CACHE_BYTES = 16 << 20


class Generated(NamedTuple):
    """Tokens of a prompt, and their logarithmic probabilities."""

    tokens: list[int]
    logprobs: list[float]


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of words `t0`, `t1`, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<unk>": VOCABULARY - 3, "<s>": VOCABULARY - 2, "</s>": VOCABULARY - 1}
    words = {f"t{i}": i for i in range(VOCABULARY - 3)} | special
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def save_llama(
    directory: Path,
    *,
    tied: bool = False,
    biases: bool = False,
    seed: int = 0,
    scale: float = 1.0,
    hidden: int = 256,
) -> Path:
    """A Llama of random bf16 weights. Its sizes are such that vLLM pads and merges matrices."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_bias=biases,
        mlp_bias=biases,
        initializer_range=0.06,  # tokens are then apart by more than what compiled code rounds otherwise
        bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(scale)
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            bias.data.normal_(0, 0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def save_experts(directory: Path, *, seed: int = 0) -> Path:
    """A Qwen3 mixture of eight experts, of which a token uses two."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.06,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        dtype="bfloat16",
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def kernels(name: str) -> dict[str, Any]:
    """Options of `LLM` that ask for kernels."""
    return {"hf_overrides": {"quantization_config": {"quant_method": "tpde", "kernels": name}}}


def engine(model: Path, **options: Any) -> Any:
    """A `vllm.LLM` of a tiny model, by default without compiling."""
    import torch
    from vllm import LLM
    from vllm.compilation import monitor
    from vllm.distributed import cleanup_dist_env_and_memory

    # The first of 0.26's model runners forbids graphs at its end, and the second one never allows them again.
    monitor.set_cudagraph_capturing_enabled(True)
    options = {"enforce_eager": True, **options}
    # vLLM collects garbage eight times an engine, for 0.4 s each: what is there already is left out.
    gc.freeze()
    try:
        return LLM(
            model=str(model),
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            disable_log_stats=True,
            **options,
        )
    except Exception:
        torch.set_default_dtype(torch.float32)  # 0.26 leaves the model's
        cleanup_dist_env_and_memory()  # which the next engine would take for its own
        raise


def generate(llm: Any, **options: Any) -> list[Generated]:
    """What it generates greedily for four prompts of different lengths at a time."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [VOCABULARY - 2] + [(i * 37 + j * 11) % 500 for j in range(4 + 5 * i)]}
        for i in range(4)
    ]
    how = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    found = []
    for done in llm.generate(prompts, how, use_tqdm=False, **options):
        best = done.outputs[0]
        logprobs = [step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True)]
        found.append(Generated(list(best.token_ids), logprobs))
    return found


def close(llm: Any) -> None:
    """End an engine and its workers."""
    llm.llm_engine.engine_core.shutdown()


def generated(model: Path, **options: Any) -> list[Generated]:
    """What a model generates in an engine of its own."""
    llm = engine(model, **options)
    try:
        return generate(llm)
    finally:
        close(llm)


def layers(llm: Any) -> dict[str, Any]:
    """The modules of the model that an engine in this process runs."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return dict(runner.model.named_modules())
