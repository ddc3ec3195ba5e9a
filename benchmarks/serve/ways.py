"""Ways to serve a model: what vLLM is told for each."""

from __future__ import annotations

import json
from typing import NamedTuple


class Way(NamedTuple):
    """A way, what tables call it, whether it serves packed files, and whether with `VLLM_BATCH_INVARIANT`."""

    title: str
    options: list[str]
    of_packed: bool = False
    invariant: bool = False


EXACT = json.dumps({"quantization_config": {"quant_method": "tpde", "kernels": "exact"}})
WAYS = {
    "bf16": Way("vLLM, bf16", []),
    # What plain weights themselves differ by, multiplied by vLLM's kernels and not by the matrix library's.
    "bf16-invariant": Way("vLLM, bf16, batch-invariant", [], invariant=True),
    "fp8": Way("vLLM, FP8 (other weights)", ["--quantization", "fp8_per_tensor"]),
    "tpde": Way("tpde", ["--quantization", "tpde"]),
    "tpde-packed": Way("tpde, packed files", [], of_packed=True),
    "tpde-2": Way("tpde, two GPUs", ["--quantization", "tpde", "--tensor-parallel-size", "2"]),
    "tpde-exact": Way("tpde, exact", ["--hf-overrides", EXACT]),
    "glyd": Way("Glyd", ["--quantization", "glyd"]),
}
