"""The window layout on the CPU: bits a weight, and encoding, decoding, checking and cutting.

Weights are `0.02 * normal`, rows scaled by `exp(0.3 * normal)`, in bf16. Speeds are medians of alternating
runs into buffers whose pages are there, in 10^9 bytes of weights a second.
"""

from __future__ import annotations

import argparse
from functools import partial

import ml_dtypes
import numpy as np

from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import Work, alternate, medians
from tpde.codec import window_cut, window_plan, windows
from tpde.codec.windows import Words

TITLE = "Windows"
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


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--mib", type=int, default=256, help="of weights")
    parser.add_argument("--runs", type=int, default=7)


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure, and compare with the bars."""
    sizes, speeds = [], []
    for columns, bar in BARS.items():
        note(f"{columns} columns")
        words = weights((options.mib << 19) // columns, columns)
        plan = window_plan.WindowPlan(words)
        blob, out, copy = plan.encode(), np.empty_like(words), np.empty_like(words)
        bits = 8 * plan.nbytes / words.size
        share = f"{100 * plan.entries / words.size:.2f} %"
        sizes.append([f"{columns}", f"{len(words)}", share, f"{bits:.3f}"])
        half = columns // 128 * 64
        for threads in (1, 2):
            ways: dict[str, Work] = {
                "plan": partial(window_plan.WindowPlan, words, threads),
                "encode": partial(plan.encode, blob, threads),
                "decode": partial(windows.decode, blob, out=out, threads=threads),
                "validate": partial(windows.validate, blob, threads),
                "cut": partial(window_cut.cut_columns, blob, 0, half, threads),
                "copy": partial(np.copyto, copy, words),
            }
            taken = medians(alternate(ways, options.runs))
            rate = {name: words.nbytes / taken[name] / 1e9 for name in taken}
            both = words.nbytes / (taken["plan"] + taken["encode"]) / 1e9
            shown = [rate["plan"], both, rate["decode"], rate["validate"], rate["cut"], rate["copy"]]
            speeds.append([f"{columns}", f"{threads}", *(f"{it:.2f}" for it in shown)])
            if threads == 1:
                page.judge(both >= ENCODE, f"{columns} columns: encode")
                page.judge(rate["decode"] >= DECODE, f"{columns} columns: decode")
        page.judge(bits <= bar, f"{columns} columns: bits")
        page.judge(np.array_equal(out, words), f"{columns} columns: words")
    page.table(["columns", "rows", "entries", "bits a weight"], sizes)
    page.table(["columns", "threads", *WORK], speeds)
