"""Ways to serve a model: what vLLM is told for each."""

from __future__ import annotations

import json
from typing import NamedTuple


class Way(NamedTuple):
    """A way, what tables call it, and whether it serves packed files."""

    title: str
    options: list[str]
    of_packed: bool = False


EXACT = json.dumps({"quantization_config": {"quant_method": "tpde", "kernels": "exact"}})
WAYS = {
    "bf16": Way("vLLM, bf16", []),
    # What plain weights themselves differ by, where as many rows again are multiplied at a time.
    "bf16-128": Way(
        "vLLM, bf16, 128 rows at a time", ["--max-num-batched-tokens", "128", "--max-num-seqs", "128"]
    ),
    "fp8": Way("vLLM, FP8 (other weights)", ["--quantization", "fp8_per_tensor"]),
    "tpde": Way("tpde", ["--quantization", "tpde"]),
    "tpde-packed": Way("tpde, packed files", [], of_packed=True),
    "tpde-2": Way("tpde, two GPUs", ["--quantization", "tpde", "--tensor-parallel-size", "2"]),
    "tpde-exact": Way("tpde, exact", ["--hf-overrides", EXACT]),
    "glyd": Way("Glyd", ["--quantization", "glyd"]),
}
