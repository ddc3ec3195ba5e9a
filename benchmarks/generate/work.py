"""What `generate` does in each process: make a model, load it in a way, generate, watch memory."""

from __future__ import annotations

import gc
import hashlib
import re
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.data.llama import PROMPT, config_of, import_everything, prompt
from benchmarks.harness.gpu import device, wait
from benchmarks.harness.memory import Watch, private_bytes
from benchmarks.harness.processes import reason
from benchmarks.harness.timing import on_device
from benchmarks.peers.offloading import accelerate_offload

WARM = 4  # tokens before those that are timed


def make(directory: str, shape: str, layers: int | None, seed: int) -> dict[str, Any]:
    """Make a Llama of random weights on the device and save it; returns what the report needs."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(shape, layers)
    torch.manual_seed(seed)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    largest: dict[str, int] = {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:  # per-row scale 0.02 * exp(0.3 * normal), as the other benchmarks have it
            scale = 0.02 * torch.exp(0.3 * torch.randn(weight.shape[0], 1, device=weight.device))
            values = torch.randn(weight.shape, device=weight.device) * scale
            weight.data.copy_(values.to(weight.dtype))
        block = re.match(r".*?\.\d+", name)
        if weight.dim() == 2 and "embed" not in name:
            group = block.group() if block else name
            largest[group] = largest.get(group, 0) + weight.nbytes
    model.save_pretrained(directory, max_shard_size="2GB")
    return {
        "plain_bytes": sum(weight.nbytes for weight in model.parameters()),
        "largest_group": max(largest.values()),
    }


def pack(plain: str, packed: str) -> dict[str, Any]:
    """Pack it."""
    import tpde

    start = time.perf_counter()
    result = tpde.pack(plain, packed)
    return {"pack_s": time.perf_counter() - start, "ratio": result.ratio}


# Modes of `tpde.from_pretrained`: from packed files, or from plain ones, packed as they come.
TPDE = ("packed", "fused", "pack_exact", "pack_fused")


def load(mode: str, plain: str, packed: str) -> Any:
    """Load a model in a mode."""
    import torch
    from transformers import AutoModelForCausalLM

    def pretrained(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, **options)

    if mode in TPDE:
        import tpde

        pack = mode.startswith("pack_")
        kernels: Literal["exact", "fused"] = "fused" if mode.endswith("fused") else "exact"
        return tpde.from_pretrained(plain if pack else packed, device=device(), kernels=kernels, pack=pack)
    if mode == "pack_module":
        from tpde.nn import pack_module

        return pack_module(pretrained(device_map=device()))
    if mode == "offload":
        return accelerate_offload()(pretrained())
    if mode in ("int8", "int4"):
        import bitsandbytes  # noqa: F401 - so that its absence is named
        from transformers import BitsAndBytesConfig

        how = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_8bit=mode == "int8",
            load_in_4bit=mode == "int4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return pretrained(device_map={"": 0}, quantization_config=how)
    return pretrained(device_map=device())


def load_once(mode: str, plain: str, packed: str) -> dict[str, Any]:
    """Load, so that kernels are compiled."""
    load(mode, plain, packed)
    return {}


def bits(logits: Any) -> str:
    """A hash of a tensor's bytes."""
    import torch

    data = logits.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


def eager(model: Any, count: int, repeats: int) -> dict[str, Any]:
    """Greedy decoding with a growing cache, one token after the other."""
    import torch
    from transformers import DynamicCache

    took, tokens, last = [], list[int](), None
    with torch.no_grad():
        for _ in range(repeats):
            cache = DynamicCache(config=model.config)
            ids, made = prompt(model.config.vocab_size), []
            start = 0.0
            for step in range(WARM + count):
                if step == WARM:
                    wait()
                    start = time.perf_counter()
                last = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                ids = last[:, -1].argmax(-1, keepdim=True)
                made.append(ids)
            wait()
            took.append((time.perf_counter() - start) / count)
            tokens = torch.cat(made, 1)[0].tolist()
    return {"eager_s": statistics.median(took), "tokens": tokens, "logits": bits(last)}


