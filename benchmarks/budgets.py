"""Eleven shapes of models, each at two budgets, in batches of 1 and 8: memory, bits, and what is refused.

    python benchmarks/budgets.py [--only llama flux] [--json] [--seconds 330]

Of each shape a model of random bf16 weights is made, at full width and with few layers, saved and packed into
a folder that is deleted afterwards (6 GB at most). A process runs it plain: a forward pass of one sequence
and one of eight, both with as many tokens as `max_tokens` allows, and greedy generation of as many, half of
the sequences padded. Two more processes run it packed, under the least budget that its plan says, and under
half of what all of it takes. What each takes of the card is looked at from a thread every 5 ms, while nobody
else uses it.

`--device cpu --scale tiny` tries all of that out without a GPU, in seconds, and without a budget.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _budgets import perform
from _machine import arguments, emit, note, table, verdict
from _model import import_everything
from _rows import rows
from _shapes import SHAPES

Row = dict[str, Any]
NAMES = ("tight", "roomy")
COLUMNS = (
    *("shape", "budget", "MiB", "batch", "what", "tokens", "card peak, MiB", "of budget"),
    *("allocated, MiB", "plain, MiB", "planned, MiB", "bits"),
)


def mib(size: float | None) -> str:
    """A cell."""
    return "" if size is None else f"{size / 2**20:.0f}"


def one_shape(options: Any, name: str, found: list[Row], base: Path) -> None:
    """Make a shape and run it; rows are appended to `found` as they come."""
    shape, tiny = SHAPES[name], options.scale == "tiny"
    tokens = shape.tiny_tokens if tiny else shape.max_tokens
    given: Row = {"shape": name, "tiny": tiny, "seed": options.seed, "device": options.device}
    given |= {"dir": str(base), "max_tokens": tokens}
    plain: dict[tuple[str, int], Row] = {}
    budgets: dict[str, int] = {}
    for row in rows(_SCRIPT, "make", given, options.limit, perform):
        if "plain" in row:
            plain[row["plain"]["case"], row["plain"]["batch"]] = row["plain"]
        budgets = row.get("budgets", budgets)
        if "problem" in row:
            found.append({"shape": name, "problem": row["problem"]})
    for budget in NAMES if budgets else ():
        plan: Row = {}
        head = {"shape": name, "budget": budget, "vram": budgets[budget], "tokens": tokens}
        more = {"budget": budgets[budget], "budget_name": budget}
        for row in rows(_SCRIPT, "ours", given | more, options.limit, perform):
            plan = row.get("plan", plan)
            if "problem" in row:
                found.append(head | {"problem": row["problem"]})
            if "ours" in row:
                it = row["ours"]
                before = plain.get((it["case"], it["batch"]), {})
                told = {"plan": plan, "plain_took": before.get("took"), "unsure": before.get("unsure", "")}
                found.append(head | it | told)
                note(f"{name} {budget} {it['case']} {it['batch']}: {it['how']} {it['why']}")


def met(row: Row) -> bool:
    """Whether a row is as it must be."""
    if "problem" in row or row.get("peak", 0) > row["vram"]:
        return False
    return row["how"] == "equal" or (row["how"] == "DIFFERS" and bool(row["unsure"]))


def said(row: Row) -> str:
    """What became of a row."""
    if row["how"] == "DIFFERS" and row["unsure"]:
        return "plain differs from itself"
    return row["how"] if row["how"] != "equal" or met(row) else "equal, ABOVE BUDGET"


def line(row: Row) -> list[str]:
    """A row of the table."""
    if "problem" in row:
        return [row["shape"], row.get("budget", ""), *[""] * (len(COLUMNS) - 3), row["problem"]]
    peak, plan = row.get("peak"), row["plan"]
    planned = plan.get("activations", 0) + plan.get("cache", 0)
    return [
        *(row["shape"], row["budget"], mib(row["vram"]), str(row["batch"]), row["case"], str(row["tokens"])),
        *(mib(peak), "" if peak is None else f"{peak / row['vram']:.3f}"),
        *(mib(row.get("took")), mib(row["plain_took"]), mib(planned)),
        said(row),
    ]


def report(head: str, found: list[Row], left: list[str], took: float) -> str:
    """All of it as Markdown."""
    parts = [head]
    parts.append(
        "Tokens: sequences times length, at most, as `max_tokens` says. Card peak: of the process, beyond "
        "the bare context. Allocated: by PyTorch, in a case, beyond what it had before; plain: the same, of "
        "the plain model; planned: activations and cache. Bits: of logits, of generated tokens and of the "
        f"scores that they were chosen by, beside the plain model's in the same run, which must "
        f"give them three times; where it does not, that is said. {took:.0f} s in all.\n"
    )
    parts.append(table(COLUMNS, [line(row) for row in found]))
    why = [
        f"- {row['shape']}, {row['budget']}, {row['case']}, {row['batch']}: {row['why']}"
        + (f" (plain, of two more runs: {row['unsure']})" if row["unsure"] else "")
        for row in found
        if row.get("why") or row.get("unsure")
    ]
    if why:
        parts.append("\n".join(why) + "\n")
    if left:
        parts.append(f"Left out, since time was up: {', '.join(left)}.\n")
    good = sum(met(row) for row in found)
    parts.append(f"{good} of {len(found)} rows: {verdict(good == len(found) and not left)}\n")
    return "\n".join(parts)


def as_json(found: list[Row], left: list[str], took: float) -> str:
    """All of it for programs."""
    return json.dumps({"rows": found, "left_out": left, "seconds": took}, indent=1)


_SCRIPT = __file__


def main() -> int:
    """Parse the command line, run, print."""
    if sys.argv[1:2] == ["--task"]:
        perform(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--dir", type=Path, help="for the models, by default /dev/shm or the usual place")
    parser.add_argument("--seconds", type=float, default=330, help="start no more shapes after so many")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each process")
    options = parser.parse_args()
    began = time.perf_counter()
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.diffusers
    import tpde.integrations.transformers.streamed  # noqa: F401

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    memory = Path("/dev/shm")
    folder = options.dir or (memory if memory.is_dir() else None)
    found: list[Row] = []
    left: list[str] = []
    about: Row = {"title": "Budgets of eleven shapes", "device": options.device}
    heads = [row["head"] for row in rows(_SCRIPT, "head", about, options.limit, perform) if "head" in row]
    if not heads:
        raise SystemExit("error: no GPU was found; hint: `--device cpu --scale tiny` needs none")

    def text() -> str:
        took = time.perf_counter() - began
        return as_json(found, left, took) if options.json else report(heads[0], found, left, took)

    try:
        for name in options.only:
            if time.perf_counter() - began > options.seconds:
                left.append(name)
                continue
            start = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="tpde-budgets-", dir=folder) as temporary:
                one_shape(options, name, found, Path(temporary))
                shutil.rmtree(Path(temporary) / "packed", ignore_errors=True)
            note(f"{name}: {time.perf_counter() - start:.0f} s")
            if options.out is not None:  # a run that is cut short leaves what it has
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(text(), "utf-8")
    finally:
        emit(text(), options.out)
    return 0 if found and not left and all(map(met, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
