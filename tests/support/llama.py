"""A small Llama in bfloat16, with sizes of which terms can be worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def llama(**options: Any) -> Any:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**(sizes | heads | {"pad_token_id": 0} | options))
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)
