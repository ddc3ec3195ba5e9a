"""Memory of deltas and checkpoints beyond what the caller holds: make, apply, save and load.

    python benchmarks/memory_store.py [--mib 1024] [--dir DIR] [--out FILE.md]

Each step runs in a process of its own that holds its states already; counted is the most memory that is
resident during the step, minus what is resident before it. Needs `/proc`. The bar is one copy of the state,
the largest tensor and 256 MiB.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import arguments, emit, header, note, table, verdict

SPARE_MIB = 256
TENSORS = (4, 32)
# Words that change: as small and large steps of training change weights, and all as in optimizers' states.
SHARES = (0.005, 0.3, 1.0)
STEPS = ("make", "apply", "save, keyframe", "save", "save in the background", "load, chain of 3")


def resident(which: str) -> int:
    """What the system says of this process: `VmRSS`, or `VmHWM`, the most since it was reset."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def states(mib: int, tensors: int, share: float, count: int) -> list[dict[str, Any]]:
    """States one step apart: bf16 words, some of which move by a unit in the last place."""
    import numpy as np
    import torch

    words, found = (mib << 20) // (2 * tensors), list[dict[str, Any]]()
    for number in range(count):
        state = {}
        for i in range(tensors):
            if number:
                array = found[-1][f"w{i}"].view(torch.int16).numpy().copy()
                draw = np.random.default_rng([number, i])
                for at in range(
                    0, words, 1 << 20
                ):  # in pieces: what is computed here is no part of the figure
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


def action(step: str, folder: Path, mib: int, tensors: int, share: float) -> Callable[[], object]:
    """What a step does; its states are made."""
    import tpde

    if step in ("make", "apply"):
        old, new = states(mib, tensors, share, 2)
        if step == "make":
            return lambda: tpde.make_delta(old, new)
        delta = tpde.make_delta(old, new)
        new.clear()
        return lambda: tpde.apply_delta(old, delta)
    store = tpde.CheckpointStore(folder / "store")
    if step == "load, chain of 3":
        for number, state in enumerate(states(mib, tensors, share, 3)):
            store.save(number, state)
        del state
        return store.load
    old, new = states(mib, tensors, share, 2)
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


def run_step(step: str, folder: Path, mib: int, tensors: int, share: float) -> None:
    """What the process of one step does; prints what it took as JSON."""
    import gc

    act = action(step, folder, mib, tensors, share)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the most starts again at what there is
    before, start = resident("VmRSS"), time.perf_counter()
    result = act()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "used": resident("VmHWM") - before}))
    del result


def main() -> int:
    """Parse the command line, run, print; 1 if a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of each state")
    parser.add_argument("--dir", type=Path, help="folder for the stores, which are removed afterwards")
    parser.add_argument("--step", nargs=4, help="what the process of one step does, for this script itself")
    options = parser.parse_args()
    if options.step:
        step, folder, tensors, share = options.step
        run_step(step, Path(folder), options.mib, int(tensors), float(share))
        return 0
    if not Path("/proc/self/clear_refs").exists():
        print("skipped: needs /proc, of Linux", file=sys.stderr)
        return 0
    head, rows, good = header("Memory of deltas and checkpoints"), list[list[str]](), True
    for tensors in TENSORS:
        bar = options.mib + options.mib // tensors + SPARE_MIB
        for share in SHARES:
            for step in STEPS:
                note(f"{step}, {tensors} tensors, {share:.1%} changed")
                with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                    command = [sys.executable, __file__, "--mib", str(options.mib), "--step", step, folder]
                    done = subprocess.run(
                        [*command, str(tensors), str(share)], check=True, stdout=subprocess.PIPE
                    )
                found = json.loads(done.stdout)
                used = found["used"] / 2**20
                good &= used <= bar
                cells = [f"{used:.0f}", str(bar), verdict(used <= bar), f"{found['seconds']:.1f}"]
                rows.append([step, str(tensors), f"{share:.1%}", *cells])
    columns = ["step", "tensors", "changed", "peak beyond, MiB", "bar", "", "seconds"]
    about = (
        f"A state of {options.mib} MiB of bf16. The peak is beyond what the caller holds: of `load` its "
        "result is a part, of `apply` the delta is not.\n"
    )
    emit(f"{head}\n{about}\n{table(columns, rows)}", options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
