"""Time until the kernels of a bf16 model are ready: compiled at first use, and from the cache on disk.

    python benchmarks/compile.py [--out FILE.md]

Every run is a new process with a context already made; peers need no kernels of this kind.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from _gpu import need_cuda
from _machine import arguments, emit, header, note, table, verdict

FIRST_BAR, CACHED_BAR = 3.0, 0.05
DEFINES = {"WORD": 2, "ROTATE": 1, "CODED": 2, "PAIRS": 2}  # bf16: one plane is coded, in pairs
WINDOW = 8  # what weights of any size get on cards with 228 KiB of shared memory
CASES = {"import": "importing CUDA's bindings", "first": "kernels, first use", "cached": "kernels, cached"}


def prepare() -> None:
    """In a process of its own: print the seconds of the import and of the kernels."""
    import torch

    torch.zeros(1, device="cuda")
    from tpde.cuda import compile as nvrtc
    from tpde.cuda.decode import SOURCE
    from tpde.cuda.geometry import max_warps

    start = time.perf_counter()
    import cuda.core  # noqa: F401

    from tpde.cuda.capability import facts

    facts(0)
    ready = time.perf_counter()
    for check in (False, True):
        for name in ("decode_items", "decode_rows"):
            threads = 32 * max_warps(DEFINES["WORD"], check)
            defines = {**DEFINES, "WINDOW": WINDOW, "PIECE": 0, "CHECK": int(check), "THREADS": threads}
            nvrtc.kernel(SOURCE, name, defines, 0)
    print(ready - start, time.perf_counter() - ready)


def fresh(cache: str) -> tuple[float, float]:
    """Seconds of the import and of the kernels in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--prepare"],
        env={**os.environ, "TPDE_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    imported, kernels = map(float, done.stdout.split())
    return imported, kernels


def main() -> int:
    """Parse the command line, run, print; 1 if a bar is missed."""
    if sys.argv[1:] == ["--prepare"]:
        prepare()
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each, after one to warm up")
    options = parser.parse_args()
    need_cuda()
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for run in range(options.runs + 1):
        note(f"run {run} of {options.runs}" if run else "warm-up")
        with tempfile.TemporaryDirectory(prefix="tpde-compile-") as cache:
            _, first = fresh(cache)
            imported, cached = fresh(cache)
        if run:
            for case, value in zip(CASES, (imported, first, cached), strict=True):
                times[case].append(value)
    limits = {"first": FIRST_BAR, "cached": CACHED_BAR}
    rows, met = [], True
    for case, values in times.items():
        found, bar = statistics.median(values), limits.get(case)
        good = bar is None or found < bar
        met &= good
        span = f"{min(values) * 1e3:.0f}-{max(values) * 1e3:.0f}"
        ends = ["", ""] if bar is None else [f"{bar * 1e3:.0f}", verdict(good)]
        rows.append([CASES[case], f"{found * 1e3:.0f}", span, *ends])
    about = (
        "All four kernels of a bf16 model (blocks and rows, with checksums and without). Medians of "
        f"{options.runs} runs after one to warm up, each a new process whose context is made; the "
        "driver's own cache is off.\n"
    )
    columns = ["what", "median, ms", "range", "below", ""]
    emit(f"{header('Compiling kernels', gpu=True)}\n{about}\n{table(columns, rows)}", options.out)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
