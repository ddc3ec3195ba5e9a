"""Materializing, and the custom operators, on the CPU."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from support.codecs import pack_everything
from support.contents import CONTENTS, fill
from support.models import assert_same_bits, torch
from torch import nn

from tpde.errors import Corrupt, InvalidInput, Truncated, UnsupportedVersion
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch
from tpde.nn import PackedParameter, pack_tensor
from tpde.nn.slot import Slot
from tpde.weights import operators as ops
from tpde.weights.decoder import Materializer
from tpde.weights.resident import Resident
from tpde.weights.rows import RowReader

CPU = torch.device("cpu")


def _tensor(content: str, dtype: str, shape: tuple[int, ...]) -> Any:
    spec = TensorSpec(dtype, shape)
    return to_torch(np.frombuffer(fill(content, spec), np.uint8).copy(), spec)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
def test_every_content_in_one_buffer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    tensors = [_tensor(content, dtype, (37, 512)) for content in CONTENTS]
    packed = [pack_tensor(tensor, content) for tensor, content in zip(tensors, CONTENTS, strict=True)]
    items, at = [], 0
    for it, tensor in zip(packed, tensors, strict=True):
        assert it is not None
        items.append((it.sources[0], at))
        at += tensor.nbytes + 512
    out = torch.full((at,), 0xA5, dtype=torch.uint8)
    Materializer(items, CPU)(out)
    for (_, offset), tensor in zip(items, tensors, strict=True):
        end = offset + tensor.nbytes
        assert_same_bits(out[offset:end], tensor.view(-1).view(torch.uint8))
        assert (out[end : end + 512] == 0xA5).all()


def test_blobs_that_are_none() -> None:
    good = pack_tensor(torch.randn(100, 100), "w").sources[0].blob
    for other in (good.view(2, -1), good.view(torch.int8), good.repeat_interleave(2)[::2], good.view(-1, 1)):
        with pytest.raises(InvalidInput, match="`w`: a blob is one-dimensional"):
            Resident(other, "w")
    with pytest.raises(InvalidInput, match="meta"):
        Resident(good.to("meta"), "w")
    with pytest.raises(Truncated, match="`w`"):
        Resident(good[:-1000].clone(), "w")
    newer = good.clone()
    newer[8] = 9
    with pytest.raises(UnsupportedVersion, match="`w`"):
        Resident(newer, "w")
    bad = good.clone()
    bad[200] ^= 1  # in a table
    with pytest.raises(Corrupt, match="`w`") as caught:
        Resident(bad, "w")
    assert caught.value.tensor == "w"


def test_pickled_blob() -> None:
    tensor = torch.randn(100, 100)
    packed = pickle.loads(pickle.dumps(pack_tensor(tensor, "w")))
    assert_same_bits(packed.decoded(), tensor)


def test_rows_refuse_other_indices() -> None:
    rows = RowReader(pack_tensor(torch.randn(100, 64), "w").sources[0])
    with pytest.raises(RuntimeError, match="integers of 32 or 64 bits"):
        rows(torch.zeros(3))


@pytest.fixture
def slot() -> tuple[Slot, Any]:
    """A packed matrix, and what it is."""
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    packed = pack_tensor(weight, "w")
    assert packed is not None
    return Slot("weight", PackedParameter(packed)), weight


def test_operators_are_well_formed(slot: tuple[Slot, Any]) -> None:
    key = slot[0].key
    x, y = torch.randn(2, 3, 64, requires_grad=True), torch.randn(5, 48, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    torch.library.opcheck(ops.materialize, (x.detach(), key, 48 * 64, torch.float32))
    torch.library.opcheck(ops.linear, (x, bias, key, 48, False))
    torch.library.opcheck(ops.linear, (x, None, key, 48, False))
    torch.library.opcheck(ops.linear, (y, None, key, 64, True))
    torch.library.opcheck(ops.embedding, (torch.tensor([[3, 5]]), key, 64, torch.float32))


def test_what_the_compiler_keeps_does_not_depend_on_units() -> None:
    """It keeps graphs on disk, for other processes, in which a key stands for other weights."""
    x, key = torch.empty(2, 64, device="meta"), 1 << 40
    assert ops.linear(x, None, key, 48, False).shape == (2, 48)
    assert ops.linear_backward(x, key, 48, False).shape == (2, 48)
    assert ops.tiled_linear(x, None, key, 48, False).shape == (2, 48)
    assert ops.tiled_linear_backward(x, key, 48).shape == (2, 48)
    rows = ops.embedding(torch.empty(2, dtype=torch.int64, device="meta"), key, 48, torch.float16)
    assert (rows.shape, rows.dtype) == ((2, 48), torch.float16)


def test_gradients_of_gradients() -> None:
    weight = torch.randn(48, 64)
    slot = Slot("w", PackedParameter(pack_tensor(weight, "w")))
    found = []
    for transposed in (False, True):
        for work in (ops.linear, nn.functional.linear):
            x = torch.linspace(-1, 1, 2 * (48 if transposed else 64)).view(2, -1).requires_grad_()
            held = weight.t() if transposed else weight
            ours = (slot.key, len(held), transposed)
            y = work(x, None, *ours) if work is ops.linear else work(x, held)
            (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            first.sin().sum().backward()
            found.append(x.grad)
    for one, other in zip(found[::2], found[1::2], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("trained", ["x", "bias", "both"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_only_gradients_that_are_wanted_are_computed(
    tiled: bool, bias: bool, trained: str, slot: tuple[Slot, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, weight = slot
    if tiled:
        packed.packed.tile_bytes = 96 << 10
    x = torch.randn(2, 64, requires_grad=trained != "bias")
    b = torch.randn(48, requires_grad=trained != "x") if bias else None
    if not x.requires_grad and b is None:
        return
    work = ops.tiled_linear if tiled else ops.linear
    found, expected = work(x, b, packed.key, 48, False), nn.functional.linear(x, weight, b)
    assert_same_bits(found, expected)
    decoded: list[int] = []
    decode = Resident.decode_on_host
    monkeypatch.setattr(
        Resident, "decode_on_host", lambda self, *args: (decoded.append(1), decode(self, *args))[1]
    )
    leaves = [it for it in (x, b) if it is not None and it.requires_grad]
    ours = torch.autograd.grad(found.sum(), leaves)
    assert bool(decoded) == x.requires_grad
    for one, other in zip(ours, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("work", ["tiled_linear", "materialize"])
def test_operators_without_gradients_of_gradients(work: str, slot: tuple[Slot, Any]) -> None:
    packed, _ = slot
    x = torch.randn(2, 64, requires_grad=True)
    if work == "materialize":
        found = ops.materialize(x, packed.key, 48 * 64, torch.float32)
        with pytest.raises(NotImplementedError, match="gradients of gradients"):
            found.sum().backward()
        return
    if work == "tiled_linear":
        packed.packed.tile_bytes = 96 << 10
    y = getattr(ops, work)(x, None, packed.key, 48, False)
    (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        first.sum().backward()


@pytest.mark.parametrize("transposed", [False, True])
def test_linear(slot: tuple[Slot, Any], transposed: bool) -> None:
    packed, weight = slot
    weight = weight.t() if transposed else weight
    torch.manual_seed(1)
    x = torch.randn(2, 3, weight.shape[1], requires_grad=True)
    bias = torch.randn(weight.shape[0], requires_grad=True)
    expected = nn.functional.linear(x, weight, bias)
    found = torch.ops.tpde.linear(x, bias, packed.key, weight.shape[0], transposed)
    assert_same_bits(found, expected)
    grads = torch.autograd.grad(expected.square().sum(), (x, bias))
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), (x, bias)), grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_key_dies_with_its_unit(slot: tuple[Slot, Any]) -> None:
    packed, _ = slot
    old = packed.key
    packed.changed()
    assert packed.key != old
    other = Slot("weight", packed.parameter)
    key = other.key
    del other
    with pytest.raises(InvalidInput, match="compile the model again"):
        torch.ops.tpde.materialize(torch.empty(0), key, 48 * 64, torch.float32)
