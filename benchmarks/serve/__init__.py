"""Serving with vLLM: bf16, FP8, tpde and Glyd, one after the other on the same model and machine.

A model of random bf16 weights with a trained one's statistics is written to a folder; nothing is downloaded.
Each way is served by a vLLM server of its own, and asked by vLLM's own `bench serve`. Needs vLLM (0.32 is
tried), and of disk 16 GB for `llama-8b`, 61 GB for `qwen3-30b-a3b`, once more two thirds for packed files.
A way that fails says why in its row. `--shape tiny` runs on vLLM's CPU build. `--beside 2` runs two ways at
a time on two GPUs of one kind. With `--offline` there is no
server: requests of random tokens go to vLLM's engine in a process, in batches, and `--compare 200` says of
how many prompts the tokens are the same in other batches, and with plain weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, processes, tuned
from benchmarks.harness.gpu import device
from benchmarks.harness.report import Page, note
from benchmarks.serve.models import SHAPES, make
from benchmarks.serve.offline import Engine
from benchmarks.serve.server import Server

TITLE = "Serving with vLLM"
EXACT = json.dumps({"quantization_config": {"quant_method": "tpde", "kernels": "exact"}})
# What vLLM is told, and whether of packed files.
WAYS: dict[str, tuple[str, list[str], bool]] = {
    "bf16": ("vLLM, bf16", [], False),
    "fp8": ("vLLM, FP8 (other weights)", ["--quantization", "fp8_per_tensor"], False),
    "tpde": ("tpde", ["--quantization", "tpde"], False),
    "tpde-packed": ("tpde, packed files", [], True),
    "tpde-exact": ("tpde, exact", ["--hf-overrides", EXACT], False),
    "glyd": ("Glyd", ["--quantization", "glyd"], False),
}
FIGURES = (
    ("output_throughput", "tokens generated a second, all requests together (times bf16)", 1),
    ("mean_ttft_ms", "time to the first token, ms", 1),
    ("mean_itl_ms", "time between what is streamed, ms", 2),
    ("mean_tpot_ms", "time a token after the first, ms", 2),
)
_packing = threading.Lock()
Row = dict[str, Any]
AT_A_TIME, COMPARED = (1, 32), 32  # of the prompts that are compared, and their tokens
# Of the 8 B shape, beside bf16: tokens a second by requests at a time, and the time to a first token.
BARS, FIRST_BAR = {1: 1.25, 8: 1.15, 32: 1.0, 128: 0.8}, 1.15
LOAD_BARS = {"tpde": 1.15, "tpde-packed": 0.9}  # time to load, of bf16's


def measure(
    way: str,
    server: Server | Engine,
    model: Path,
    concurrent: list[int],
    lengths: tuple[int, int],
    rounds: int,
) -> Row:
    """What a way does with each number of requests at a time."""
    found: Row = {
        "load_s": server.load_s,
        "kv": server.log.figure(r"KV cache size: ([\d,]+) tokens"),
        "read": server.log.figure(r"Model loading took .* and ([\d.]+) seconds"),
        "weights": server.log.figure(r"[Mm]odel loading took ([\d.]+ GiB)"),
    }
    if found["weights"] == "-":
        found["weights"] = server.log.figure(r"weights take ([\d.]+ MiB)")
    note(f"{way}: {found}")
    for count in concurrent:
        asked = server.bench(model, count, lengths, max(rounds * count, 4))
        if asked["completed"] < max(rounds * count, 4):
            raise RuntimeError(f"{asked['failed']} of the requests failed")
        found[f"{count}"] = {key: asked[key] for key, *_ in FIGURES}
        note(f"{way}, {count} at a time: {found[f'{count}']}")
    return found


def report(page: Page, rows: dict[str, Row], concurrent: list[int], lengths: tuple[int, int]) -> None:
    """The tables."""
    first = [
        [
            WAYS[way][0],
            row.get("problem") or f"{row['load_s']:.1f}",
            row.get("read", ""),
            row.get("weights", ""),
            row.get("kv", ""),
        ]
        for way, row in rows.items()
    ]
    page.table(["way", "start, s", "of which loading, s", "weights", "KV cache, tokens"], first)
    page.say(f"Prompts of {lengths[0]} tokens, {lengths[1]} are generated.")
    plain = rows.get("bf16", {})
    for key, title, digits in FIGURES:
        lines = []
        for way, row in rows.items():
            if "problem" in row:
                continue
            cells = []
            for count in concurrent:
                value, base = row[f"{count}"][key], plain.get(f"{count}", {}).get(key)
                times = f" ({value / base:.2f})" if base and key == "output_throughput" else ""
                cells.append(f"{value:.{digits}f}{times}")
            lines.append([WAYS[way][0], *cells])
        if lines:
            page.say(f"{title}, by requests at a time:")
            page.table(["way", *map(str, concurrent)], lines)


def compare(page: Page, rows: dict[str, Row]) -> None:
    """How many prompts had the same tokens in another batch, and with plain weights in such a batch."""
    plain = rows.get("bf16", {}).get("tokens")
    lines = []
    for way, row in rows.items():
        if "tokens" not in row:
            continue
        alone, together = row["tokens"]
        beside = [_alike(row["tokens"][i], plain[i]) if plain else "-" for i in range(2)]
        lines.append([WAYS[way][0], _alike(alone, together), *beside])
    if lines:
        one, many = AT_A_TIME
        page.say(f"Of {len(alone)} prompts, how many have the same {COMPARED} first tokens:")
        page.table(["way", f"with {one} and {many} at a time", f"as bf16, {one}", f"as bf16, {many}"], lines)


def _alike(one: list[list[int]], other: list[list[int]]) -> str:
    return str(sum(a == b for a, b in zip(one, other, strict=True)))


def judge(page: Page, rows: dict[str, Row], concurrent: list[int]) -> None:
    """Hold against the bars, which are of bf16."""
    ours, plain = rows.get("tpde", {}), rows["bf16"]
    speeds = [
        (f"{count} at a time, tokens a second, of bf16's", _of(ours, plain, count, "output_throughput"), bar)
        for count, bar in BARS.items()
        if count in concurrent
    ]
    page.limits(speeds, least=True)
    first = _of(ours, plain, min(concurrent), "mean_ttft_ms")
    reading = [
        (f"loading, {WAYS[way][0]}, of bf16's time", _reading(rows[way], plain), bar)
        for way, bar in LOAD_BARS.items()
        if way in rows
    ]
    page.limits([("the first token, of bf16's time", first, FIRST_BAR), *reading], least=False)


def _of(ours: Row, plain: Row, count: int, key: str) -> float | None:
    rows = [it.get(f"{count}") for it in (ours, plain)]
    return None if None in rows else float(rows[0][key] / rows[1][key])


def _reading(ours: Row, plain: Row) -> float | None:
    taken = [it.get("read", "-") for it in (ours, plain)]
    return None if "-" in taken else float(taken[0]) / float(taken[1])


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--concurrent", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each that runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keep the model here, or use the one that is there")
    parser.add_argument("--offline", action="store_true", help="vLLM's engine in a process, no server")
    parser.add_argument("--beside", type=int, default=1, help="ways at a time, each on a GPU of its own")
    parser.add_argument("--compare", type=int, default=0, help="prompts whose tokens are compared, offline")
    tuned.option(parser)
    parser.add_argument("--serve", default="", help="more options of vLLM: `--serve='--enforce-eager'`")


def write(directory: str, shape: str, seed: int) -> int:
    """Make a model, in a process of its own: gives its bytes."""
    return make(Path(directory), shape, seed)


def pack(plain: Path) -> None:
    """Pack a model beside it, if that is not there."""
    with _packing:
        if not (_packed(plain) / "config.json").exists():
            import tpde

            note("packs")
            tpde.pack(plain, _packed(plain))


def _packed(plain: Path) -> Path:
    return plain.with_name(f"{plain.name}-packed")


def turns(ways: list[str], beside: int) -> Iterator[list[tuple[str, str | None]]]:
    """Ways that run at a time, each with its GPU; none where one runs, which takes what it finds."""
    if beside == 1:
        yield from ([(way, None)] for way in ways)
        return
    import torch

    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = said.split(",") if said else [f"{i}" for i in range(torch.cuda.device_count())]
    if not 0 < beside <= len(gpus):
        raise SystemExit(f"`--beside {beside}` needs as many GPUs, {len(gpus)} are there")
    for first in range(0, len(ways), beside):
        some = ways[first : first + beside]
        yield list(zip(some, gpus[: len(some)], strict=True))


def _at_a_time(works: list[Callable[[], None]]) -> None:
    """The first in this thread, so that Ctrl-C reaches it, others beside it."""
    others = [threading.Thread(target=it, daemon=True) for it in works[1:]]
    for it in others:
        it.start()
    works[0]()
    for it in others:
        it.join()


def served(way: str, plain: Path, log: Path, environment: dict[str, str], options: argparse.Namespace) -> Row:
    """What one way does, in processes of its own."""
    _, more, of_packed = WAYS[way]
    lengths = options.prompt, options.tokens
    common = ["--max-model-len", str(sum(lengths) + 16), "--no-enable-prefix-caching"]
    if of_packed:
        pack(plain)
    model = _packed(plain) if of_packed else plain
    note(f"{way}: starts")
    kind = Engine if options.offline else Server
    asked = kind(model, [*common, *more, *options.serve.split()], log, environment)
    with contextlib.closing(asked) as server:
        found = measure(way, server, model, options.concurrent, lengths, options.rounds)
        if isinstance(server, Engine) and options.compare:
            note(f"{way}: tokens of {options.compare} prompts")
            asks = (lengths[0], COMPARED), options.compare
            found["tokens"] = [server.tokens(count, *asks) for count in AT_A_TIME]
    return found


def run(options: argparse.Namespace, page: Page) -> None:
    """One way after the other, or some beside each other."""
    if options.compare and not options.offline:
        raise SystemExit("`--compare` needs `--offline`")
    lengths = options.prompt, options.tokens
    if device() == "cuda":
        page.facts["GPU"] = machine.gpu()
        tuned.follow(options, page)
    page.title = f"{TITLE}: {options.shape}"
    done: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as scratch:
        at = options.dir or Path(scratch)
        plain = at / options.shape
        if not (plain / "config.json").exists():  # by another process, which then gives its memory back
            processes.call(write, str(plain), options.shape, options.seed)

        def serve(way: str, gpu: str | None) -> None:
            chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            try:
                done[way] = served(way, plain, Path(scratch) / f"{way}.log", chosen, options)
            except Exception as error:
                traceback.print_exc()
                done[way] = {"problem": str(error)[:160]}

        for some in turns(options.ways, options.beside):
            _at_a_time([partial(serve, *it) for it in some])
            rows = {way: done[way] for way in options.ways if way in done}
            page.clear()
            report(page, rows, options.concurrent, lengths)
            compare(page, rows)
            page.save()
    rows = {way: done[way] for way in options.ways}
    for way, row in rows.items():
        if way.startswith("tpde"):
            page.judge("problem" not in row, f"{way} serves")
    if options.shape == "llama-8b" and "bf16" in rows:
        judge(page, rows, options.concurrent)
