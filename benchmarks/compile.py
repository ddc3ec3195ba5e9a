"""Time until the kernels of a bf16 model are ready: compiled at first use, and from the cache on disk.

Every run is a new process with a context already made; peers need no kernels of this kind.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

from benchmarks.harness.processes import call
from benchmarks.harness.report import Page, ms, note

TITLE, NEEDS_GPU = "Compiling kernels", True
BARS = {"first": 3.0, "cached": 0.05}  # s
# bf16: one plane is coded, in pairs
DEFINES = {"WORD": 2, "ROTATE": 1, "CODED": 2, "PAIRS": 2, "SHORT": 0}
WINDOW = 8  # what weights of any size get on cards with 228 KiB of shared memory
CASES = {"import": "importing CUDA's bindings", "first": "kernels, first use", "cached": "kernels, cached"}


def prepare() -> tuple[float, float]:
    """Give the seconds of the import and of the kernels, in a process of its own."""
    import torch

    torch.zeros(1, device="cuda")
    from tpde.cuda.backend import current
    from tpde.cuda.decode import SOURCE
    from tpde.cuda.geometry import max_warps

    start = time.perf_counter()
    import cuda.core  # noqa: F401

    current().facts(0)
    ready = time.perf_counter()
    for check in (False, True):
        for name in ("decode_items", "decode_rows"):
            threads = 32 * max_warps(DEFINES, check)
            defines = {**DEFINES, "WINDOW": WINDOW, "PIECE": 0, "CHECK": int(check), "THREADS": threads}
            current().kernel(SOURCE, name, defines, 0)
    return ready - start, time.perf_counter() - ready


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each, after one to warm up")


def run(options: argparse.Namespace, page: Page) -> None:
    """Compile, and take from the cache, in turns."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for run in range(options.runs + 1):
        note(f"run {run} of {options.runs}" if run else "warm-up")
        with tempfile.TemporaryDirectory(prefix="tpde-compile-") as cache:
            environment = {"TPDE_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"}
            _, first = call(prepare, environment=environment)
            imported, cached = call(prepare, environment=environment)
        if run:
            for case, value in zip(CASES, (imported, first, cached), strict=True):
                times[case].append(value)
    rows = []
    for case, values in times.items():
        found, bar = statistics.median(values), BARS.get(case)
        span = f"{ms(min(values), 0)}-{ms(max(values), 0)}"
        ends = ["", ""] if bar is None else [ms(bar, 0), page.judge(found < bar, CASES[case])]
        rows.append([CASES[case], ms(found, 0), span, *ends])
    page.say(
        "All four kernels of a bf16 model (blocks and rows, with checksums and without). Medians of "
        f"{options.runs} runs after one to warm up, each a new process whose context is made; the "
        "driver's own cache is off."
    )
    page.table(["what", "median, ms", "range", "below", ""], rows)
