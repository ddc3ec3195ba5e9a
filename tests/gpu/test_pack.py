"""Tensors and models of a GPU, packed there: what the CPU makes of them, byte for byte."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from support.checkpoints import checkpoint
from support.contents import fill, spec_of
from support.gpu import needs_cuda, torch
from support.models import NAMES, assert_same_bits, make, outputs

import tpde
from tpde.files import gpu_packing
from tpde.nn import pack_module, packed_modules
from tpde.torch import load, save
from tpde.weights.pack_tensor import pack_tensor, pack_tensors

pytestmark = [needs_cuda, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}
CONTENTS = ["normal", "random", "zeros", "constant", "nearly", "specials"]


def tensor(dtype: str, content: str, words: int) -> Any:
    data = bytearray(fill(content, spec_of(dtype, words)))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, KINDS[dtype]))


def halved(rows: int) -> Any:
    draw = torch.Generator().manual_seed(rows)
    return (0.02 * torch.randn((rows, 640), generator=draw)).bfloat16() * (torch.rand(rows, 640) < 0.5)


def assert_same(packed: Any, expected: Any) -> None:
    assert (packed is None) == (expected is None)
    if packed is not None:
        one, other = packed.sources[0].blob, expected.sources[0].blob
        assert one.is_cuda
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("dtype", KINDS)
def test_blobs_are_the_cpus(dtype: str, content: str) -> None:
    given = [tensor(dtype, content, words) for words in (1021, 8192, 70 * 8192 + 3)]
    found = list(pack_tensors((str(i), it.cuda()) for i, it in enumerate(given)))
    assert len(found) == len(given)
    for packed, it in zip(found, given, strict=True):
        assert_same(packed, pack_tensor(it, "it"))


def test_the_gpu_packs_weights() -> None:
    """And does not leave all of them to the CPU."""
    given = [(str(rows), tensor("BF16", "normal", rows * 640).view(rows, 640).cuda()) for rows in (64, 5000)]
    assert all(it.blob is not None for it in gpu_packing.packed_there(given, "prefix"))
    for alone in given:
        assert all(it.blob is not None for it in gpu_packing.packed_there([alone], "prefix"))


def test_views_and_other_streams() -> None:
    whole = tensor("BF16", "normal", 3 * 640 * 700).view(3, 700, 640)
    there, stream = whole.cuda(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        there.mul_(1)
        for part, it in zip(there, whole, strict=True):
            assert_same(pack_tensor(part, "part"), pack_tensor(it.clone(), "part"))
        odd = there.view(-1)[1:-7]
        assert_same(pack_tensor(odd, "odd"), pack_tensor(whole.view(-1)[1:-7].clone(), "odd"))


def test_halved_weights() -> None:
    it = halved(3000)
    assert_same(pack_tensor(it.cuda(), "it"), pack_tensor(it, "it"))


def blobs(model: Any) -> dict[str, Any]:
    """Of a packed model's weights, on the CPU."""
    return {
        f"{path}.{key}": [it.memory.cpu() for it in slot.packed.sources]
        for path, module in packed_modules(model)
        for key, slot in module.tpde_slots.items()
    }


def assert_same_blobs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, blobs in found.items():
        assert len(blobs) == len(expected[name])
        assert all(torch.equal(one, other) for one, other in zip(blobs, expected[name], strict=True)), name


@pytest.mark.parametrize("kernels", ["exact", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_plain_directories_are_packed_as_they_come(name: str, kernels: Any, tmp_path: Any) -> None:
    pair = checkpoint(tmp_path, name)
    model = tpde.from_pretrained(pair.plain, device="cuda", pack=True, kernels=kernels)
    assert_same_blobs(blobs(model), blobs(tpde.from_pretrained(pair.plain, pack=True, kernels=kernels)))
    if kernels == "exact":
        plain = pair.kind.from_pretrained(pair.plain, dtype="auto").cuda()
        with torch.no_grad():
            assert_same_bits(outputs(name, model, 2, "cuda"), outputs(name, plain, 2, "cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_models_are_packed_where_they_are(name: str) -> None:
    plain = make(name).cuda()
    expected = blobs(pack_module(copy.deepcopy(plain).cpu(), min_bytes=0))
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    assert_same_blobs(blobs(packed), expected)
    with torch.no_grad():
        assert_same_bits(outputs(name, packed, 2, "cuda"), outputs(name, plain, 2, "cuda"))


def test_files_are_the_cpus() -> None:
    given = {
        "model.layers.0.up_proj.weight": tensor("BF16", "normal", 700 * 640).view(700, 640),
        "model.layers.0.norm.weight": torch.ones(640),
        "model.layers.1.up_proj.weight": tensor("F32", "normal", 900 * 640).view(900, 640),
        "ids": torch.arange(5000),
        "mask": torch.arange(5000) % 3 == 0,
        "waves": torch.complex(torch.randn(3000), torch.randn(3000)),
        "none": torch.empty(0, 7),
        "scalar": torch.tensor(3.0),
        "halved": halved(500),
    }
    there = {name: it.cuda() for name, it in given.items()} | {"halved": given["halved"]}
    made = save(there)
    assert made == save(given)
    for name, it in load(made).items():
        assert torch.equal(it, given[name])


def test_without_memory_the_cpu_packs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = tensor("BF16", "normal", 640 * 4000)
    there = it.cuda()

    real = torch.empty

    def full(*args: Any, **options: Any) -> Any:
        if torch.device(options.get("device") or "cpu").type == "cuda":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", full)
    with caplog.at_level(logging.INFO, "tpde"):
        assert_same(pack_tensor(there, "it"), pack_tensor(it, "it"))
    assert "packed on the CPU" in caplog.text
