"""Models larger than a budget of device memory: time per token by budget, beside two limits and peers.

Llamas of random bf16 weights (the 8 B shape by default) are made on the GPU, tensor by tensor, and packed
into `--dir`; nothing is downloaded and no plain copy is written. Needs as much memory as the packed model
takes: 11 GB, or 95 GB for the 70 B shape. Peers are optional: accelerate, diffusers; they need the plain
model in host memory besides.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.data.llama import SHAPES, import_everything
from benchmarks.harness.card import Holder
from benchmarks.harness.processes import rows
from benchmarks.harness.report import Page
from benchmarks.offload.report import draw, plot
from benchmarks.offload.results import Found, Results
from benchmarks.offload.work import perform
from benchmarks.peers.offloading import OFFLOADING

TITLE = "Streaming under a budget"
BUDGETS = (4.0, 2.0, 8.0, 6.0, 12.0, 16.0, 24.0, 3.0)  # what says most comes first
TURNS = 4  # the card's memory is looked at in the first, and first tokens of ours are timed in the others
FIRST_AGAIN = 2  # times at most, where others slowed the processor down meanwhile
SERIAL = 4  # budgets that are run without overlap as well


def tasks(options: Any, given: Found, found: Results) -> Iterator[tuple[str, Found]]:
    """What is to be done, in its order; a run that has to end early has had what says most."""
    plain = "plain" in options.only and options.shape != "llama-70b"  # 141 GB fit on one card only just
    ours = "ours" in options.only
    if plain:
        yield "plain", given
    if ours:
        for number, budget in enumerate(options.budgets):
            yield "predict", given | {"budget": budget}
            yield "ours", given | {"budget": budget, "serial": given["serial"] and number < SERIAL}
        if given["prefill"]:
            yield "prefill", given
    for turn in range(TURNS):  # where all fits, the host decides, and processes differ by 5 % and more
        now = given | {"turn": turn}
        if turn and plain:
            yield "plain", now
        for budget in options.budgets if turn and ours else []:  # elsewhere it decides on first tokens
            fits = found.fits(budget)
            if fits:
                yield "predict", now | {"budget": budget}
            if fits or plain or turn == 1:  # first tokens are compared with the plain model's
                yield "ours", now | {"budget": budget, "first_only": not fits}
        if given["resident"] and ours:
            yield "ours", now | {"budget": None}
    if ours:
        yield "rate", given
    if options.peers:
        for name in OFFLOADING:
            yield "peer", given | {"peer": name}


def measure(options: Any, given: Found, found: Results, began: float, page: Page) -> None:
    """All processes, one after the other."""
    environment = {"TPDE_HOST_MEMORY": "arena"} if options.host == "arena" else {}

    def go(task: str, more: Found) -> None:
        for row in rows(perform, task, more, options.limit, environment):
            found.take(row)
            if found.made:
                draw(options, found, page)
                page.save()

    go("start", given)
    for task, more in tasks(options, given, found):
        took = time.perf_counter() - began
        if not found.made or (options.seconds and took > options.seconds):
            found.take({"problem": f"after {took:.0f} s the rest was left out, from `{task}` on"})
            return
        go(task, more | {"measured": found.measured})
        for _ in range(FIRST_AGAIN):
            if not found.slow(task, more):
                break
            found.again += 1
            go(task, more | {"first_only": True})


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument(
        "--budgets",
        type=lambda it: [float(b) for b in it.split(",")],
        default=list(BUDGETS),
        metavar="GIB,GIB",
    )
    parser.add_argument("--tokens", type=int, default=12, help="timed tokens")
    parser.add_argument("--only", nargs="+", choices=["plain", "ours"], default=["plain", "ours"])
    parser.add_argument("--peers", action="store_true", help="accelerate and diffusers too")
    parser.add_argument("--host", choices=["mapped", "arena"], default="mapped")
    parser.add_argument("--hold", action="store_true", help="a second process holds the rest of the card")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--no-serial", action="store_true", help="not without overlap")
    parser.add_argument("--no-resident", action="store_true", help="not all packed in device memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keeps the packed model, and uses one that is there")
    parser.add_argument("--seconds", type=float, help="start no more rows after so many")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each process")
    parser.add_argument("--plot", type=Path, help="also write a plot to this file")


def run(options: argparse.Namespace, page: Page) -> None:
    """Run all processes; the page grows with each row."""
    began, found = time.perf_counter(), Results()
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.transformers.streamed  # noqa: F401

    with (
        tempfile.TemporaryDirectory(prefix="tpde-offload-") as temporary,
        Holder() if options.hold else nullcontext() as holder,
    ):
        layers = options.layers or SHAPES[options.shape][2]
        base = (options.dir or Path(temporary)) / f"{options.shape}-{layers}-{options.seed}"
        base.mkdir(parents=True, exist_ok=True)
        given = {
            "shape": options.shape,
            "layers": layers,
            "seed": options.seed,
            "tokens": options.tokens,
            "dir": str(base),
            "packed": str(base / "packed"),
            "budgets": options.budgets if "ours" in options.only else [],
            "holder": holder.ends if holder is not None else None,
            "turn": 0,
            "measured": [],
            "first_only": False,
            "prefill": not options.no_prefill and options.shape == "llama-8b",
            "serial": not options.no_serial,
            "resident": not options.no_resident and options.shape != "llama-70b",
        }
        measure(options, given, found, began, page)
    if not found.made:
        raise SystemExit(f"error: the model could not be made: {found.problems}")
    draw(options, found, page)
    if found.ours:
        page.plot(options.plot, lambda pyplot: plot(found, pyplot))
