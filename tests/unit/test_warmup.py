"""What loads kernels ahead runs for models of every kind, and breaks nothing where it cannot."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.card import DEVICE, Card
from transformers import BertConfig, GPT2Config, LlamaConfig, MambaConfig, Qwen2Config, T5Config

from tpde.errors import OutOfMemory
from tpde.integrations.transformers import warmup
from tpde.integrations.transformers.load_target import load_target, loading_to


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

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with caplog.at_level(logging.DEBUG, logger=warmup.__name__):
        warmup.Warmup(LlamaConfig(), torch.device("cuda", 0), torch.bfloat16, broken).wait()
    assert "none left" in caplog.text


@pytest.mark.parametrize("error", [None, OutOfMemory("full"), KeyboardInterrupt()])
def test_no_thread_is_left_however_loading_ends(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, ended = threading.Event(), []

    class Held(warmup.Warmup):
        """Ends when it is waited for."""

        def wait(self) -> None:
            held.set()
            super().wait()

    def work(*args: Any) -> None:
        held.wait(10)
        ended.append(True)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    device = torch.device("cuda", 0)
    with nullcontext() if error is None else pytest.raises(type(error)), loading_to(device):
        target = load_target()
        target.warmup = Held(LlamaConfig(), device, torch.bfloat16, work)
        if error is not None:
            raise error
    assert ended


@pytest.mark.parametrize(("grown", "counts"), [(34 << 20, 0), (100 << 20, 52 << 20)])
def test_what_a_load_in_vain_leaves_is_for_the_next(
    grown: int, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries keep 34 MiB, say. More than plans have for them may be something else, and counts."""
    reserved = 1 << 30
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: reserved)
    device = torch.device("cuda", 0)

    def begin() -> warmup.Warmup:
        return warmup.Warmup(LlamaConfig(), device, torch.bfloat16, lambda *_: None)

    def refused() -> None:
        nonlocal reserved
        with loading_to(device):
            target = load_target()
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


@pytest.mark.parametrize(
    ("options", "attends"),
    [
        ({}, [(4, 16)]),
        ({"_attn_implementation": "sdpa"}, [(4, 16)]),
        ({"_attn_implementation": "eager"}, []),
        ({"_attn_implementation": "flash_attention_2"}, []),
        ({"head_dim": 24}, [(4, 24)]),
        ({"head_dim": None}, [(4, 16)]),
        ({"num_attention_heads": None}, []),
        ({"num_attention_heads": [4, 8]}, []),
        ({"hidden_act": "no_such_function"}, [(4, 16)]),
    ],
)
def test_attention_that_pytorch_computes(
    options: dict[str, Any], attends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> None:
        assert is_causal
        assert query.dtype is torch.float16
        seen.append((query.shape[1], query.shape[3]))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    config = SimpleNamespace(**({"hidden_size": 64, "num_attention_heads": 4} | options))
    warmup.run_typical(config, torch.device("cpu"), torch.float16)
    assert seen == attends


def test_no_less_than_nothing_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load in vain has left may be given back before the next one begins."""
    card = Card(monkeypatch)

    def begin() -> warmup.Warmup:
        return warmup.Warmup(LlamaConfig(), DEVICE, torch.bfloat16, lambda *_: None)

    for before, grown, reserved in ((0, 50, 0), (30, 0, 0), (100, 0, 70)):
        card.reserved = before
        made = begin()
        assert made.reserved == reserved
        card.reserved += grown
        made.abandon()
    begin().wait()  # nothing is left for other tests


def test_a_warmup_runs_on_the_models_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread: what libraries keep, they keep for each stream."""
    seen: list[Any] = []
    now = threading.local()

    class On:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            now.stream = self.stream

        def __exit__(self, *error: object) -> None:
            del now.stream

    def work(config: Any, device: Any, dtype: Any) -> None:
        seen.append((getattr(now, "stream", None), threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the model's")
    monkeypatch.setattr(torch.cuda, "stream", On)
    warmup.Warmup(LlamaConfig(), torch.device("cuda", 0), torch.bfloat16, work).wait()
    assert seen == [("the model's", False)]
