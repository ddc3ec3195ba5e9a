"""Time of `import tpde` and of the command line's help, above that of a bare interpreter.

python benchmarks/startup.py [--out FILE.md]
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time

from _machine import arguments, emit, header, note, table, verdict

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


def timed(command: list[str]) -> float | None:
    """Milliseconds of one interpreter, or None if it fails."""
    start = time.perf_counter()
    null = subprocess.DEVNULL
    done = subprocess.run([sys.executable, *command], check=False, stdout=null, stderr=null)
    took = 1e3 * (time.perf_counter() - start)
    return took if done.returncode == 0 else None


def loaded(statement: str) -> list[str]:
    """Which heavy modules a statement loads."""
    code = f"{statement}\nimport json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    names: list[str] = json.loads(done.stdout)
    return names


def main() -> int:
    """Parse the command line, run, print; 1 if the bar is missed or torch is loaded."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each, after one to warm up")
    options = parser.parse_args()
    head = header("Startup")
    times: dict[str, list[float]] = {name: [] for name in commands()}
    failed = set[str]()
    for run in range(options.runs + 1):
        note(f"run {run} of {options.runs}" if run else "warm-up")
        for name, command in commands().items():
            if "zipnn" in name and run > 5:  # it loads torch, which takes seconds
                continue
            took = timed(command)
            if took is None:
                failed.add(name)
            elif run:
                times[name].append(took)
    base = statistics.median(times[BARE])
    rows, good = [], True
    for name, values in times.items():
        if name in failed or not values:
            rows.append([name, "failed", "", "", "", ""])
            good &= name not in (IMPORT, PACK, HELP)
            continue
        extra = statistics.median(values) - base
        limited = name == IMPORT
        passed = not limited or extra <= BAR_MS
        good &= passed
        span = f"{min(values):.1f}-{max(values):.1f}"
        bar = [str(BAR_MS), verdict(passed)] if limited else ["", ""]
        above = "" if name == BARE else f"{extra:.1f}"
        rows.append([name, f"{statistics.median(values):.1f}", span, above, *bar])
    modules, after = loaded("import tpde"), loaded("import tpde; tpde.pack, tpde.unpack, tpde.verify")
    good &= "torch" not in modules + after
    columns = ["command", "median, ms", "range", "above bare, ms", "bar", ""]
    tail = (
        f"Of {', '.join(f'`{m}`' for m in HEAVY)}, `import tpde` loads {', '.join(modules) or 'none'}; "
        f"using `tpde.pack`, `tpde.unpack` and `tpde.verify` loads {', '.join(after) or 'none'}. "
        f"`torch` is {'not ' if 'torch' not in modules + after else ''}loaded.\n"
    )
    about = f"Medians of {options.runs} alternating runs after a warm-up (`zipnn`: 5), each a new process.\n"
    emit(f"{head}\n{about}\n{table(columns, rows)}\n{tail}", options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
