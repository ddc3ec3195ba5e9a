"""Tiny mixture-of-experts models whose experts fit the window layout, and a GPU for these that is none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.models import VOCAB, torch
from support.window_encoding import room

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
NAMES = ("mixtral", "qwen3_moe", "gpt_oss")
WAYS = ("eager", "batched_mm", "grouped_mm")


def moe(name: str, how: str = "eager", dtype: Any = torch.bfloat16, **more: Any) -> Any:
    """Give a model in evaluation mode; the same one each time."""
    t = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    torch.manual_seed(len(name))
    sizes = SIZES | more
    if name == "mixtral":
        config = t.MixtralConfig(**{"num_local_experts": 4} | sizes)
    elif name == "qwen3_moe":
        config = t.Qwen3MoeConfig(**{"num_experts": 6, "moe_intermediate_size": 64} | sizes)
    else:
        config = t.GptOssConfig(**{"num_local_experts": 4, "sliding_window": 6} | sizes)
    model = t.AutoModelForCausalLM.from_config(config, experts_implementation=how)
    for key, it in model.named_parameters():
        if "experts" in key:
            torch.nn.init.normal_(it, 0, 0.05)
    return model.to(dtype).eval()


def ids(batch: int, length: int) -> Any:
    """Give tokens; the same ones each time."""
    draw = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(2, VOCAB, (batch, length), generator=draw)


def packed(plain: Any, kernels: Any = "fused") -> Any:
    """Give a copy that is packed, and whose weights are multiplied as they are, or not."""
    from tpde.nn import pack_module, set_kernels

    return set_kernels(pack_module(copy.deepcopy(plain), min_bytes=0), kernels)


@pytest.fixture(scope="module", params=NAMES, name="plain")
def plain_model(request: Any) -> Any:
    """A model of each architecture."""
    return moe(request.param)


@pytest.fixture(name="fused")
def fused_model(plain: Any) -> Any:
    """The same, packed."""
    return packed(plain)


def layers(model: Any) -> list[Any]:
    """Give the packed modules of experts."""
    from tpde.nn import packed_modules

    return [it for _, it in packed_modules(model) if hasattr(it, "down_proj") and hasattr(it, "config")]


def experts_of(model: Any) -> list[Any]:
    """Give the packed weights of experts."""
    from tpde.nn import packed_modules

    slots = (slot for _, module in packed_modules(model) for slot in module.tpde_slots.values())
    return [slot.packed for slot in slots if len(slot.shape) == 3]


def _placing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    from tpde.cuda.window_experts import DeviceExperts
    from tpde.weights import expert_products
    from tpde.weights.windowed_experts import WindowedExperts

    monkeypatch.setattr(expert_products, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(expert_products, "stream_handle", lambda device: 0)
    kept: list[Any] = []

    def place(packed: Any) -> Any:
        first, matrices = packed.sources[0], []
        stack = isinstance(first, WindowedExperts)
        for source in packed.sources:
            memory = source.memory.numpy()
            there = room(memory.size, 128, 0)
            there[:] = memory
            kept.append(there)
            at = there.ctypes.data
            if stack:
                matrices += zip(source.stack.windows, (at + it for it in source.stack.starts), strict=True)
            else:
                matrices.append((source.window, at))
        made = DeviceExperts(matrices, packed.shape[0], stack and first.stack.turned, 0)
        made.table_at = made.table.ctypes.data
        packed.experts._there = made
        packed._decoder = None
        return packed

    return place


@pytest.fixture
def experts_on_gpu(windows_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """A function that has a packed weight of experts multiplied by kernels, which run on the CPU."""
    return _placing(monkeypatch)


@pytest.fixture
def as_on_gpu(windows_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """The same for all experts of a model."""
    place = _placing(monkeypatch)

    def place_all(model: Any) -> Any:
        for packed in experts_of(model):
            place(packed)
        return model

    return place_all


def bf16(words: np.ndarray) -> Any:
    """Give words as a tensor."""
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
