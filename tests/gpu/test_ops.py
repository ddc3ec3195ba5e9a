"""Materializing, and the custom operators, on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.codecs import pack_everything
from support.contents import CONTENTS, fill
from support.models import assert_same_bits, torch

from tpde.errors import Corrupt, UnsupportedDevice
from tpde.files.tensor_writer import TensorWriter
from tpde.format.constants import RECORD_BYTES
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch
from tpde.io.sinks import BytesSink
from tpde.nn import PackedParameter, pack_tensor
from tpde.nn.slot import Slot
from tpde.weights import operators as ops
from tpde.weights.decoder import Materializer
from tpde.weights.resident import Resident
from tpde.weights.rows import RowReader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _tensor(content: str, dtype: str, shape: tuple[int, ...]) -> Any:
    spec = TensorSpec(dtype, shape)
    return to_torch(np.frombuffer(fill(content, spec), np.uint8).copy(), spec).cuda()


def _zstd(tensor: Any) -> Resident:
    """Pack as files may be, but `pack_tensor` never does."""
    data = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
    sink = BytesSink()
    spec = TensorSpec("BF16", tuple(tensor.shape))
    writer = TensorWriter(spec, sink, 0, threads=1, codec="zstd", may_pack=True, background=None)
    writer.write(data)
    assert writer.finish().packed
    return Resident(torch.frombuffer(bytearray(sink.data), dtype=torch.uint8).cuda(), "zstd")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
def test_every_content_in_one_buffer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    tensors = [_tensor(content, dtype, (37, 512)) for content in CONTENTS]
    items, at = [], 0
    for content, tensor in zip(CONTENTS, tensors, strict=True):
        packed = pack_tensor(tensor, content)
        assert packed is not None
        items.append((packed.sources[0], at))
        at += tensor.nbytes + 512
    decode = Materializer(items, tensors[0].device)
    for check in (None, False, True):
        out = torch.full((at,), 0xA5, dtype=torch.uint8, device="cuda")
        decode(out, check)
        for (packed, offset), tensor in zip(items, tensors, strict=True):
            end = offset + tensor.nbytes
            assert_same_bits(out[offset:end], tensor.view(-1).view(torch.uint8), f"{packed.name}, {check=}")
            assert (out[end : end + 512] == 0xA5).all(), f"bytes behind {packed.name} changed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # where nvCOMP is missing
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_zstd_beside_prefix_codes() -> None:
    first, second = (_tensor("normal", "BF16", (64, 1000 + n)) for n in range(2))
    packed = pack_tensor(second, "prefix")
    assert packed is not None
    decode = Materializer([(_zstd(first), 0), (packed.sources[0], first.nbytes + 512)], first.device)
    out = torch.empty(first.nbytes + 512 + second.nbytes, dtype=torch.uint8, device="cuda")
    decode(out)
    assert_same_bits(out[: first.nbytes], first.view(-1).view(torch.uint8), "zstd")
    assert_same_bits(out[first.nbytes + 512 :], second.view(-1).view(torch.uint8), "prefix")
    with pytest.raises(UnsupportedDevice, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        decode(out)


@pytest.mark.parametrize("shape", [(300, 64), (33, 1000), (5000, 12), (40, 8192), (40, 20000)])
@pytest.mark.parametrize("content", ["normal", "zeros"])
def test_rows(shape: tuple[int, int], content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    tensor = _tensor(content, "BF16", shape)
    packed = pack_tensor(tensor, "w")
    assert packed is not None
    rows = RowReader(packed.sources[0])
    for size in ((3, 50), (1,), (0,), ()):
        ids = torch.randint(0, shape[0], size, device="cuda")
        assert_same_bits(rows(ids), torch.nn.functional.embedding(ids, tensor), f"{size}")
    ids = torch.tensor([shape[0] - 1, 0], dtype=torch.int32, device="cuda")
    assert_same_bits(rows(ids), tensor[ids.long()])


@pytest.mark.parametrize("shape", [(300, 64), (410, 1000), (5000, 12), (6, 8192), (7, 20000)])
def test_the_first_rows_verify_all_chunks(shape: tuple[int, int]) -> None:
    packed = pack_tensor(_tensor("normal", "BF16", shape), "w")
    assert packed is not None
    (source,) = packed.sources
    header = source.header
    assert header.chunks > 2
    zero = torch.zeros(1, dtype=torch.long, device="cuda")
    for chunk in range(header.chunks):
        checksum = header.index_at + RECORD_BYTES * chunk + 4  # format.md 4.3
        source.blob[checksum] ^= 1
        rows = RowReader(source)
        with pytest.raises(Corrupt, match=f"`w`, chunk {chunk}:"):
            rows(zero)
        source.blob[checksum] ^= 1
        assert rows(zero).shape == (1, shape[1])


def test_damage_is_found_when_asked_for() -> None:
    tensor = _tensor("normal", "BF16", (64, 2048))
    packed = pack_tensor(tensor, "w")
    assert packed is not None
    (source,) = packed.sources
    decode = Materializer([(source, 0)], tensor.device)
    out = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cuda")
    decode(out)
    source.blob[source.header.blob_bytes - 3000] ^= 8
    with pytest.raises(Corrupt, match="`w`, chunk 15") as caught:
        decode(out, True)
    assert (caught.value.tensor, caught.value.chunk) == ("w", 15)
    source.blob[source.header.blob_bytes - 3000] ^= 8
    decode(out, True)
    assert_same_bits(out, tensor.view(-1).view(torch.uint8))


def test_operators_are_well_formed() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64, device="cuda")
    packed = pack_tensor(weight, "w")
    assert packed is not None
    slot = Slot("weight", PackedParameter(packed))
    x = torch.randn(2, 3, 64, device="cuda", requires_grad=True)
    bias = torch.randn(48, device="cuda", requires_grad=True)
    torch.library.opcheck(ops.materialize, (x.detach(), slot.key, 48 * 64, torch.float32))
    torch.library.opcheck(ops.linear, (x, bias, slot.key, slot.shape[0], False))
    ids = torch.tensor([[3, 5]], device="cuda")
    torch.library.opcheck(ops.embedding, (ids, slot.key, slot.shape[1], slot.dtype))
    expected = torch.nn.functional.linear(x, weight, bias)
    found = torch.ops.tpde.linear(x, bias, slot.key, slot.shape[0], False)
    assert_same_bits(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), (x, bias)),
        torch.autograd.grad(expected.square().sum(), (x, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
