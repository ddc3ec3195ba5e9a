"""What `python -m benchmarks serve` makes of a model's shape, and of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.report import Page
from benchmarks.serve import judge, report, turns
from benchmarks.serve.models import make, shapes_of


def row(speed: float) -> dict[str, Any]:
    figures = {"output_throughput": speed, "mean_ttft_ms": 9, "mean_itl_ms": 3, "mean_tpot_ms": 4}
    return {"load_s": 12.3, "kv": "1,024", "weights": "3.0 MiB", "1": figures, "8": figures}


def test_tables() -> None:
    page = Page("Serving", {})
    report(page, {"bf16": row(100), "tpde": row(150), "glyd": {"problem": "no glyd"}}, [1, 8], (32, 16))
    text = page.markdown()
    assert "150.0 (1.50)" in text
    assert "no glyd" in text
    assert text.count("| Glyd ") == 1  # with its reason alone


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_made_models_are_what_transformers_expects(shape: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    total = make(tmp_path, shape, 0)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]
    assert sum(it.nbytes for it in model.parameters()) == total
    assert len(shapes_of(shape)) > 20
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(tokenizer.decode([5, 6, 700]))["input_ids"] == [5, 6, 700]


def test_sizes() -> None:
    """What the guide says of them."""
    import math

    assert sum(math.prod(it) for it in shapes_of("llama-8b").values()) == pytest.approx(8.03e9, rel=0.001)
    assert sum(math.prod(it) for it in shapes_of("qwen3-30b-a3b").values()) == pytest.approx(
        30.5e9, rel=0.005
    )


def test_bars() -> None:
    page = Page("Serving", {})
    plain, ours, packed = row(100) | {"read": "4.0"}, row(120) | {"read": "5.0"}, row(120) | {"read": "3.0"}
    judge(page, {"bf16": plain, "tpde": ours}, [1, 8])
    assert [met for _, met in page.bars] == [False, True, True, False]  # speeds, first token, loading
    judge(page, {"bf16": plain, "tpde": {"problem": "no"}, "tpde-packed": packed}, [1])
    assert [met for _, met in page.bars[4:]] == [True], "what was not measured meets no bar"


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways take the GPUs that the caller named."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    ways = ["bf16", "fp8", "tpde"]
    assert list(turns(ways, 2)) == [[("bf16", "4"), ("fp8", "7")], [("tpde", "4")]]
    assert list(turns(ways, 1)) == [[(way, None)] for way in ways]
    for beside in (0, 3):
        with pytest.raises(SystemExit, match="needs as many GPUs, 2 are there"):
            list(turns(ways, beside))
