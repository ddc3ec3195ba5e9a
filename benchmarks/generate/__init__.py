"""Generating text: plain, packed, offloaded and quantized models, each in a process of its own.

A Llama of random bf16 weights (the 8 B shape by default) is made on the GPU and saved; nothing is downloaded.
Needs 30 GB of disk, as much memory for the page cache, and of the device: both models are loaded at a time to
decode in turn (`--turns 0` leaves that out). Peers are optional: accelerate, bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data.llama import PROMPT, SHAPES
from benchmarks.generate import work
from benchmarks.generate.work import TPDE
from benchmarks.harness import tuned
from benchmarks.harness.gpu import device, need_cuda
from benchmarks.harness.machine import gpu
from benchmarks.harness.page_cache import warm
from benchmarks.harness.processes import Failed, call
from benchmarks.harness.report import Page, gib, note

TITLE = "Generating text"
MODES = {
    "plain": "plain",
    "packed": "tpde",
    "fused": "tpde, fused",
    "pack_exact": "tpde, packed as it comes",
    "pack_fused": "tpde, packed as it comes, fused",
    "offload": "accelerate, cpu_offload",
    "int8": "bitsandbytes 8 bit",
    "int4": "bitsandbytes 4 bit",
    "pack_module": "tpde, pack_module",
}
EAGER_BAR, GRAPH_BAR = 3.0, 8.5  # ms a token more than plain, for 32 layers
VRAM_SPARE = 0.03
# Of plain's: a token by CUDA graphs, tokens a second compiled, and memory at its peak.
FUSED_GRAPH_BAR, FUSED_COMPILED_BAR, FUSED_VRAM_BAR = 0.87, 1.18, 0.735
# Of plain's time: loading packed files, and plain ones that are packed as they come.
FILES_LOAD_BAR, PACK_LOAD_BAR = 0.8, 1.1
HOST_BAR = 256 << 20
Found = dict[str, Any]


def found_by(task: Any, *given: Any, limit: float) -> Found:
    """What a task finds in a process of its own, or its problem."""
    note(f"{task.__name__}: {given[0]}")
    try:
        return dict(call(task, *given, limit=limit))
    except Failed as error:
        return {"problem": str(error)}


def stored(directory: Path) -> int:
    """Bytes of the weights' files."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def speed(found: Found, way: str) -> list[str]:
    """Milliseconds a token and tokens a second, or why there are none."""
    seconds = found.get(f"{way}_s")
    if seconds is None:
        return [found.get(f"{way}_problem", "-"), ""]
    return [f"{seconds * 1e3:.2f}", f"{1 / seconds:.2f}"]


def same(found: Found, plain: Found) -> str:
    """Whether tokens and logits are the plain model's."""
    answers = []
    for name, key in (("eager", "logits"), ("graph", "graph_logits")):
        tokens = "tokens" if name == "eager" else "graph_tokens"
        if key in found and key in plain and len(found[tokens]) == len(plain[tokens]):
            equal = found[key] == plain[key] and found[tokens] == plain[tokens]
            answers.append(f"{name} {'yes' if equal else 'no'}")
    return ", ".join(answers)


def results_table(results: dict[str, Found], files: dict[str, int], page: Page) -> None:
    """One row a mode."""
    rows = []
    for mode, found in results.items():
        if "load_s" not in found:
            rows.append([MODES[mode], found.get("problem", "-"), *[""] * 10])
            continue
        rows.append(
            [
                MODES[mode],
                f"{found['load_s']:.2f}",
                gib(files["packed" if mode in ("packed", "fused") else "plain"]),
                gib(found["loaded_bytes"]),
                gib(found["peak_bytes"]),
                gib(found["host_peak"]),
                *speed(found, "eager"),
                *speed(found, "graph"),
                speed(found, "compiled")[0],
                same(found, results.get("plain", {})) if mode != "plain" else "",
            ]
        )
    columns = ["model", "load, s", "files, GiB", "VRAM loaded, GiB", "VRAM peak, GiB", "host peak, GiB"]
    columns += ["eager, ms/token", "tokens/s", "graph, ms/token", "tokens/s", "compiled, ms/token"]
    page.table([*columns, "bits as plain"], rows)


