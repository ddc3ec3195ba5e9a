"""Memory that packed models take on a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from support.models import torch
from torch import nn

from tpde.nn import PackedParameter, pack_module, set_kernels

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


class Wide(nn.Module):
    """Blocks large enough that plain weights would show in the allocator's peak."""

    def __init__(self, blocks: int = 12, width: int = 2048) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(blocks)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


def _peak(run: Any) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("how", ["eager", "graph", "compiled", "backward", "compiled backward"])
def test_memory(how: str) -> None:
    """Never more than the packed weights, a block, and what the plain model needs besides its weights."""
    torch.manual_seed(0)
    graph = torch.cuda.CUDAGraph()
    # The matrix library's workspaces, 32 MiB for each thread and for graphs, which plain models need, too.
    square = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()
    if how == "graph":
        with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
            square @ square
    gc.collect()
    before = torch.cuda.memory_allocated()  # those, and other tests' leftovers
    backward = how.endswith("backward")
    model = Wide().to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=backward)

    def step(forward: Any) -> None:
        with torch.set_grad_enabled(backward):
            y = forward(x)
            if backward:
                y.float().square().mean().backward()
                x.grad = None

    step(model)
    plain = sum(p.numel() * 2 for p in model.parameters())
    torch.cuda.synchronize()
    other = _peak(lambda: step(model)) - torch.cuda.memory_allocated()  # activations
    pack_module(model)
    packed = sum(it.packed.packed_bytes for it in model.parameters() if isinstance(it, PackedParameter))
    block = 2 * 2048 * 2048 * 2
    forward: Any = model
    if how.startswith("compiled"):
        forward = torch.compile(model, fullgraph=True)
    if how == "graph":
        step(model)
        with torch.cuda.graph(graph), torch.no_grad():
            model(x)
        forward = lambda x: graph.replay()  # noqa: E731
    step(forward)
    step(forward)
    base = torch.cuda.memory_allocated() - packed - before
    peak = _peak(lambda: step(forward)) - before
    allowed = packed + block + other + plain * 3 // 100 + (8 << 20)
    assert peak <= allowed, (
        f"peak {peak >> 20} MiB, allowed {allowed >> 20} (plain {plain >> 20}, packed {packed >> 20}, block "
        f"{block >> 20}, activations {other >> 20}, held besides the packed weights {base >> 20})"
    )
    torch._dynamo.reset()


def test_packing_in_place_gives_back_what_plain_weights_had() -> None:
    """Of a model that was on the device: what PyTorch reserves there shrinks with it."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    block = 2 * 6144 * 6144
    model = Wide(12, 6144).to("cuda", torch.bfloat16).requires_grad_(False)  # weights of 72 MiB
    plain = sum(2 * it.numel() for it in model.parameters())
    assert torch.cuda.memory_reserved() - before >= plain
    pack_module(model)
    for kernels in ("exact", "fused"):
        set_kernels(model, kernels)
        gc.collect()
        packed = {it.packed for it in model.parameters() if isinstance(it, PackedParameter)}
        # Two blocks are room for rows that are decoded. PyTorch may keep one more, in parts of what plain
        # weights had and packed ones took.
        allowed = sum(it.packed_bytes for it in packed) + 3 * block + (40 << 20)
        assert allowed < 0.9 * plain
        assert torch.cuda.memory_reserved() - before <= allowed
