"""A model that nearly fills a GPU, plain and packed: what is left of its memory, and how fast a token comes.

A Llama of random bf16 weights (the 70 B shape by default, 141 GB plain: an H200's) is made on the GPU block
by block, and each block packed before the next is made: no file is written, and no plain copy of all is ever
there. Each way runs in a process of its own. Every weight is then made again and compared bit by bit.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Iterator
from typing import Any

from benchmarks.data.llama import PROMPT, SHAPES, config_of, import_everything
from benchmarks.data.synthetic import weight
from benchmarks.generate import same
from benchmarks.generate.work import eager, graph
from benchmarks.harness import tuned
from benchmarks.harness.gpu import device, give_back, need_cuda, wait
from benchmarks.harness.machine import gpu
from benchmarks.harness.memory import Watch
from benchmarks.harness.processes import Failed, call, reason
from benchmarks.harness.report import Page, gib, ms, note

TITLE = "A model that nearly fills a GPU"
WAYS = {"plain": "plain", "exact": "tpde", "fused": "tpde, fused"}
FUSED_BAR = 0.87  # of plain's time for a token, by CUDA graphs
MEMORY_BAR = 0.735  # of plain's


def parts_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that are made at a time, with their names: what has the most memory first."""
    yield "lm_head", model.lm_head
    yield "model.embed_tokens", model.model.embed_tokens
    for number, block in enumerate(model.model.layers):
        yield f"model.layers.{number}", block
    yield "model.norm", model.model.norm


def build(way: str, config: Any, seed: int) -> Any:
    """The model, on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    import tpde.nn
    from tpde.nn.pack_model import pack_module

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    for prefix, part in parts_of(model):
        part.to_empty(device=device())
        with torch.no_grad():
            for name, parameter in part.named_parameters():
                parameter.copy_(weight(f"{prefix}.{name}", tuple(parameter.shape), seed))
        if way != "plain" and prefix != "model.norm":
            pack_module(part)
            if way == "fused" and prefix != "model.embed_tokens":  # of which rows are read, in either
                tpde.nn.set_kernels(part, "fused")
            give_back()
    with torch.device(device()):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def differing(model: Any, seed: int) -> list[str]:
    """Names of weights whose bits are not those that are made again."""
    import torch

    from tpde.weights.parameter import PackedParameter

    found = []
    for name, held in model.named_parameters():
        made = held.packed.decoded() if isinstance(held, PackedParameter) else held.detach()
        again = weight(name, tuple(held.shape), seed)
        if not torch.equal(made.view(torch.int16), again.view(torch.int16)):
            found.append(name)
    return found


def run_way(way: str, shape: str, layers: int | None, seed: int, count: int) -> dict[str, Any]:
    """Build the model, let it generate, and compare its weights."""
    import_everything()
    watch = Watch()
    start = time.perf_counter()
    model = build(way, config_of(shape, layers), seed)
    wait()
    give_back()
    found: dict[str, Any] = {"build_s": time.perf_counter() - start, "weights_bytes": watch.look()}
    found["weights_plain_bytes"] = sum(2 * it.numel() for it in model.parameters())
    watch.pause()
    for name, work in (("eager", eager), ("graph", graph)):
        if name == "graph" and device() != "cuda":
            continue
        try:
            found |= eager(model, count, 3) if work is eager else graph(model, count)
        except Exception as error:
            traceback.print_exc()
            found[f"{name}_problem"] = reason(error)
    watch.look()
    found["peak_bytes"] = watch.device
    found["differing"] = differing(model, seed)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=SHAPES, default="llama-70b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["plain", "fused"])
    parser.add_argument("--tokens", type=int, default=32, help="timed tokens")
    parser.add_argument("--seed", type=int, default=0)
    tuned.option(parser)
    parser.add_argument("--limit", type=float, default=180, help="seconds for each process")


def _row(way: str, found: dict[str, Any], total: int) -> list[str]:
    if "build_s" not in found:
        return [WAYS[way], found["problem"], *[""] * 6]
    speeds = [ms(found.get(f"{it}_s"), 2) or found.get(f"{it}_problem", "-") for it in ("eager", "graph")]
    left = total - found["peak_bytes"]
    memory = [gib(found["weights_bytes"]), gib(found["peak_bytes"]), gib(left) if total else ""]
    differ = found["differing"]
    return [
        WAYS[way],
        f"{found['build_s']:.1f}",
        *memory,
        *speeds,
        f"{len(differ)} differ" if differ else "same",
    ]


def run(options: argparse.Namespace, page: Page) -> None:
    """One way after the other."""
    if options.shape != "tiny":
        need_cuda()
    total = 0
    if device() == "cuda":
        import torch

        page.facts["GPU"] = gpu()
        tuned.follow(options, page)
        total = torch.cuda.get_device_properties(0).total_memory
    results: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        note(f"{way}: {options.shape}")
        try:
            given = way, options.shape, options.layers, options.seed, options.tokens
            results[way] = dict(call(run_way, *given, limit=options.limit))
        except Failed as error:
            results[way] = {"problem": str(error)}
        page.clear()
        _report(page, options, results, total)
        page.save()


def _report(page: Page, options: argparse.Namespace, results: dict[str, dict[str, Any]], total: int) -> None:
    layers = options.layers or SHAPES[options.shape][2]
    sizes = [it["weights_plain_bytes"] for it in results.values() if "build_s" in it]
    size = f", {gib(sizes[0])} GiB plain" if sizes else ""
    page.say(
        f"Model: {options.shape} shape, {layers} layers, bf16, random weights with per-row scale "
        f"0.02 * exp(0.3 * normal){size}. Batch 1, {PROMPT} tokens of prompt, {options.tokens} timed, "
        "greedy: eager with a growing cache, median of 3; graph with a static cache, one CUDA graph a token. "
        "Memory is what the process takes beyond the bare context."
    )
    columns = ["model", "made in, s", "weights, GiB", "peak, GiB", "left of the card, GiB"]
    columns += ["eager, ms/token", "graph, ms/token", "weights' bits"]
    page.table(columns, [_row(way, found, total) for way, found in results.items()])
    plain, fused = results.get("plain", {}), results.get("fused", {})

    def share(key: str) -> float | None:
        return fused[key] / plain[key] if fused.get(key) and plain.get(key) else None

    if plain and fused:
        bars = [("fused, graph, a token's time, of plain's", share("graph_s"), FUSED_BAR)]
        bars.append(("fused, memory at its peak, of plain's", share("peak_bytes"), MEMORY_BAR))
        page.limits(bars, least=False)
    for way, found in results.items():
        page.judge(found.get("differing") == [], f"bits, {WAYS[way]}")
    if plain and "exact" in results:
        answer = same(results["exact"], plain)
        met = page.judge("yes" in answer and "no" not in answer, "tokens and logits as plain")
        page.say(f"Tokens and logits of tpde as plain's: {answer or 'not compared'}, {met}.")
    page.data = results
