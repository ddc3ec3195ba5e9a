"""Ways in which `generate` may keep what it has computed."""

from __future__ import annotations

from typing import Any

import pytest

from support.models import CACHED, inputs, torch

WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "fp8": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "quanto": {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}},
    "hqq": {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "hqq", "axis_key": 1, "axis_value": 1},
    },
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded_static": {"cache_implementation": "offloaded_static"},
}

ANYWHERE = ["dynamic", "static", "none"]
QUANTIZED = ["fp8", "quanto", "hqq"]  # for models that look at all tokens
OFFLOADED = ["offloaded", "offloaded_static"]  # on GPUs, what is no state
NAMES = ["llama", *CACHED]


def generated(name: str, model: Any, way: str, device: str = "cpu", length: int = 9) -> Any:
    """Give what a model continues a prompt with that is longer than its window, if it has one."""
    took = inputs(name, 2, length, device)["input_ids"]
    return model.generate(
        took,
        attention_mask=torch.ones_like(took),
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
        disable_compile=True,
        **WAYS[way],
    )


def expected(name: str, plain: Any, way: str, device: str = "cpu") -> Any:
    """Give what the plain model does; skip where it cannot.

    The backend of a quantized cache may be missing, and transformers 5.17 cannot offload a static cache all
    of whose layers have windows.
    """
    try:
        return generated(name, plain, way, device)
    except (ImportError, ValueError) as error:
        if way not in [*QUANTIZED, "offloaded_static"]:
            raise
        pytest.skip(f"{way}: {error}")
