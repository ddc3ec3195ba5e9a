"""One linear layer larger than the card's budget: 40e9 bf16 weights, 80 GB, through 16 GiB.

The weight is made on the GPU tile by tile and packed piece by piece into a file in memory (54 GB). It is then
used with a second process holding all of the card but the budget. Four of the tiles in which it is used are
made again: their bits are compared with those of the packed file, and `F.linear` of them with the output.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.data.llama import import_everything
from benchmarks.data.matrix import NAME, PACKED_SHARE, fitting, matrix_class, room, tile, tile_rows, write
from benchmarks.harness.card import Holder, Use
from benchmarks.harness.gpu import copy_rate, device, give_back, need_cuda, wait
from benchmarks.harness.machine import gpu
from benchmarks.harness.processes import guarded, rows, tell, told
from benchmarks.harness.report import Page, gib, note

TITLE = "A layer larger than its budget"
BAR = 1.1  # times packed bytes over the copy rate
CHECKED = 4  # tiles
TOKENS = 16


def same(a: Any, b: Any) -> bool:
    """Whether two bf16 tensors have the same bits."""
    import torch

    return bool(torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)))


def make(given: dict[str, Any]) -> None:
    """Pack the layer."""
    need_cuda()
    tell(gpu=gpu())
    tell(rate=copy_rate())
    folder, count, width = Path(given["folder"]), given["rows"], given["columns"]
    if given["fit"]:
        count = fitting(folder, count, width, given["seed"], given["pack_seconds"])
    elif 2 * PACKED_SHARE * count * width > room(folder):
        raise RuntimeError(f"{room(folder) / 1e9:.1f} GB are free for the packed file; use `--fit`")
    start = time.perf_counter()
    sizes = write(folder, count, width, given["seed"])
    tell(made=sizes | {"pack_s": time.perf_counter() - start})


def use(given: dict[str, Any]) -> None:
    """Load it under the budget, time it, check it."""
    import torch

    import tpde
    from tpde.nn.tiles import Tile, row_tiles
    from tpde.weights.packed_tensor import PackedTensor

    width = given["columns"]
    taken = Use(given["holder"])
    taken.limit(int(given["vram"] * 2**30))
    taken.watch()
    start = time.perf_counter()
    model: Any = tpde.from_pretrained(
        given["folder"],
        device=device(),
        model_class=matrix_class(),
        vram=f"{given['vram']:g}GiB",
        max_tokens=TOKENS,
    )
    load_s = time.perf_counter() - start
    note(f"loaded in {load_s:.2f} s")
    draw = torch.Generator(device()).manual_seed(given["seed"])
    inputs = torch.randn(1, 1, width, generator=draw, device=device()).bfloat16()
    took = []
    with torch.no_grad():
        for run in range(given["runs"] + 1):
            wait()
            start = time.perf_counter()
            output = model(inputs_embeds=inputs)
            wait()
            took.append(time.perf_counter() - start)
            note(f"run {run}: {took[-1]:.3f} s")
    taken.pause()
    inputs, output = inputs.cpu(), output.cpu()
    plan = next(iter(model.tpde_streamer.plans.values()))
    packed: PackedTensor = model.linear.weight.packed
    chunk = packed.sources[0].header.chunk_words
    used = row_tiles(given["rows"], width, 2, chunk, packed.tile_bytes) if packed.tile_bytes else None
    found = {
        "load_s": load_s,
        "seconds": statistics.median(took[1:]),
        "first_s": took[0],
        "peak": taken.peak,
        "predicted_s": plan.seconds,
        "workspace": plan.workspace,
    }
    tell(used=found)
    model.tpde_streamer.close()
    del model
    torch.cuda.empty_cache()
    taken.release()
    check(given, inputs.to(device()), output, used or [Tile(0, given["rows"])])


def check(given: dict[str, Any], inputs: Any, output: Any, used: list[Any]) -> None:
    """Make some of the tiles that were used again, and compare them, and what they give."""
    import torch
    from torch.nn import functional

    import tpde

    height, width, step = given["rows"], given["columns"], tile_rows(given["columns"])
    for begin, end in sorted(random.Random(given["seed"]).sample(used, min(CHECKED, len(used)))):
        parts = []
        for number in range(begin // step, -(-end // step)):
            low = number * step
            parts.append(tile(number, height, width, given["seed"])[max(begin - low, 0) : end - low])
        fresh = torch.cat(parts)
        del parts
        with tpde.safe_open(Path(given["folder"]) / "model.safetensors", framework="pt") as packed:
            stored = packed.get_slice(NAME)[begin:end]
        outputs = same(functional.linear(inputs, fresh).cpu(), output[..., begin:end])
        tell(tile=[begin, end], weights=same(stored.to(fresh.device), fresh), outputs=outputs)
        del fresh, stored
        give_back()


def lines_of(options: Any, made: dict[str, Any], rate: float, found: list[dict[str, Any]], page: Page) -> Any:
    """What was found with one kind of host memory: what, found, at most, and whether that is met."""
    used, checked = told(found, "used"), [row for row in found if "tile" in row]
    if not (used and checked):
        page.judge(False, "used and checked")
    if used and rate:
        allowed = BAR * made["packed"] / rate
        met = page.judge(used["seconds"] <= allowed, "seconds")
        yield "seconds", f"{used['seconds']:.3f}", f"{allowed:.3f}", met
        met = page.judge(used["peak"] <= options.vram * 2**30, "card peak")
        yield "card peak, GiB", gib(used["peak"]), f"{options.vram:g}", met
    for row in checked:
        what = f"weights {'equal' if row['weights'] else 'DIFFER'}, output "
        what += "equal" if row["outputs"] else "DIFFERS"
        begin, end = row["tile"]
        met = page.judge(row["weights"] and row["outputs"], "bits")
        yield f"rows {begin} to {end - 1}", what, "equal", met
    yield from (
        ("problem", it["problem"], "", page.judge(False, "problem")) for it in found if "problem" in it
    )
    if used:
        yield "load, s", f"{used['load_s']:.2f}", "", ""
        yield "first run, s", f"{used['first_s']:.3f}", "", ""
        yield "predicted with typical rates, s", f"{used['predicted_s']:.3f}", "", ""
        yield "tiles, MiB", f"{used['workspace'] / 2**20:.0f}", "", ""


def draw(
    page: Page, options: Any, made: dict[str, Any], rate: float, found: dict[str, list[dict[str, Any]]]
) -> None:
    """All of it so far."""
    page.clear()
    page.say(
        f"One `nn.Linear` of {made['rows']} x {options.columns} bf16 weights, {made['plain'] / 1e9:.2f} GB, "
        f"packed {made['packed'] / 1e9:.2f} GB, made and packed in {made['pack_s']:.1f} s, in "
        f"{options.vram:g} GiB; copy rate {rate / 1e9:.1f} GB/s."
    )
    lines = [
        [host, *line] for host, them in found.items() for line in lines_of(options, made, rate, them, page)
    ]
    page.table(["host memory", "what", "found", "at most", ""], lines)


def perform(task: str, given: dict[str, Any]) -> None:
    """Do a task in this process."""
    guarded({"make": make, "use": use}, task, given)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=200_000)
    parser.add_argument("--vram", type=float, default=16, help="GiB")
    parser.add_argument("--host", nargs="+", choices=["mapped", "arena"], default=["mapped"])
    parser.add_argument("--runs", type=int, default=2, help="timed runs after the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="for the packed file")
    parser.add_argument("--fit", action="store_true", help="fewer rows, where there is not room for all")
    parser.add_argument("--pack-seconds", type=float, help="with --fit: fewer rows, if packing takes longer")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each process")


def run(options: argparse.Namespace, page: Page) -> None:
    """Make the layer, then use it with each kind of host memory; the page grows with each row."""
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.transformers.streamed  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="tpde-layer-", dir=options.dir) as folder, Holder() as holder:
        given = {"folder": folder, "rows": options.rows, "columns": options.columns, "seed": options.seed}
        given |= {"vram": options.vram, "runs": options.runs, "fit": options.fit}
        given |= {"pack_seconds": options.pack_seconds, "holder": holder.ends}
        first = list(rows(perform, "make", given, options.limit))
        made, page.facts["GPU"] = told(first, "made"), told(first, "gpu", "")
        if made is None:
            raise SystemExit(f"error: the layer could not be packed: {first}")
        rate, found = told(first, "rate", 0.0), dict[str, list[dict[str, Any]]]()
        given |= {"rows": made["rows"]}
        for host in options.host:
            environment = {"TPDE_HOST_MEMORY": "arena"} if host == "arena" else {}
            for row in rows(perform, "use", given, options.limit, environment):
                found.setdefault(host, []).append(row)
                note(f"{host}: {row}")
                draw(page, options, made, rate, found)
                page.save()
    if not found:
        raise SystemExit("error: nothing was measured")
