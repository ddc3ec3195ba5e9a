"""Loading under a budget to a GPU: bits, wherever weights are, and the budget held."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.budgets import every, placed
from support.caches import ANYWHERE, OFFLOADED, QUANTIZED, expected, generated
from support.caches import NAMES as CACHES
from support.checkpoints import Pair, checkpoint, write
from support.gpu import needs_cuda
from support.models import NAMES, VOCAB, assert_same_bits, inputs, make, outputs, torch

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


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Blocks of 32 MiB, 8 of them."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    return write(tmp_path_factory.mktemp("larger"), transformers.LlamaForCausalLM(config).to(torch.bfloat16))


LEAST = """
import sys
import tpde
from tpde.errors import OutOfMemory

try:
    tpde.from_pretrained(sys.argv[1], vram="90MiB", max_tokens=int(sys.argv[3]), kernels=sys.argv[2])
except OutOfMemory as error:
    print(error.least)
"""


@functools.cache
def _least(packed: Path, kernels: str = "exact", max_tokens: int = 64) -> int:
    """The least budget of a process that has nothing else allocated; here, libraries' memory might count."""
    done = subprocess.run(
        [sys.executable, "-c", LEAST, str(packed), kernels, str(max_tokens)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _allocated() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


MEASURE = """
import atexit, json, subprocess, sys, threading, time
import torch
import tpde

HOLD = "import sys, torch; torch.zeros(1, device='cuda'); free = torch.cuda.mem_get_info()[0]" \\
    ";held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print(1, flush=True)" \\
    ";sys.stdin.read()"

folder, vram, kernels, length = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.zeros(1, device="cuda")
torch.cuda.empty_cache()
pipe = subprocess.PIPE
holder = subprocess.Popen([sys.executable, "-c", HOLD, str(vram)], stdin=pipe, stdout=pipe)
atexit.register(holder.kill)
assert holder.stdout.readline()
free = torch.cuda.mem_get_info()[0]
least, stop = free, False

def watch():
    global least
    while not stop:
        least = min(least, torch.cuda.mem_get_info()[0])
        time.sleep(0.002)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = tpde.from_pretrained(folder, vram=vram, max_tokens=length + 32, kernels=kernels)
ids = torch.arange(3, 3 + length, device="cuda")[None]
with torch.no_grad():
    for _ in range(3):
        logits = model(input_ids=ids).logits
made = model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
torch.cuda.synchronize()
stop = True
thread.join()
stats = model.tpde_streamer.stats()
digest = logits.view(torch.int16).to(torch.int64).cpu()
print(json.dumps({
    "peak": free - least, "free": free, "tokens": made[0, length:].tolist(),
    "logits": digest.flatten().tolist(),
    "copied": sum(it.get("copied_bytes", 0) for it in stats.values()),
    "windows": sum(it.get("window_weights", 0) for it in stats.values()),
    "experts": sum(it.get("expert_bytes", 0) for it in stats.values()),
}))
"""


def _held(pair: Pair, vram: int, kernels: str = "exact", length: int = 32) -> dict[str, Any]:
    """What a process took that ran a model while another held the rest.

    Its logits, and without fused kernels its tokens, are the plain model's.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(pair.packed), str(vram), kernels, str(length)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] <= vram
    plain = pair.kind.from_pretrained(pair.plain).to("cuda")
    ids = torch.arange(3, 3 + length, device="cuda")[None]
    with torch.no_grad():
        logits = plain(input_ids=ids).logits
    assert found["logits"] == logits.view(torch.int16).to(torch.int64).cpu().flatten().tolist()
    if kernels == "exact":
        assert found["tokens"] == _tokens(plain, ids)
    return found


def _tokens(model: Any, ids: Any) -> list[int]:
    made = model.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
    tokens: list[int] = made[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.whole_card
@pytest.mark.parametrize("more", [0, 48 << 20, 1 << 30])
def test_the_budget_is_held(more: int, larger: Pair) -> None:
    """Another process holds the rest of the card: what is too much fails."""
    vram = _least(larger.packed) + more
    found = _held(larger, vram)
    assert bool(found["copied"]) == (more < 1 << 30)


@pytest.mark.whole_card
@pytest.mark.parametrize("more", [0, 48 << 20, 1 << 30])
def test_the_budget_is_held_with_windows(more: int, larger: Pair) -> None:
    """A prompt of more rows than products from windows take is computed from decoded weights, as plain ones.

    With all weights in windows, tokens are those of a model with fused kernels that has no budget.
    """
    vram = _least(larger.packed, "fused", 192) + more
    found = _held(larger, vram, "fused", 160)
    assert bool(found["copied"]) == (more < 1 << 30)
    if more == 1 << 30:
        assert found["windows"] == 8 * 7 + 1
        model = tpde.from_pretrained(larger.packed, "cuda", kernels="fused")
        assert found["tokens"] == _tokens(model, torch.arange(3, 163, device="cuda")[None])
    else:
        assert len(found["tokens"]) == 32


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


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Blocks of 56 MiB, 8 of them, of 4 experts each."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("experts")
    return write(folder, transformers.MixtralForCausalLM(config).to(torch.bfloat16))


@pytest.mark.whole_card
@pytest.mark.parametrize("more", [0, 64 << 20])
def test_the_budget_is_held_with_experts(more: int, experts: Pair) -> None:
    vram = _least(experts.packed) + more
    found = _held(experts, vram)
    assert found["copied"]
    assert found["experts"]


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


def test_too_large_a_budget(larger: Pair) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(OutOfMemory, match=r"is more than cuda:0 has: .* are free"):
        tpde.from_pretrained(larger.packed, vram=total + (1 << 30))


def test_two_models_add_up(larger: Pair) -> None:
    vram = _least(larger.packed) + (64 << 20) + _allocated()
    torch.cuda.reset_peak_memory_stats()
    models = [tpde.from_pretrained(larger.packed, vram=vram, max_tokens=64) for _ in range(2)]
    took = inputs("llama", 1, 9, "cuda")
    with torch.no_grad():
        assert_same_bits(models[0](**took).logits, models[1](**took).logits)
    assert torch.cuda.max_memory_reserved() <= 2 * vram
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(2 * vram, dtype=torch.uint8, device="cuda")
    for model in models:
        model.tpde_streamer.close()
    torch.empty(2 * vram, dtype=torch.uint8, device="cuda")  # the limit is lifted


@pytest.fixture
def limited() -> Iterator[float]:
    """Limit what PyTorch may allocate to a half."""
    torch.cuda.set_per_process_memory_fraction(0.5)
    yield torch.cuda.memory.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(
    not hasattr(torch.cuda.memory, "get_per_process_memory_fraction"), reason="this PyTorch tells no limit"
)
def test_a_limit_of_the_users_is_back_afterwards(limited: float, larger: Pair) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(OutOfMemory, match="set_per_process_memory_fraction"):
        tpde.from_pretrained(larger.packed, vram=int(0.6 * total), max_tokens=64)
    vram = _least(larger.packed) + _allocated()
    model = tpde.from_pretrained(larger.packed, vram=vram, max_tokens=64)
    assert torch.cuda.memory.get_per_process_memory_fraction() < vram / total
    model.tpde_streamer.close()
    assert torch.cuda.memory.get_per_process_memory_fraction() == pytest.approx(limited, abs=1e-9)


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