def turns_table(turns: Found, page: Page) -> None:
    """Medians and ranges of what was loaded and decoded in turn."""

    def shown(values: list[float], scale: float) -> str:
        low, middle, high = (x * scale for x in (min(values), statistics.median(values), max(values)))
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    rows = [[MODES[mode], shown(it["load_s"], 1), shown(it["eager_s"], 1e3)] for mode, it in turns.items()]
    rows.append(["tpde more than plain, by pairs", "", shown(added(turns), 1e3)])
    page.table(["model", "load again, s", "eager, ms/token"], rows)


def added(turns: Found) -> list[float]:
    """What a token of the packed model took more, for each pair."""
    return [b - a for a, b in zip(turns["plain"]["eager_s"], turns["packed"]["eager_s"], strict=True)]


def bars(
    results: dict[str, Found], turns: Found, made: Found, packed_bytes: int, layers: int
) -> list[tuple[str, float | None, float]]:
    """Ours and its bars; eager decoding by what was done in turn, loading by that as well."""
    plain, ours = results.get("plain", {}), results.get("packed", {})
    share = layers / SHAPES["llama-8b"][2]
    checks: list[tuple[str, float | None, float]] = []

    def more(key: str, scale: float) -> float | None:
        return (ours[key] - plain[key]) * scale if key in ours and key in plain else None

    medians = {(mode, what): statistics.median(it) for mode in turns for what, it in turns[mode].items()}
    by_pairs = statistics.median(added(turns)) * 1e3 if medians else None
    by_medians = (medians["packed", "eager_s"] - medians["plain", "eager_s"]) * 1e3 if medians else None
    checks.append(("eager, added ms/token, median of pairs", by_pairs, EAGER_BAR * share))
    checks.append(("eager, added ms/token, of medians", by_medians, EAGER_BAR * share))
    checks.append(("graph, added ms/token", more("graph_s", 1e3), GRAPH_BAR * share))
    if "peak_bytes" in ours and "peak_bytes" in plain:
        activations = plain["peak_bytes"] - made["plain_bytes"]
        limit = (packed_bytes + made["largest_group"]) * (1 + VRAM_SPARE) + activations
        checks.append(("VRAM peak, GiB", ours["peak_bytes"] / 2**30, limit / 2**30))
    if "load_s" in ours and "load_s" in plain:
        checks.append(("load, s", ours["load_s"], plain["load_s"]))
    if medians:
        checks.append(("load again, s", medians["packed", "load_s"], medians["plain", "load_s"]))
    if "host_peak" in ours and "host_peak" in plain:
        host = (ours["host_peak"] - plain["host_peak"]) / 2**20
        checks.append(("host peak more than plain's, MiB", host, HOST_BAR / 2**20))
    return checks + fused_checks(results)


def fused_checks(results: dict[str, Found]) -> list[tuple[str, float | None, float]]:
    """The fused kernels against their bars, as shares of plain's."""
    plain = results.get("plain", {})

    def share(mode: str, key: str) -> float | None:
        found = results.get(mode, {})
        return found[key] / plain[key] if key in found and plain.get(key) else None

    bars: list[tuple[str, float | None, float]] = []
    for mode, load_bar in (("fused", FILES_LOAD_BAR), ("pack_fused", PACK_LOAD_BAR)):
        if mode in results:
            what = MODES[mode].removeprefix("tpde, ")
            bars += [
                (f"{what}, graph, a token's time, of plain's", share(mode, "graph_s"), FUSED_GRAPH_BAR),
                (f"{what}, compiled, the same", share(mode, "compiled_s"), 1 / FUSED_COMPILED_BAR),
                (f"{what}, VRAM peak, of plain's", share(mode, "peak_bytes"), FUSED_VRAM_BAR),
                (f"{what}, load, of plain's", share(mode, "load_s"), load_bar),
            ]
    if "pack_exact" in results:
        bars.append(("packed as it comes, load, of plain's", share("pack_exact", "load_s"), PACK_LOAD_BAR))
    return bars


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=[s for s in SHAPES if s != "llama-70b"], default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument(
        "--modes", nargs="+", choices=list(MODES), default=[it for it in MODES if it != "pack_module"]
    )
    parser.add_argument("--tokens", type=int, default=64, help="timed tokens")
    parser.add_argument("--turns", type=int, default=3, help="loads of plain and packed in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keeps the models, and uses those that are there")
    tuned.option(parser)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each process")


