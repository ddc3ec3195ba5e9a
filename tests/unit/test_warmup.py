"""What loads kernels ahead runs for models of every kind, and breaks nothing where it cannot."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, MambaConfig, Qwen2Config, T5Config

from tpde.errors import OutOfMemory
from tpde.integrations.transformers import quantizer, warmup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [BertConfig, GPT2Config, LlamaConfig, MambaConfig, Qwen2Config, T5Config])
def test_typical_work(kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kind(attn_implementation="sdpa")
    attended = []
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended.append((query.shape[1], query.shape[2]))
        return real(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    torch.set_default_dtype(dtype)  # as transformers does while it builds a model
    try:
        warmup.run_typical(config, torch.device("cpu"), dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    heads = getattr(config, "num_attention_heads", None)
    assert attended == ([(heads, warmup.TOKENS)] if heads else [])


def test_allocates_little() -> None:
    """No tensor is larger than what the allocator gives out of its smallest segments: 1 MiB."""
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            if isinstance(result, torch.Tensor):
                sizes.append(result.untyped_storage().nbytes())
            return result

    with Sizes():
        config = LlamaConfig(attn_implementation="sdpa", num_attention_heads=64, head_dim=128)
        warmup.run_typical(config, torch.device("cpu"), torch.float32)
    assert 0 < max(sizes) <= 1 << 20


def test_what_breaks_is_left_to_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(warmup, "run_typical", broken)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with caplog.at_level(logging.DEBUG, logger=warmup.__name__):
        warmup.Warmup(LlamaConfig(), torch.device("cuda", 0), torch.bfloat16).wait()
    assert "none left" in caplog.text


@pytest.mark.parametrize("error", [None, OutOfMemory("full"), KeyboardInterrupt()])
def test_no_thread_is_left_however_loading_ends(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, ended = threading.Event(), []
    join = warmup.Warmup.wait

    def work(*args: Any) -> None:
        held.wait(10)
        ended.append(True)

    def wait(self: warmup.Warmup) -> None:
        held.set()
        join(self)

    monkeypatch.setattr(warmup, "run_typical", work)
    monkeypatch.setattr(warmup.Warmup, "wait", wait)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    device = torch.device("cuda", 0)
    with nullcontext() if error is None else pytest.raises(type(error)), quantizer.loading_to(device):
        target = quantizer._target.get()
        assert target is not None
        target.warmup = warmup.Warmup(LlamaConfig(), device, torch.bfloat16)
        if error is not None:
            raise error
    assert ended


@pytest.mark.parametrize(("grown", "counts"), [(34 << 20, 0), (100 << 20, 52 << 20)])
def test_what_a_load_in_vain_leaves_is_for_the_next(
    grown: int, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries keep 34 MiB, say. More than plans have for them may be something else, and counts."""
    reserved = 1 << 30
    monkeypatch.setattr(warmup, "_left", {})
    monkeypatch.setattr(warmup, "run_typical", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: reserved)
    device = torch.device("cuda", 0)

    def begin() -> warmup.Warmup:
        return warmup.Warmup(LlamaConfig(), device, torch.bfloat16)

    def refused() -> None:
        nonlocal reserved
        with quantizer.loading_to(device):
            target = quantizer._target.get()
            assert target is not None
            target.warmup = begin()
            assert target.warmup.reserved == 1 << 30
            reserved += grown
            raise OutOfMemory("the least is 4 GiB")

    with pytest.raises(OutOfMemory, match="the least"):
        refused()
    again = begin()
    again.wait()
    assert again.reserved == (1 << 30) + counts
    last = begin()
    last.wait()
    assert last.reserved == reserved  # by now it is a model's
