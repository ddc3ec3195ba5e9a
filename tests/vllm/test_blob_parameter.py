"""What models see where a layer's weight is packed: the plain weight's dtype and shape, and no matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.models import torch

from tpde.errors import PackedWeight

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick

ROWS, COLUMNS = 96, 256


def parameter(rows: int = ROWS) -> Any:
    from tpde.integrations.vllm.blob_parameter import BlobParameter
    from tpde.weights.pack_tensor import pack_tensor

    draw = torch.Generator().manual_seed(0)
    packed = pack_tensor((0.02 * torch.randn(rows, COLUMNS, generator=draw)).bfloat16(), "some.layer")
    assert packed is not None
    return BlobParameter.of(packed)


def test_it_says_what_the_plain_weight_is() -> None:
    made = parameter()
    assert made.shape == (ROWS, COLUMNS)
    assert made.dtype is torch.bfloat16
    assert made.data.shape == (made.nbytes,)
    assert made.data.dtype is torch.uint8


def test_vllm_copies_the_blob() -> None:
    """By `data`, as it offloads, loads again and compares weights; or by the module."""
    made = parameter()
    room = torch.empty_strided(made.data.size(), made.data.stride(), dtype=made.data.dtype)
    for it in (made, made.data, made.detach(), made.cpu(), made.to("cpu", non_blocking=True, copy=True)):
        assert torch.equal(room.zero_().copy_(it), made.data)
    assert torch.equal(made.cpu(), made.cpu())
    assert made.detach().cpu().contiguous().view(-1)[:3].tolist() == made.data[:3].tolist()
    layer = torch.nn.Module()
    layer.weight = made
    assert torch.equal(layer.state_dict()["weight"], made.data)
    made.data = room
    assert made.shape == (ROWS, COLUMNS)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "take",
    [
        lambda w, x: w[3:],
        lambda w, x: w.view(-1),
        lambda w, x: w.T,
        lambda w, x: torch.cat([w, w]),
        lambda w, x: torch.stack((w, w)),
        lambda w, x: torch.matmul(x, w),
        lambda w, x: x @ w,
        lambda w, x: torch.nn.functional.linear(x, w),
        lambda w, x: torch.nn.functional.embedding(x.long(), weight=w),
        lambda w, x: w * 2,
        lambda w, x: 1 - w,
        lambda w, x: w.float(),
        lambda w, x: w.to(torch.float32),
        lambda w, x: w.to("cpu", dtype=torch.float32),
        lambda w, x: w.to(x),
        lambda w, x: x.to(w),
        lambda w, x: w.tolist(),
        lambda w, x: w.sum(),
        lambda w, x: torch.norm(w),
        lambda w, x: torch.einsum("ij,kj->ik", x, w),
        lambda w, x: torch.addmm(x, x, w),
        lambda w, x: w.expand(2, -1, -1),
    ],
)
def test_it_is_not_taken_apart(take: Callable[..., Any], compiled: bool) -> None:
    made, x = parameter(), torch.ones(2, COLUMNS)

    def taken(x: Any) -> Any:
        return take(made, x)

    kinds = PackedWeight, torch._dynamo.exc.InternalTorchDynamoError  # in which the compiler wraps most
    with pytest.raises(kinds, match=r"the weight of `some\.layer` is packed"):
        (torch.compile(taken, backend="eager", fullgraph=True) if compiled else taken)(x)
    torch._dynamo.reset()


def test_a_module_that_is_moved_moves_it() -> None:
    layer = torch.nn.Module()
    layer.weight = parameter()
    found = layer.to("cpu", torch.float32).weight
    assert found.shape == (ROWS, COLUMNS)
    assert found.data.dtype is torch.uint8
    with pytest.raises(PackedWeight, match=r"the weight of `some\.layer` is packed"):
        found.numpy()


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_compiled_code_reads_what_it_says(dynamic: bool | None) -> None:
    """In one graph, with a size that changes."""

    def scaled(x: Any, made: Any) -> Any:
        return x.to(made.dtype) * made.shape[-1] + made.data[:1] * made.is_cuda

    run = torch.compile(scaled, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for made in (parameter(), parameter(2 * ROWS)):
        for rows in (2, 3, 5):
            x = torch.ones(rows, 4)
            assert torch.equal(run(x, made), scaled(x, made))
            assert run(x, made)[0, 0] == COLUMNS
    torch._dynamo.reset()
