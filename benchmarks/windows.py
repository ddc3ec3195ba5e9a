"""The window layout on the CPU: bits a weight, and encoding, decoding, checking and cutting.

    python benchmarks/windows.py [--mib 256] [--runs 7] [--out FILE.md]

Weights are `0.02 * normal`, rows scaled by `exp(0.3 * normal)`, in bf16. Speeds are medians of alternating
runs into buffers whose pages are there, in 10^9 bytes of weights a second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
from _machine import arguments, emit, header, note, table

from tpde.codec import window_cut, window_plan, windows
from tpde.codec.windows import Words

BARS = {4096: 11.25, 384: 11.28}  # bits a weight
ENCODE, DECODE = 0.5, 1.0  # GB/s, one thread
WORK = ("plan", "plan and encode", "decode", "validate", "half cut out", "copy")


def weights(rows: int, columns: int) -> Words:
    """Words of a matrix."""
    draw = np.random.default_rng(columns)
    made = np.empty((rows, columns), np.uint16)
    for at in range(0, rows, 1024):
        part = made[at : at + 1024]
        scale = 0.02 * np.exp(0.3 * draw.standard_normal((len(part), 1), np.float32))
        values = draw.standard_normal(part.shape, np.float32) * scale
        part[:] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return made


def seconds(ways: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """The median of each, after a run to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(them[1:]) for name, them in taken.items()}


def main() -> int:
    """Measure, and compare with the bars."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of weights")
    parser.add_argument("--runs", type=int, default=7)
    chosen = parser.parse_args()
    missed, sizes, speeds = [], [], []
    for columns, bar in BARS.items():
        note(f"{columns} columns")
        words = weights((chosen.mib << 19) // columns, columns)
        plan = window_plan.WindowPlan(words)
        blob, out, copy = plan.encode(), np.empty_like(words), np.empty_like(words)
        bits = 8 * plan.nbytes / words.size
        share = f"{100 * plan.entries / words.size:.2f} %"
        sizes.append([f"{columns}", f"{len(words)}", share, f"{bits:.3f}"])
        half = columns // 128 * 64
        for threads in (1, 2):
            taken = seconds(
                {
                    "plan": lambda w=words, t=threads: window_plan.WindowPlan(w, t),
                    "encode": lambda p=plan, b=blob, t=threads: p.encode(b, t),
                    "decode": lambda b=blob, o=out, t=threads: windows.decode(b, out=o, threads=t),
                    "validate": lambda b=blob, t=threads: windows.validate(b, t),
                    "cut": lambda b=blob, h=half, t=threads: window_cut.cut_columns(b, 0, h, t),
                    "copy": lambda w=words, c=copy: np.copyto(c, w),
                },
                chosen.runs,
            )
            rate = {name: words.nbytes / taken[name] / 1e9 for name in taken}
            both = words.nbytes / (taken["plan"] + taken["encode"]) / 1e9
            shown = [rate["plan"], both, rate["decode"], rate["validate"], rate["cut"], rate["copy"]]
            speeds.append([f"{columns}", f"{threads}", *(f"{it:.2f}" for it in shown)])
            if threads == 1:
                missed += [f"{columns} columns: encode"] * (both < ENCODE)
                missed += [f"{columns} columns: decode"] * (rate["decode"] < DECODE)
        missed += [f"{columns} columns: bits"] * (bits > bar)
        missed += [f"{columns} columns: words"] * (not np.array_equal(out, words))
    lines = [
        header("Windows"),
        table(["columns", "rows", "entries", "bits a weight"], sizes),
        table(["columns", "threads", *WORK], speeds),
    ]
    emit("\n".join(lines), chosen.out)
    for it in missed:
        note(f"missed: {it}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
