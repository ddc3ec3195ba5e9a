"""One linear layer larger than the card's budget: 40e9 bf16 weights, 80 GB, through 16 GiB.

    python benchmarks/big_layer.py [--fit [--pack-seconds 30]] [--host mapped arena] [--dir /dev/shm]

The weight is made on the GPU tile by tile and packed piece by piece into a file in memory (54 GB). It is then
used with a second process holding all of the card but the budget. Four of the tiles in which it is used are
made again: their bits are compared with those of the packed file, and `F.linear` of them with the output.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _gpu import need_cuda, reason
from _hold import Holder
from _machine import arguments, emit, header, note, table, verdict
from _matrix import NAME, PACKED_SHARE, fitting, matrix_class, room, tile, tile_rows, write
from _model import import_everything
from _rows import rows, tell

BAR = 1.1  # times packed bytes over the copy rate
CHECKED = 4  # tiles
TOKENS = 16


def same(a: Any, b: Any) -> bool:
    """Whether two bf16 tensors have the same bits."""
    import torch

    return bool(torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)))


def make(given: dict[str, Any]) -> None:
    """Pack the layer."""
    import torch
    from _offload import copy_rate

    need_cuda()
    tell(head=header("A layer larger than its budget", gpu=True))
    if torch.cuda.is_available():
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
    from _hold import Use
    from _model import device, wait

    import tpde
    from tpde.nn.tiles import Tile, row_tiles

    width = given["columns"]
    taken = Use(given["holder"]) if torch.cuda.is_available() else None
    if taken is not None:
        taken.limit(int(given["vram"] * 2**30))
        taken.watch()
    start = time.perf_counter()
    model = tpde.from_pretrained(
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
    if taken is not None:
        taken.pause()
    inputs, output = inputs.cpu(), output.cpu()
    plan = next(iter(model.tpde_streamer.plans.values()))
    packed = model.linear.weight.packed
    chunk = packed.sources[0].header.chunk_words
    used = row_tiles(given["rows"], width, 2, chunk, packed.tile_bytes) if packed.tile_bytes else None
    found = {
        "load_s": load_s,
        "seconds": statistics.median(took[1:]),
        "first_s": took[0],
        "peak": 0 if taken is None else taken.peak,
        "predicted_s": plan.seconds,
        "workspace": plan.workspace,
    }
    tell(used=found)
    model.tpde_streamer.close()
    del model
    if taken is not None:
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
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def lines_of(
    options: Any, made: dict[str, Any], rate: float, found: list[dict[str, Any]]
) -> tuple[list[list[str]], bool]:
    """What was found with one kind of host memory, and whether the bars are met."""
    used = next((row["used"] for row in found if "used" in row), None)
    checked = [row for row in found if "tile" in row]
    lines, met = [], bool(used and checked) and not any("problem" in row for row in found)
    if used and rate:
        allowed = BAR * made["packed"] / rate
        lines.append(
            ["seconds", f"{used['seconds']:.3f}", f"{allowed:.3f}", verdict(used["seconds"] <= allowed)]
        )
        held = used["peak"] <= options.vram * 2**30
        lines.append(["card peak, GiB", f"{used['peak'] / 2**30:.2f}", f"{options.vram:g}", verdict(held)])
        met = met and held and used["seconds"] <= allowed
    for row in checked:
        good = row["weights"] and row["outputs"]
        what = f"weights {'equal' if row['weights'] else 'DIFFER'}, output "
        what += "equal" if row["outputs"] else "DIFFERS"
        begin, end = row["tile"]
        lines.append([f"rows {begin} to {end - 1}", what, "equal", verdict(good)])
        met = met and good
    lines += [["problem", row["problem"], "", verdict(False)] for row in found if "problem" in row]
    if used:
        lines.append(["load, s", f"{used['load_s']:.2f}", "", ""])
        lines.append(["first run, s", f"{used['first_s']:.3f}", "", ""])
        lines.append(["predicted with typical rates, s", f"{used['predicted_s']:.3f}", "", ""])
        lines.append(["tiles, MiB", f"{used['workspace'] / 2**20:.0f}", "", ""])
    return lines, met


def report(
    head: str, options: Any, made: dict[str, Any], rate: float, found: dict[str, list[dict[str, Any]]]
) -> tuple[str, bool]:
    """The text, and whether the bars are met with each kind of host memory."""
    several = {host: lines_of(options, made, rate, rows_) for host, rows_ in found.items()}
    about = (
        f"One `nn.Linear` of {made['rows']} x {options.columns} bf16 weights, {made['plain'] / 1e9:.2f} GB, "
        f"packed {made['packed'] / 1e9:.2f} GB, made and packed in {made['pack_s']:.1f} s, in "
        f"{options.vram:g} GiB; copy rate {rate / 1e9:.1f} GB/s"
    )
    lines = [[host, *line] for host, (them, _) in several.items() for line in them]
    met = bool(several) and all(it for _, it in several.values())
    return f"{head}\n{about}.\n\n" + table(["host memory", "what", "found", "at most", ""], lines), met


def perform(task: str, given: dict[str, Any]) -> None:
    """Do a task in this process."""
    try:
        {"make": make, "use": use}[task](given)
    except Exception as error:
        import traceback

        traceback.print_exc()
        tell(problem=reason(error))


def main() -> int:
    """Parse the command line, run, print."""
    if sys.argv[1:2] == ["--task"]:
        perform(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    parser = arguments(__doc__)
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
    options = parser.parse_args()
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.transformers.streamed  # noqa: F401

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="tpde-layer-", dir=options.dir) as folder, Holder() as holder:
        given = {"folder": folder, "rows": options.rows, "columns": options.columns, "seed": options.seed}
        given |= {"vram": options.vram, "runs": options.runs, "fit": options.fit}
        given |= {"pack_seconds": options.pack_seconds, "holder": holder.ends}
        first = list(rows(__file__, "make", given, options.limit, perform))
        head = next((row["head"] for row in first if "head" in row), "")
        made = next((row["made"] for row in first if "made" in row), None)
        if made is None:
            raise SystemExit(f"error: the layer could not be packed: {first}")
        rate = max((row["rate"] for row in first if "rate" in row), default=0.0)
        found: dict[str, list[dict[str, Any]]] = {}
        for host in options.host:
            environment = {"TPDE_HOST_MEMORY": "arena"} if host == "arena" else {}
            given |= {"rows": made["rows"]}
            for row in rows(__file__, "use", given, options.limit, perform, environment):
                found.setdefault(host, []).append(row)
                note(f"{host}: {row}")
                if options.out is not None:  # a run that is cut short leaves what it has
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(report(head, options, made, rate, found)[0], "utf-8")
        text, met = report(head, options, made, rate, found)
        emit(text, options.out)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
