"""What `python -m benchmarks serve --perplexity` asks of vLLM's engine."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from support.models import torch
from support.vllm import close, engine

from benchmarks.harness.texts import Text

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")


def read(model: Path, text: Path, **options: Any) -> Text:
    from benchmarks.serve.offline import ANSWERS

    llm = engine(model, max_num_batched_tokens=64, **options)
    try:
        whole, *shares = [ANSWERS["perplexity"](llm, str(text), *it) for it in ((0, 1), (0, 2), (1, 2))]
        assert sum(it["tokens"] for it in shares) == whole["tokens"]
        sums: list[float] = [math.nan] * len(whole["sums"])
        sums[::2], sums[1::2] = shares[0]["sums"], shares[1]["sums"]
        assert sums == pytest.approx(whole["sums"], rel=0.005)  # of other batches
        return whole
    finally:
        close(llm)


@pytest.mark.quick
def test_probabilities_are_those_of_the_model(models: dict[str, Path], tmp_path: Path) -> None:
    """Of each token but the first of a window, in steps that cut windows; packed weights change no bit."""
    from transformers import AutoModelForCausalLM

    draw = random.Random(0)
    ids = [draw.randrange(500) for _ in range(300)]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{it}" for it in ids))
    found = read(models["llama"], text)
    assert (found["tokens"], found["window"], found["step"]) == (297, 127, 64)  # of 128, one is generated
    model = AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.float32)
    for at, summed in zip(range(0, 300, 127), found["sums"], strict=True):
        window = torch.tensor(ids[at : at + 127])
        with torch.no_grad():
            logs = torch.log_softmax(model(window[None]).logits[0, :-1], -1)
        wanted = logs[torch.arange(len(window) - 1), window[1:]].sum().item()
        assert math.isclose(summed, wanted, rel_tol=0.005)
    assert read(models["llama"], text, quantization="tpde") == found
