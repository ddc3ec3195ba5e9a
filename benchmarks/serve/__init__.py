"""Serving with vLLM: bf16, FP8, tpde and Glyd, one after the other on the same model and machine.

A model of random bf16 weights with a trained one's statistics is written to a folder; nothing is downloaded.
Each way is served by a vLLM server of its own, and asked by vLLM's own `bench serve`. Needs vLLM (0.26 and
0.32 are tried), and of disk 16 GB for `llama-8b`, 61 GB for `qwen3-30b-a3b`, once more two thirds for packed
files; `--layers 4` makes less of it. A model's files are read before each start, so that the page cache has
them. A way that fails says why in its row. `--shape tiny` runs on vLLM's CPU build. `--beside 2` runs two
ways at a time on two GPUs of one kind.

`--latency` runs vLLM's `bench latency` instead: it starts an engine for each number of requests at a time.
With `--offline` there is no server: requests of random tokens go to vLLM's engine in a process, in batches.
`--offline --compare 200` says of how many prompts the tokens are the same in other batches, and with plain
weights, and nothing else: PyTorch's compiler then chooses kernels without timing them, as by default two
processes choose otherwise, and requests wait for each other, so that batches are the same in all ways. With
`--invariant`, `--ways tpde tpde-2` compares one GPU with two.
`--offline --dir MODEL --perplexity TEXT` measures the perplexity of a text, and nothing else: the engine then
takes 64 rows a step, so that fused kernels multiply them; `--ways bf16 bf16-invariant tpde` also shows how
much plain weights' differs by vLLM's batch-invariant kernels, which need a GPU. With `--engines 4`
four engines of a way read shares of the text, with `--beside 2` of two ways at a time, all on one GPU, where
`--serve='--gpu-memory-utilization 0.1 --kv-cache-memory-bytes 1G'` leaves each its room. A long text may be
read by one way a run: `--measured FILE` takes the ways that `--json FILE` of an earlier run has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.harness import machine, processes, tuned
from benchmarks.harness.gpu import device
from benchmarks.harness.page_cache import warm
from benchmarks.harness.report import Page, note
from benchmarks.harness.texts import Text
from benchmarks.serve.commands import Latency
from benchmarks.serve.measured import take
from benchmarks.serve.models import SHAPES, make, title_of
from benchmarks.serve.offline import READING, Engine
from benchmarks.serve.server import Server
from benchmarks.serve.tables import AT_A_TIME, COMPARED, FIGURES, Row, compare, judge, perplexities, report
from benchmarks.serve.ways import WAYS

TITLE = "Serving with vLLM"
CONCURRENT = [1, 8, 32, 128]
LEAST = 8  # requests that are measured
# Where tokens are compared: the compiler chooses nothing by time, and takes no kernel of FlashInfer's for
# sums over GPUs and norms, which rounds otherwise.
COMPARING = {
    "inductor_compile_config": {"deterministic": True, "combo_kernels": False},
    "pass_config": {"fuse_allreduce_rms": False},
}
_packing = threading.Lock()


def _loading(server: Server | Engine | Latency) -> str:
    """Seconds, as vLLM says."""
    return str(server.log.figure(r"Model loading took .* and ([\d.]+) seconds"))


def reading(engines: list[Engine], text: Path) -> Text:
    """What engines, which read a share of the windows each, make of a text; sums in the text's order."""
    count = len(engines)
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(it.perplexity, text, at, count) for at, it in enumerate(engines)]
        shares = [it.result() for it in asked]
    sums = [math.nan] * sum(len(it["sums"]) for it in shares)
    for at, it in enumerate(shares):
        sums[at::count] = it["sums"]
    return {**shares[0], "tokens": sum(it["tokens"] for it in shares), "sums": sums}