def run(options: argparse.Namespace, page: Page) -> None:
    """Make the models, run every mode, then plain and packed in turn."""
    if options.shape != "tiny":
        need_cuda()
    page.facts["GPU"] = gpu()
    if device() == "cuda":
        tuned.follow(options, page)
    layers, limit = options.layers or SHAPES[options.shape][2], options.limit
    with tempfile.TemporaryDirectory(prefix="tpde-generate-") as temporary:
        base = (options.dir or Path(temporary)) / f"{options.shape}-{layers}"
        plain, packed, facts = base / "plain", base / "packed", base / "facts.json"
        base.mkdir(parents=True, exist_ok=True)
        places = str(plain), str(packed)
        if facts.exists():
            made = dict(json.loads(facts.read_text()))
        else:
            shape = options.shape, options.layers, options.seed
            made = found_by(work.make, places[0], *shape, limit=4 * limit)
            if "problem" not in made:
                made |= found_by(work.pack, *places, limit=4 * limit)
            if "problem" in made:
                raise SystemExit(f"error: the model could not be made: {made['problem']}")
            facts.write_text(json.dumps(made))
        files = {"plain": stored(plain), "packed": stored(packed)}
        for folder in (plain, packed):
            warm(folder)
        results: dict[str, Found] = {}
        for mode in options.modes:
            if mode in (*TPDE, "pack_module"):  # compiles kernels, which are kept on disk
                found_by(work.load_once, mode, *places, limit=limit)
            results[mode] = found_by(work.run, mode, *places, options.tokens, limit=limit)
        turns: Found = {}
        if options.turns > 0 and {"plain", "packed"} <= set(options.modes):
            turns = found_by(work.in_turn, *places, options.tokens, options.turns, limit=2 * limit)
    problem = turns.pop("problem", "")
    page.say(
        f"Model: {options.shape} shape, {layers} layers, bf16, random weights with per-row scale "
        f"0.02 * exp(0.3 * normal), {gib(made['plain_bytes'])} GiB; packed in {made['pack_s']:.1f} s, "
        f"ratio {made['ratio']:.4f}. Batch 1, {PROMPT} tokens of prompt, {options.tokens} timed, greedy. "
        "Eager: a growing cache, median of 3. Graph: a static cache, one CUDA graph a token. Compiled: "
        'the same with `torch.compile(mode="reduce-overhead")`. VRAM is '
        "what the process takes beyond the bare context, by `cudaMemGetInfo`; host memory is private "
        "memory. Files were in the page cache, kernels compiled."
    )
    results_table(results, files, page)
    if problem:
        page.say(f"Loading and decoding in turn failed: {problem}")
    elif turns:
        page.say(
            f"Loaded in turn {options.turns} times in one process, after once to warm up; with both "
            f"there, {options.tokens} tokens each in turn, four times a load. Medians and ranges:"
        )
        turns_table(turns, page)
    page.say(f"Bars (times for {layers} layers):")
    page.limits(bars(results, turns, made, files["packed"], layers), least=False)
    if "plain" in results and (answer := same(results.get("packed", {}), results["plain"])):
        page.say(f"Bits as plain: {answer}, {page.judge('no' not in answer, 'bits')}.")
    ours = [results[mode] for mode in options.modes if mode in ("plain", *TPDE, "pack_module")]
    page.judge(not problem and not any("problem" in key for found in ours for key in found), "all ran")
    page.data = {"made": made, "files": files, "results": results, "turns": turns}
