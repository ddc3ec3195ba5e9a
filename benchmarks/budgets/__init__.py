"""Eleven shapes of models, each at two budgets, in batches of 1 and 8: memory, bits, and what is refused.

Of each shape a model of random bf16 weights is made, at full width and with few layers, saved and packed into
a folder that is deleted afterwards (6 GB at most). A process runs it plain: a forward pass of one sequence
and one of eight, both with as many tokens as `max_tokens` allows, and greedy generation of as many, half of
the sequences padded. Two more processes run it packed, under the least budget that its plan says, and under
half of what all of it takes. What each takes of the card is looked at from a thread every 5 ms, while nobody
else uses it.

`--device cpu --scale tiny` tries all of that out without a GPU, in seconds, and without a budget.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.budgets.work import perform
from benchmarks.data.llama import import_everything
from benchmarks.data.shapes import SHAPES
from benchmarks.harness.processes import rows, told
from benchmarks.harness.report import Page, mib, note

TITLE = "Budgets of eleven shapes"
Row = dict[str, Any]
NAMES = ("tight", "roomy")
COLUMNS = (
    *("shape", "budget", "MiB", "batch", "what", "tokens", "card peak, MiB", "of budget"),
    *("allocated, MiB", "plain, MiB", "planned, MiB", "bits"),
)


def one_shape(options: Any, name: str, found: list[Row], base: Path) -> None:
    """Make a shape and run it; rows are appended to `found` as they come."""
    shape, tiny = SHAPES[name], options.scale == "tiny"
    tokens = shape.tiny_tokens if tiny else shape.max_tokens
    given: Row = {"shape": name, "tiny": tiny, "seed": options.seed, "device": options.device}
    given |= {"dir": str(base), "max_tokens": tokens}
    plain: dict[tuple[str, int], Row] = {}
    budgets: dict[str, int] = {}
    for row in rows(perform, "make", given, options.limit):
        if "plain" in row:
            plain[row["plain"]["case"], row["plain"]["batch"]] = row["plain"]
        budgets = row.get("budgets", budgets)
        if "problem" in row:
            found.append({"shape": name, "problem": row["problem"]})
    for budget in NAMES if budgets else ():
        plan: Row = {}
        head = {"shape": name, "budget": budget, "vram": budgets[budget], "tokens": tokens}
        more = {"budget": budgets[budget], "budget_name": budget}
        for row in rows(perform, "ours", given | more, options.limit):
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


def draw(page: Page, found: list[Row], left: list[str], took: float) -> None:
    """All of it so far."""
    page.clear()
    page.data = {"rows": found, "left_out": left, "seconds": took}
    page.say(
        "Tokens: sequences times length, at most, as `max_tokens` says. Card peak: of the process, beyond "
        "the bare context. Allocated: by PyTorch, in a case, beyond what it had before; plain: the same, of "
        "the plain model; planned: activations and cache. Bits: of logits, of generated tokens and of the "
        f"scores that they were chosen by, beside the plain model's in the same run, which must "
        f"give them three times; where it does not, that is said. {took:.0f} s in all."
    )
    page.table(COLUMNS, [line(row) for row in found])
    why = [
        f"- {row['shape']}, {row['budget']}, {row['case']}, {row['batch']}: {row['why']}"
        + (f" (plain, of two more runs: {row['unsure']})" if row["unsure"] else "")
        for row in found
        if row.get("why") or row.get("unsure")
    ]
    if why:
        page.say("\n".join(why))
    if left:
        page.say(f"Left out, since time was up: {', '.join(left)}.")
    good = sum(met(row) for row in found)
    verdict = page.judge(bool(found) and good == len(found) and not left, "rows")
    page.say(f"{good} of {len(found)} rows: {verdict}")


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="for the models, by default /dev/shm or the usual place")
    parser.add_argument("--seconds", type=float, default=330, help="start no more shapes after so many")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each process")


def run(options: argparse.Namespace, page: Page) -> None:
    """Run one shape after the other; the page grows with each."""
    began = time.perf_counter()
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.diffusers
    import tpde.integrations.transformers.streamed  # noqa: F401

    memory = Path("/dev/shm")
    folder = options.dir or (memory if memory.is_dir() else None)
    found: list[Row] = []
    left: list[str] = []
    gpu = told(list(rows(perform, "head", {"device": options.device}, options.limit)), "gpu")
    if gpu is None:
        raise SystemExit("error: no GPU was found; hint: `--device cpu --scale tiny` needs none")
    page.facts["GPU"] = gpu
    for name in options.only:
        if time.perf_counter() - began > options.seconds:
            left.append(name)
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="tpde-budgets-", dir=folder) as temporary:
            one_shape(options, name, found, Path(temporary))
            shutil.rmtree(Path(temporary) / "packed", ignore_errors=True)
        note(f"{name}: {time.perf_counter() - start:.0f} s")
        draw(page, found, left, time.perf_counter() - began)
        page.save()
    draw(page, found, left, time.perf_counter() - began)