def measure(
    way: str, servers: Sequence[Server | Engine | Latency], model: Path, options: argparse.Namespace
) -> Row:
    """What a way does with each number of requests at a time, or what several engines make of a text."""
    server = servers[0]
    lengths = options.prompt, options.tokens
    found: Row = {"start": "-" if server.load_s is None else f"{server.load_s:.1f}"}
    for count in options.concurrent:
        asked = server.bench(model, count, lengths, max(options.rounds * count, LEAST))
        found[f"{count}"] = {key: asked[key] for key, *_ in FIGURES if key in asked}
        note(f"{way}, {count} at a time: {found[f'{count}']}")
    if isinstance(server, Engine) and options.compare:
        note(f"{way}: tokens of {options.compare} prompts")
        asks = (lengths[0], COMPARED), options.compare
        found["tokens"] = [server.tokens(count, *asks) for count in AT_A_TIME]
    if options.perplexity:
        note(f"{way}: reads the text")
        found["text"] = reading([it for it in servers if isinstance(it, Engine)], options.perplexity)
    found |= {
        "kv": server.log.figure(r"KV cache size: ([\d,]+) tokens"),
        "read": _loading(server),
        "weights": server.log.figure(r"[Mm]odel loading took ([\d.]+ GiB)"),
    }
    if found["weights"] == "-":
        found["weights"] = server.log.figure(r"weights take ([\d.]+ MiB)")
    note(f"{way}: {server.log.figure(r'(weights take .*|[Mm]odel loading took .*)')}")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="layers of the shape, instead of its own number")
    usual = [it for it in WAYS if it not in ("tpde-2", "bf16-invariant")]
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=usual)
    parser.add_argument("--concurrent", nargs="+", type=int, help="requests at a time: 1 8 32 128")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each that runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, help="keep the model here, or use the one that is there; or a model of yours"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--offline", action="store_true", help="vLLM's engine in a process, no server")
    how.add_argument("--latency", action="store_true", help="vLLM's `bench latency`, no server")
    parser.add_argument(
        "--beside",
        type=int,
        default=1,
        help="ways at a time, each on a GPU of its own; for a text all on one",
    )
    parser.add_argument("--compare", type=int, default=0, help="prompts whose tokens are compared, offline")
    parser.add_argument(
        "--invariant", action="store_true", help="results that depend on no batch: `VLLM_BATCH_INVARIANT=1`"
    )
    parser.add_argument(
        "--perplexity",
        type=Path,
        help="measure that of this text, or of a folder's Python files, and no speed, offline",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        default=[],
        help="JSON of earlier runs on this machine, whose ways are not run again, with `--perplexity`",
    )
    parser.add_argument("--engines", type=int, default=1, help="that read the text, all on one GPU")
    parser.add_argument(
        "--again", action="store_true", help="start each way once more, with kernels compiled, and load"
    )
    tuned.option(parser)
    parser.add_argument("--serve", default="", help="more options of vLLM: `--serve='--enforce-eager'`")


def write(directory: str, shape: str, seed: int, layers: int | None) -> int:
    """Make a model, in a process of its own: gives its bytes."""
    return make(Path(directory), shape, seed, layers)


def model_of(options: argparse.Namespace, scratch: Path) -> tuple[Path, Path]:
    """Folders of the model, which is made if it is not there, and of its packed files."""
    at = options.dir or scratch
    if (at / "config.json").exists():  # nothing is written beside a model of the caller's
        plain = at.resolve()
        return plain, scratch / f"{plain.name}-packed"
    plain = at / title_of(options.shape, options.layers)
    if not (plain / "config.json").exists():  # by another process, which then gives its memory back
        processes.call(write, str(plain), options.shape, options.seed, options.layers)
    return plain, plain.with_name(f"{plain.name}-packed")


def pack(plain: Path, packed: Path) -> None:
    """Pack a model, if that is not there."""
    with _packing:
        if not (packed / "config.json").exists():
            import tpde

            note("packs")
            tpde.pack(plain, packed)


def turns(ways: list[str], beside: int, shared: bool) -> Iterator[list[tuple[str, str | None]]]:
    """Ways that run at a time, each with its GPU; none where one runs, or all share what they find."""
    if beside == 1 or (shared and beside > 1):
        for first in range(0, len(ways), beside):
            yield [(way, None) for way in ways[first : first + beside]]
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


def served(
    way: str, models: tuple[Path, Path], log: Path, environment: dict[str, str], options: argparse.Namespace
) -> Row:
    """What one way does, in processes of its own."""
    _, more, of_packed, invariant = WAYS[way]
    if way == "glyd" and importlib.util.find_spec("glyd") is None:
        raise RuntimeError("Glyd is not installed: `pip install 'glyd[vllm]'`")
    most = options.prompt + options.tokens + 16
    common = READING if options.perplexity else ["--max-model-len", str(most)]
    if of_packed:
        pack(*models)
    model = models[of_packed]
    note(f"{way}: starts")
    kind = Engine if options.offline else Latency if options.latency else Server
    given = ["--no-enable-prefix-caching", *common, *more, *options.serve.split()]
    if options.invariant or invariant:
        environment = environment | {"VLLM_BATCH_INVARIANT": "1"}
    if options.compare:
        given += ["--compilation-config", json.dumps(COMPARING)]
        environment = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # batches begin when all is asked
    warm(model)
    with contextlib.ExitStack() as running:

        def start(number: int) -> Server | Engine | Latency:
            server = kind(model, given, log.with_suffix(f".{number}.log") if number else log, environment)
            return running.enter_context(contextlib.closing(server))

        servers = [start(0)]
        with ThreadPoolExecutor(options.engines) as pool:  # they find what the first has compiled
            servers += pool.map(start, range(1, options.engines))
        found = measure(way, servers, model, options)
    if options.again:
        note(f"{way}: starts again")
        warm(model)
        with contextlib.closing(kind(model, given, log.with_suffix(".again.log"), environment)) as server:
            found["again"] = _loading(server)
    return found


