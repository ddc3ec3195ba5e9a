"""Memory of deltas and checkpoints beyond what the caller holds: make, apply, save and load.

Each step runs in a process of its own that holds its states already; counted is the most memory that is
resident during the step, minus what is resident before it. Needs `/proc`. The bar is one copy of the state,
the largest tensor and 256 MiB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.memory import said
from benchmarks.harness.processes import call
from benchmarks.harness.report import Page, mib, note

TITLE = "Memory of deltas and checkpoints"
SPARE_MIB = 256
TENSORS = (4, 32)
# Words that change: as small and large steps of training change weights, and all as in optimizers' states.
SHARES = (0.005, 0.3, 1.0)
STEPS = ("make", "apply", "save, keyframe", "save", "save in the background", "load, chain of 3")


def states(size: int, tensors: int, share: float, count: int) -> list[dict[str, Any]]:
    """States one step apart: bf16 words, some of which move by a unit in the last place."""
    import numpy as np
    import torch

    words, found = (size << 20) // (2 * tensors), list[dict[str, Any]]()
    for number in range(count):
        state = {}
        for i in range(tensors):
            if number:
                array = found[-1][f"w{i}"].view(torch.int16).numpy().copy()
                draw = np.random.default_rng([number, i])
                for at in range(0, words, 1 << 20):  # in pieces: this is no part of the figure
                    part = array[at : at + (1 << 20)]
                    part += draw.random(part.size, np.float32) < share
            else:
                draw = np.random.default_rng(i)
                array = np.empty(words, np.int16)
                for at in range(0, words, 1 << 20):
                    part = draw.standard_normal(min(1 << 20, words - at), np.float32).view(np.uint32) >> 16
                    array[at : at + part.size] = part.astype(np.uint16).view(np.int16)
            state[f"w{i}"] = torch.from_numpy(array).view(torch.bfloat16)
        found.append(state)
    return found


def action(step: str, folder: Path, size: int, tensors: int, share: float) -> Callable[[], object]:
    """What a step does; its states are made."""
    import tpde

    if step in ("make", "apply"):
        old, new = states(size, tensors, share, 2)
        if step == "make":
            return lambda: tpde.make_delta(old, new)
        delta = tpde.make_delta(old, new)
        new.clear()
        return lambda: tpde.apply_delta(old, delta)
    store = tpde.CheckpointStore(folder / "store")
    if step == "load, chain of 3":
        for number, state in enumerate(states(size, tensors, share, 3)):
            store.save(number, state)
        del state
        return store.load
    old, new = states(size, tensors, share, 2)
    if step == "save, keyframe":
        return lambda: store.save(0, old)
    store.save(0, old)
    old.clear()
    if step == "save":
        return lambda: store.save(1, new)

    def save() -> None:
        store.save(1, new, background=True)
        store.wait()

    return save


def take(step: str, folder: str, size: int, tensors: int, share: float) -> tuple[float, int]:
    """What the process of one step does; returns its seconds, and bytes that were resident beyond before."""
    import gc

    act = action(step, Path(folder), size, tensors, share)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the most starts again at what there is
    before, start = said("VmRSS"), time.perf_counter()
    result = act()
    seconds, used = time.perf_counter() - start, said("VmHWM") - before
    del result
    return seconds, used


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--mib", type=int, default=1024, help="size of each state")
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS, help="that it has")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of words that change")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="what is done")
    parser.add_argument("--dir", type=Path, help="folder for the stores, which are removed afterwards")


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure one step after the other."""
    if not Path("/proc/self/clear_refs").exists():
        note("skipped: needs /proc, of Linux")
        return
    rows = []
    for tensors in options.tensors:
        bar = options.mib + options.mib // tensors + SPARE_MIB
        for share in options.shares:
            for step in options.steps:
                note(f"{step}, {tensors} tensors, {share:.1%} changed")
                with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                    seconds, used = call(take, step, folder, options.mib, tensors, share)
                judged = page.judge(used <= bar << 20, f"{step}, {tensors}, {share:.1%}")
                cells = [mib(used), str(bar), judged, f"{seconds:.1f}"]
                rows.append([step, str(tensors), f"{share:.1%}", *cells])
    page.say(
        f"A state of {options.mib} MiB of bf16. The peak is beyond what the caller holds: of `load` its "
        "result is a part, of `apply` the delta is not."
    )
    page.table(["step", "tensors", "changed", "peak beyond, MiB", "bar", "", "seconds"], rows)
