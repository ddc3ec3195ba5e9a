"""The budget of models on a GPU is held, where another process holds the rest; one too large is refused."""

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
from support.checkpoints import Pair, write
from support.gpu import needs_cuda
from support.models import VOCAB, assert_same_bits, inputs, torch

import tpde
from tpde.errors import OutOfMemory

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
pytest.importorskip("cuda.core", reason="needs cuda-core")
pytestmark = [
    needs_cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # memory that cannot be locked


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
