"""Passes of packed models on a CUDA device: captured, compiled, on streams, in threads, changed meanwhile."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from support.models import VOCAB, assert_same_bits, inputs, make, torch
from torch import nn

from tpde.errors import PackedWeight
from tpde.nn import pack_module

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cuda_graph(name: str) -> None:
    """A captured step decodes when it is replayed, and replays agree with the plain model."""
    model = make(name, device="cuda")
    took = inputs(name, 2, 6, "cuda")["input_ids"]
    other = torch.randint(0, VOCAB, took.shape, device="cuda")
    with torch.no_grad():
        expected = [model(it, use_cache=False).logits for it in (took, other)]
        pack_module(model, min_bytes=0)
        static = took.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model(static, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(static, use_cache=False).logits
        for ids, logits in zip((took, other), expected, strict=True):
            static.copy_(ids)
            graph.replay()
            assert_same_bits(found, logits, "replayed")
            assert_same_bits(model(ids, use_cache=False).logits, logits, "eager, after a replay")


def test_streams() -> None:
    """Forward passes on two streams take turns in the workspace."""
    model = make("llama", device="cuda")
    batches = [inputs("llama", n, 40, "cuda")["input_ids"] for n in (3, 4)]
    with torch.no_grad():
        expected = [model(it, use_cache=False).logits for it in batches]
        pack_module(model, min_bytes=0)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found: list[list[Any]] = [[], []]
        for _ in range(20):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[number].append(model(batches[number], use_cache=False).logits)
        torch.cuda.synchronize()
    for number, logits in enumerate(expected):
        assert_same_bits(found[number], [logits] * 20, f"stream {number}")


def test_threads() -> None:
    model = make("llama", device="cuda")
    batches = [inputs("llama", n, 24, "cuda")["input_ids"] for n in (2, 5)]
    with torch.no_grad():
        expected = [model(it, use_cache=False).logits for it in batches]
    pack_module(model, min_bytes=0)
    torch.cuda.synchronize()
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    logits = model(batches[number], use_cache=False).logits
                    torch.cuda.current_stream().synchronize()
                    assert_same_bits(logits, expected[number], f"thread {number}")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    model = make("llama", torch.float32, "cuda")
    model.config.num_hidden_layers = 1
    del model.model.layers[1:]
    took = inputs("llama", 2, 8, "cuda")["input_ids"]
    with torch.no_grad():
        expected = model(took, use_cache=False).logits
        pack_module(model, min_bytes=0)
        compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
        for run in range(4):
            found = compiled(took, use_cache=False).logits.clone()
            worst = (found - expected).abs().max().item()
            assert worst < 1e-3, f"run {run}: logits differ by {worst}"
            assert torch.equal(found.argmax(-1), expected.argmax(-1)), f"run {run}: other tokens"
        assert_same_bits(model(took, use_cache=False).logits, expected, "eager, after compiled")
    torch._dynamo.reset()


def test_compiled_block_by_block() -> None:
    """From the second block on, the key is an input."""
    model = make("llama", torch.float32, "cuda")
    took = inputs("llama", 2, 8, "cuda")["input_ids"]
    with torch.no_grad():
        expected = model(took, use_cache=False).logits
        pack_module(model, min_bytes=0)
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
        for run in range(4):
            found = model(took, use_cache=False).logits
            worst = (found - expected).abs().max().item()
            assert worst < 1e-3, f"run {run}: logits differ by {worst}"
    torch._dynamo.reset()


class _Reaches(nn.Module):
    """A block that calls something with its weight before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.change = nn.Linear(256, 256), None

    def forward(self, x: Any) -> Any:
        if self.change is not None:
            with torch.no_grad():
                self.change(self.up.weight)
        return self.up(x)


@pytest.mark.parametrize("trained", [False, True])
def test_changes_in_a_forward_pass(trained: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([_Reaches()]).to("cuda", torch.bfloat16).requires_grad_(trained)
    block = pack_module(copy.deepcopy(plain), min_bytes=0)[0]
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().mul_(2),
        lambda weight: weight.t()[3].zero_(),
        lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
    ):
        block.change = change
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), pytest.raises(PackedWeight, match=r"`0\.up\.weight`"):
                block(x)
    block.change = None
    with torch.no_grad():
        for _ in range(3):
            assert_same_bits(block(x), plain[0](x))


def test_a_block_that_waits_for_another_thread() -> None:
    class Joins(_Reaches):
        def forward(self, x: Any) -> Any:
            found: list[Any] = []
            stream = torch.cuda.current_stream()

            def work() -> None:
                with torch.no_grad(), torch.cuda.stream(stream):
                    found.append(self.up(x))

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(100)
            return found[0] + self.up(x)

    torch.manual_seed(0)
    plain = nn.ModuleList([Joins()]).to("cuda", torch.bfloat16)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(packed[0](x), plain[0](x))
