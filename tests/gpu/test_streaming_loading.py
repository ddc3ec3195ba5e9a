"""Loading under a budget to a GPU: bits, wherever weights are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.budgets import every, placed
from support.caches import ANYWHERE, OFFLOADED, QUANTIZED, expected, generated
from support.caches import NAMES as CACHES
from support.checkpoints import checkpoint, write
from support.gpu import needs_cuda
from support.models import NAMES, assert_same_bits, inputs, make, outputs, torch

import tpde
from tpde.errors import OutOfMemory, PackedWeight
from tpde.nn.workspace import Workspace
from tpde.streaming.cuda_device import CudaDevice

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
pytest.importorskip("cuda.core", reason="needs cuda-core")
pytestmark = [
    needs_cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # memory that cannot be locked


@pytest.mark.parametrize("kinds", [("host",), ("disk",), ("host", "packed", "disk", "plain")], ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch, every(*kinds))
    pair = checkpoint(tmp_path, name)
    plain = pair.kind.from_pretrained(pair.plain).to("cuda")
    model = tpde.from_pretrained(pair.packed, vram="1GiB", max_tokens=256)
    assert {it.device.type for it in model.parameters()} <= {"cuda"}
    with torch.no_grad():
        for _ in range(2):
            assert_same_bits(outputs(name, model, 2, "cuda"), outputs(name, plain, 2, "cuda"), name)
    if name == "llama":
        took = inputs(name, 2, 5, "cuda")["input_ids"]
        for options in ({}, {"cache_implementation": "static"}, {"num_beams": 3}):
            # With a static cache, transformers would compile the plain model: other kernels, other bits.
            options |= {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6, "disable_compile": True}
            assert torch.equal(model.generate(took, **options), plain.generate(took, **options))
        model.to("cuda")
        with pytest.raises(PackedWeight):
            model.to("cpu")
    model.tpde_streamer.close()


def wait_for_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches be brought back when they are there, and used when they are back.

    Before 5.20, transformers does not wait until a layer's cache was copied away. Where only one layer is
    offloaded, which then follows itself, transformers (5.23 too) uses it while it is being brought back.
    """
    cache = transformers.cache_utils.Cache
    prefetch = cache.prefetch

    def later(self: Any, *args: Any, **options: Any) -> None:
        default = torch.cuda.default_stream()
        self.prefetch_stream.wait_stream(default)
        prefetch(self, *args, **options)
        default.wait_stream(self.prefetch_stream)

    monkeypatch.setattr(cache, "prefetch", later)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in CACHES for way in ANYWHERE),
        *((name, way) for name in CACHES if name != "mamba" for way in OFFLOADED),
        *(("llama", way) for way in QUANTIZED),
    ],
)
def test_caches(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_offloading(monkeypatch)
    placed(monkeypatch, every("host"))
    pair = checkpoint(tmp_path, name)
    wanted = expected(name, pair.kind.from_pretrained(pair.plain).to("cuda"), way, "cuda")
    model = tpde.from_pretrained(pair.packed, vram="1GiB", max_tokens=1024, max_batch=28)
    assert torch.equal(generated(name, model, way, "cuda"), wanted)
    model.tpde_streamer.close()  # and all that was decoded was sound


@pytest.mark.parametrize("kinds", [("windows",), ("windows", "host", "packed")], ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_windows(name: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are exact, wherever they were encoded; a sequence's logits are those in a batch, of windows."""
    from tpde.loading import window_weights
    from tpde.nn import packed_modules

    placed(monkeypatch, every(*kinds))
    pair = checkpoint(tmp_path, name)
    plain = pair.kind.from_pretrained(pair.plain).to("cuda")
    states = plain.state_dict()
    for spare in (window_weights.SPARE_BYTES, 1 << 40):  # on the device, on the host
        monkeypatch.setattr(window_weights, "SPARE_BYTES", spare)
        model = tpde.from_pretrained(pair.packed, vram="1GiB", max_tokens=256, kernels="fused")
        for path, module in packed_modules(model):
            for leaf, slot in module.tpde_slots.items():
                if slot.packed.settled:
                    weight, ours = states[f"{path}.{leaf}"], slot.packed.decoded()
                    assert torch.equal(ours.view(torch.uint8), weight.contiguous().view(torch.uint8)), path
        with torch.no_grad():
            found, needed = outputs(name, model, 2, "cuda"), outputs(name, plain, 2, "cuda")
        for ours, theirs in zip(found, needed, strict=True):
            assert (ours.float() - theirs.float()).norm() <= 0.05 * theirs.float().norm()
        model.tpde_streamer.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(monkeypatch, every("host"))
    pair = checkpoint(tmp_path, name)
    plain = pair.kind.from_pretrained(pair.plain).to("cuda")
    model = tpde.from_pretrained(pair.packed, vram="1GiB", max_tokens=256)
    model.tpde_streamer.record()
    with torch.no_grad():
        for batch in (1, 1, 3):
            assert_same_bits(outputs(name, model, batch, "cuda"), outputs(name, plain, batch, "cuda"), name)
    took = inputs(name, 1, 5, "cuda")["input_ids"]
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
    assert torch.equal(model.generate(took, **options), plain.generate(took, **options))
    (stats,) = model.tpde_streamer.stats().values()
    assert stats["expert_hits"] > stats["expert_misses"] > 0
    assert stats["bytes"] == stats["copied_bytes"] + stats["expert_bytes"]
    model.tpde_streamer.trace(tmp_path / "trace.json")
    names = {it["name"] for it in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert any(".experts." in it for it in names)
    model.tpde_streamer.close()


def test_no_room() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(OutOfMemory, match=r"copied to needs .* GiB on cuda:0, .* GiB are free"):
        CudaDevice(torch.device("cuda", 0), total)
    with pytest.raises(OutOfMemory, match=r"workspace .* needs .* GiB on cuda:0, .* GiB are free"):
        Workspace(torch.device("cuda", 0)).reserve(total)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers: fewer all fit the first device, which is left room for a block or two more."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    placed(monkeypatch, every("host"))
    config = make("llama").config
    config.num_hidden_layers = 8
    pair = write(tmp_path, transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval())
    plain = pair.kind.from_pretrained(pair.plain, device_map={"": 0})
    model: Any = tpde.from_pretrained(pair.packed, device_map="auto", vram="1GiB", max_tokens=256)
    assert len(model.tpde_streamer.streamers) == 2
    with torch.no_grad():
        assert_same_bits(outputs("llama", model, 2, "cuda"), outputs("llama", plain, 2, "cuda"))
