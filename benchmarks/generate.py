"""Generating text: plain, packed, offloaded and quantized models, each in a process of its own.

    python benchmarks/generate.py [--layers 8] [--out FILE.md]

A Llama of random bf16 weights (the 8 B shape by default) is made on the GPU and saved; nothing is downloaded.
Needs 30 GB of disk, as much memory for the page cache, and of the device: both models are loaded at a time to
decode in turn (`--turns 0` leaves that out). Peers are optional: accelerate, bitsandbytes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from _gpu import need_cuda
from _machine import arguments, emit, header, note, table, verdict
from _model import PROMPT, SHAPES, TPDE, in_turn, load, make, run

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


def gib(count: float) -> str:
    """Bytes for a table."""
    return f"{count / 2**30:.2f}"


def worker(task: str, given: Found, limit: float) -> Found:
    """Run a task of this file in a process of its own; its last line of output is the result."""
    command = [sys.executable, __file__, "--task", task, json.dumps(given)]
    note(f"{task}: {given.get('mode', '')}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"took more than {limit:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found = dict(json.loads(line))
            if any("problem" in key for key in found):
                note(done.stderr[-3000:])
            return found
    tail = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [
        f"exit code {done.returncode}"
    ]
    note(done.stderr[-2000:])
    return {"problem": tail[0][:120]}


def perform(task: str, given: Found) -> Found:
    """Do a task in this process."""
    from _gpu import reason

    plain, packed = Path(given["plain"]), Path(given["packed"])
    try:
        if task == "make":
            return make(plain, given["shape"], given["layers"], given["seed"])
        if task == "pack":
            import tpde

            start = time.perf_counter()
            result = tpde.pack(plain, packed)
            return {"pack_s": time.perf_counter() - start, "ratio": result.ratio}
        if task == "in turn":
            return in_turn(plain, packed, given["tokens"], given["turns"])
        if task == "load":
            load(given["mode"], plain, packed)
            return {}
        return run(given["mode"], plain, packed, given["tokens"])
    except Exception as error:
        traceback.print_exc()
        return {"problem": reason(error)}


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


def results_table(results: dict[str, Found], files: dict[str, int]) -> str:
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
                same(found, results["plain"]) if mode != "plain" else "",
            ]
        )
    columns = ["model", "load, s", "files, GiB", "VRAM loaded, GiB", "VRAM peak, GiB", "host peak, GiB"]
    columns += ["eager, ms/token", "tokens/s", "graph, ms/token", "tokens/s", "compiled, ms/token"]
    columns += ["bits as plain"]
    return table(columns, rows)


def turns_table(turns: Found) -> str:
    """Medians and ranges of what was loaded and decoded in turn."""

    def shown(values: list[float], scale: float) -> str:
        low, middle, high = (x * scale for x in (min(values), statistics.median(values), max(values)))
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    rows = [[MODES[mode], shown(it["load_s"], 1), shown(it["eager_s"], 1e3)] for mode, it in turns.items()]
    rows.append(["tpde more than plain, by pairs", "", shown(added(turns), 1e3)])
    return table(["model", "load again, s", "eager, ms/token"], rows)


def added(turns: Found) -> list[float]:
    """What a token of the packed model took more, for each pair."""
    return [b - a for a, b in zip(turns["plain"]["eager_s"], turns["packed"]["eager_s"], strict=True)]


def bars(
    results: dict[str, Found], turns: Found, made: Found, packed_bytes: int, layers: int
) -> tuple[str, bool]:
    """Ours against the bars; eager decoding by what was done in turn, loading by that as well."""
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
    checks += fused_checks(results)
    exact = [same(ours, plain)] if ours and plain else []
    rows = [
        [
            what,
            "not measured" if found is None else f"{found:.2f}",
            f"{bar:.2f}",
            "-" if found is None else verdict(found <= bar),
        ]
        for what, found, bar in checks
    ]
    rows += [["bits as plain", answer, "yes", verdict("no" not in answer)] for answer in exact if answer]
    met = all(found is None or found <= bar for _, found, bar in checks)
    return table(["bar", "found", "at most", ""], rows), met and not any("no" in answer for answer in exact)


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


def main() -> int:
    """Parse the command line, run, print."""
    if sys.argv[1:2] == ["--task"]:
        result = perform(sys.argv[2], json.loads(sys.argv[3]))
        print(json.dumps(result), flush=True)
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=[s for s in SHAPES if s != "llama-70b"], default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument(
        "--modes", nargs="+", choices=list(MODES), default=[it for it in MODES if it != "pack_module"]
    )
    parser.add_argument("--tokens", type=int, default=64, help="timed tokens")
    parser.add_argument("--turns", type=int, default=3, help="loads of plain and packed in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keeps the models, and uses those that are there")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each process")
    options = parser.parse_args()
    if options.shape != "tiny":
        need_cuda()
    head = header("Generating text", gpu=True)
    layers = options.layers or SHAPES[options.shape][2]
    with tempfile.TemporaryDirectory(prefix="tpde-generate-") as temporary:
        base = (options.dir or Path(temporary)) / f"{options.shape}-{layers}"
        plain, packed, facts = base / "plain", base / "packed", base / "facts.json"
        base.mkdir(parents=True, exist_ok=True)
        given = {"plain": str(plain), "packed": str(packed), "tokens": options.tokens}
        if facts.exists():
            made = dict(json.loads(facts.read_text()))
        else:
            task = {"shape": options.shape, "layers": options.layers, "seed": options.seed}
            made = worker("make", given | task, 4 * options.limit)
            if "problem" not in made:
                made |= worker("pack", given, 4 * options.limit)
            if "problem" in made:
                raise SystemExit(f"error: the model could not be made: {made['problem']}")
            facts.write_text(json.dumps(made))
        files = {"plain": stored(plain), "packed": stored(packed)}
        for path in (*plain.glob("*.safetensors"), *packed.glob("*.safetensors")):
            warm(path)
        results: dict[str, Found] = {}
        for mode in options.modes:
            if mode in (*TPDE, "pack_module"):  # compiles kernels, which are kept on disk
                worker("load", given | {"mode": mode}, options.limit)
            results[mode] = worker("run", given | {"mode": mode}, options.limit)
        turns: Found = {}
        problem = ""
        if options.turns > 0 and {"plain", "packed"} <= set(options.modes):
            turns = worker("in turn", given | {"turns": options.turns}, 2 * options.limit)
            problem = turns.pop("problem", "")
        results.setdefault("plain", {})
        about = (
            f"Model: {options.shape} shape, {layers} layers, bf16, random weights with per-row scale "
            f"0.02 * exp(0.3 * normal), {gib(made['plain_bytes'])} GiB; packed in {made['pack_s']:.1f} s, "
            f"ratio {made['ratio']:.4f}. Batch 1, {PROMPT} tokens of prompt, {options.tokens} timed, greedy. "
            "Eager: a growing cache, median of 3. Graph: a static cache, one CUDA graph a token. Compiled: "
            'the same with `torch.compile(mode="reduce-overhead")`. VRAM is '
            "what the process takes beyond the bare context, by `cudaMemGetInfo`; host memory is private "
            "memory. Files were in the page cache, kernels compiled.\n"
        )
        text = results_table({m: results[m] for m in options.modes}, files)
        if problem:
            text += f"\nLoading and decoding in turn failed: {problem}\n"
        elif turns:
            text += (
                f"\nLoaded in turn {options.turns} times in one process, after once to warm up; with both "
                f"there, {options.tokens} tokens each in turn, four times a load. Medians and ranges:\n\n"
                + turns_table(turns)
            )
        judged, met = bars(results, turns, made, files["packed"], layers)
        whole = f"{head}\n{about}\n{text}\nBars (times for {layers} layers):\n\n{judged}"
        emit(whole, options.out)
        ours = [results[mode] for mode in options.modes if mode in ("plain", *TPDE, "pack_module")]
        failed = bool(problem) or any("problem" in key for found in ours for key in found)
    return 0 if met and not failed else 1


def warm(path: Path) -> None:
    """Read a file, so that the page cache has it."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


if __name__ == "__main__":
    sys.exit(main())