def stepper(model: Any, length: int) -> tuple[Callable[[], Any], Any]:
    """Prefill a static cache; returns what decodes one more token, and the tensor that receives it."""
    import torch
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    first = prompt(model.config.vocab_size)
    made = model(input_ids=first, past_key_values=cache, use_cache=True, logits_to_keep=1)
    ids = made.logits[:, -1].argmax(-1, keepdim=True)
    position = torch.full((1, 1), PROMPT, device=ids.device)
    places = torch.arange(length, device=ids.device)

    def step() -> Any:
        mask = (places <= position).view(1, 1, 1, length)
        logits = model(
            input_ids=ids, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits
        ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)
        return logits

    return step, ids


def graph(model: Any, count: int) -> dict[str, Any]:
    """Greedy decoding with a static cache, one CUDA graph a token."""
    import torch

    with torch.no_grad():
        step, ids = stepper(model, PROMPT + 2 * WARM + count + 8)
        tokens = [int(ids)]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                step()
                tokens.append(int(ids))
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            logits = step()
        for _ in range(WARM):
            captured.replay()
            tokens.append(int(ids))
        made = torch.zeros(count, dtype=ids.dtype, device=ids.device)

        def decode() -> None:
            for i in range(count):
                captured.replay()
                made[i : i + 1].copy_(ids[0])

        seconds = on_device(decode)
    return {
        "graph_s": seconds / count,
        "graph_tokens": tokens + made.tolist(),
        "graph_logits": bits(logits),
    }


def compiled(model: Any, count: int) -> dict[str, Any]:
    """Greedy decoding with a static cache and `torch.compile(mode="reduce-overhead")`: median of tokens."""
    import torch

    forward = model.forward
    with torch.no_grad():
        step, _ = stepper(model, PROMPT + 2 * WARM + count + 8)
        try:
            model.forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
            for _ in range(2 * WARM):
                step()
            return {"compiled_s": statistics.median(on_device(step) for _ in range(count))}
        finally:
            model.forward = forward


def run(mode: str, plain: str, packed: str, count: int) -> dict[str, Any]:
    """Load a model, generate in both ways, and tell what it took; a way that fails tells why."""
    import_everything()
    watch, found = Watch(), dict[str, Any]()
    found["host_before"] = private_bytes()
    start = time.perf_counter()
    model = load(mode, plain, packed)
    wait()
    found["load_s"] = time.perf_counter() - start
    found["loaded_bytes"] = watch.look()
    model.eval()
    few = min(count, 3) if mode == "offload" else count

    def attempt(way: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            found.update(work())
            watch.look()
        except Exception as error:
            traceback.print_exc()
            found[f"{way}_problem"] = reason(error)

    attempt("eager", lambda: eager(model, 1, 1) and {})  # compiles, allocates, and is watched
    watch.pause()
    found["host_peak"] = watch.host
    if "eager_problem" not in found:
        attempt("eager", lambda: eager(model, few, 1 if mode == "offload" else 3))
    if device() == "cuda" and mode != "offload":
        attempt("graph", lambda: graph(model, count))
        if mode in ("plain", "fused", "pack_fused"):
            attempt("compiled", lambda: compiled(model, count))
    found["peak_bytes"] = watch.device
    return found


def in_turn(plain: str, packed: str, count: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """Load the plain and the packed model in turn, and let both, side by side, decode in turn.

    A host's speed changes from minute to minute: what is compared here lies seconds apart. The first turn
    warms up and is left out.
    """
    import torch

    import_everything()
    took: dict[str, dict[str, list[float]]] = {
        mode: {"load_s": [], "eager_s": []} for mode in ("plain", "packed")
    }
    for turn in range(turns + 1):
        models = {}
        for mode, lists in took.items():
            start = time.perf_counter()
            models[mode] = load(mode, plain, packed).eval()
            wait()
            if turn:
                lists["load_s"].append(time.perf_counter() - start)
        for model in models.values():
            eager(model, 1, 1)
        for again in range(4 if turn else 0):
            for mode in sorted(took, reverse=bool(again % 2)):  # each is first as often as the other
                took[mode]["eager_s"].append(eager(models[mode], count, 1)["eager_s"])
        del models, model
        gc.collect()
        if device() == "cuda":
            torch.cuda.empty_cache()
    return took