def check(options: argparse.Namespace) -> None:
    """Refuse what does not go together, and fill in what was not given."""
    for name in ("compare", "perplexity"):
        if getattr(options, name) and not options.offline:
            raise SystemExit(f"`--{name}` needs `--offline`")
    alone = [name for name in ("compare", "perplexity", "concurrent") if getattr(options, name)]
    if len(alone) > 1:
        raise SystemExit(f"`--{alone[0]}` needs a run of its own, without `--{alone[1]}`")
    if "bf16-invariant" in options.ways and not options.perplexity:
        raise SystemExit("`bf16-invariant` is for `--perplexity`: others have `--invariant`")
    if options.perplexity and not options.perplexity.exists():
        raise SystemExit(f"`--perplexity {options.perplexity}` is not there")
    if options.perplexity and not (options.dir and (options.dir / "config.json").is_file()):
        raise SystemExit(f"`--perplexity` needs a trained model and its tokenizer, `--dir` is {options.dir}")
    if options.measured and not options.perplexity:
        raise SystemExit("`--measured` is for `--perplexity`: times are compared within a run")
    if options.engines < 1 or (options.engines > 1 and not options.perplexity):
        raise SystemExit("`--engines` is of those that read a text, with `--perplexity`: 1 or more")
    if options.compare and "--compilation-config" in options.serve:
        raise SystemExit("`--compare` has a `--compilation-config` of its own: leave it out of `--serve`")
    if options.beside > 1 and "tpde-2" in options.ways:
        raise SystemExit("`--beside` gives each way one GPU, `tpde-2` needs two")
    options.concurrent = options.concurrent or ([] if alone else CONCURRENT)


def cards_of(more: str) -> int:
    """How many GPUs a model is spread over, by the options for vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    return int(parser.parse_known_args(more.split())[0].tensor_parallel_size)


def room_of(more: str) -> float | None:
    """GiB of a GPU that an engine may take, by the options for vLLM; None without a GPU or such an option."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory-utilization", type=float)
    share = parser.parse_known_args(more.split())[0].gpu_memory_utilization
    if share is None or device() != "cuda":
        return None
    import torch

    return float(share * torch.cuda.get_device_properties(0).total_memory / 2**30)


def tell(page: Page, done: dict[str, Row], options: argparse.Namespace) -> None:
    """Write the page of what is there so far."""
    rows = {way: done[way] for way in options.ways if way in done}
    page.clear()
    report(page, rows, options.concurrent, (options.prompt, options.tokens))
    compare(page, rows, options.invariant)
    perplexities(page, rows)
    page.data = rows
    page.save()


def run(options: argparse.Namespace, page: Page) -> None:
    """One way after the other, or some beside each other."""
    check(options)
    if device() == "cuda":
        page.facts["GPU"] = machine.gpu()
        tuned.follow(options, page)
    done = take(options.measured, options.ways, page)
    with tempfile.TemporaryDirectory() as scratch:
        models = model_of(options, Path(scratch))
        page.title = f"{TITLE}: {models[0].name}"

        def serve(way: str, gpu: str | None) -> None:
            chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            try:
                done[way] = served(way, models, Path(scratch) / f"{way}.log", chosen, options)
            except Exception as error:
                traceback.print_exc()
                done[way] = {"problem": str(error)[:160]}

        left = [way for way in options.ways if way not in done]
        for some in turns(left, options.beside, options.perplexity is not None):
            _at_a_time([partial(serve, *it) for it in some])
            tell(page, done, options)
        if not left:
            tell(page, done, options)
    rows = {way: done[way] for way in options.ways}
    for way, row in rows.items():
        if way.startswith("tpde"):
            page.judge("problem" not in row, f"{way} serves")
    if page.title == f"{TITLE}: llama-8b" and "bf16" in rows and options.concurrent and not options.latency:
        judge(page, rows, options.concurrent, cards_of(options.serve), room_of(options.serve))
