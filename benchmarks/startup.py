"""Time of `import tpde` and of the command line's help, above that of a bare interpreter."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from functools import partial

from benchmarks.harness.report import Page, ms, note
from benchmarks.harness.timing import wall

TITLE = "Startup"
BAR_MS = 60
HEAVY = ("torch", "numpy", "zstandard", "xxhash", "safetensors", "transformers", "rich", "typer")
BARE, IMPORT, PACK, HELP = "bare interpreter", "`import tpde`", "`import tpde; tpde.pack`", "`tpde --help`"


def commands() -> dict[str, list[str]]:
    """What is timed, the package's peers last."""
    found = {
        BARE: ["-c", "pass"],
        IMPORT: ["-c", "import tpde"],
        PACK: ["-c", "import tpde; tpde.pack"],
        HELP: ["-m", "tpde", "--help"],
        "`import numpy`": ["-c", "import numpy"],
    }
    for peer in ("safetensors", "zipnn"):
        if importlib.util.find_spec(peer):
            found[f"`import {peer}`"] = ["-c", f"import {peer}"]
    return found


def start(command: list[str]) -> None:
    """Run an interpreter, with nothing to say."""
    null = subprocess.DEVNULL
    subprocess.run([sys.executable, *command], check=True, stdout=null, stderr=null)


def loaded(statement: str) -> list[str]:
    """Which heavy modules a statement loads."""
    code = f"{statement}\nimport json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    names: list[str] = json.loads(done.stdout)
    return names


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each, after one to warm up")


def run(options: argparse.Namespace, page: Page) -> None:
    """Start all in turns."""
    times: dict[str, list[float]] = {name: [] for name in commands()}
    failed = set[str]()
    for run in range(options.runs + 1):
        note(f"run {run} of {options.runs}" if run else "warm-up")
        for name, command in commands().items():
            if "zipnn" in name and run > 5:  # it loads torch, which takes seconds
                continue
            try:
                took = wall(partial(start, command))
            except subprocess.CalledProcessError:
                failed.add(name)
                continue
            if run:
                times[name].append(took)
    base, rows = statistics.median(times[BARE]), []
    for name, values in times.items():
        if name in failed or not values:
            rows.append([name, "failed", "", "", "", ""])
            page.judge(name not in (IMPORT, PACK, HELP), name)
            continue
        middle = statistics.median(values)
        above = "" if name == BARE else ms(middle - base)
        met = middle - base <= BAR_MS / 1e3
        bar = [str(BAR_MS), page.judge(met, name)] if name == IMPORT else ["", ""]
        rows.append([name, ms(middle), f"{ms(min(values))}-{ms(max(values))}", above, *bar])
    page.say(f"Medians of {options.runs} alternating runs after a warm-up (`zipnn`: 5), each a new process.")
    page.table(["command", "median, ms", "range", "above bare, ms", "bar", ""], rows)
    modules, after = loaded("import tpde"), loaded("import tpde; tpde.pack, tpde.unpack, tpde.verify")
    light = page.judge("torch" not in modules + after, "no torch") == "pass"
    page.say(
        f"Of {', '.join(f'`{m}`' for m in HEAVY)}, `import tpde` loads {', '.join(modules) or 'none'}; "
        f"using `tpde.pack`, `tpde.unpack` and `tpde.verify` loads {', '.join(after) or 'none'}. "
        f"`torch` is {'not ' if light else ''}loaded."
    )
