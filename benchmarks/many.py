"""Each command on files of very many small tensors: time, processor time and peak memory.

Each command runs in a process of its own, as `tpde` on the command line does; what it prints is thrown away.
Counted is all of the process: its start, its imports and its `fsync`. Figures are medians of runs, in which
all commands take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.data.files import same_bytes
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.processes import call
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import Laps

TITLE = "Very many tensors"
BAR_SECONDS = 10
BARS = {"diff": 20, "patch": 20}  # which read two states; others `BAR_SECONDS`
CHANGED = 0.1  # of the words
KINDS = {"empty": (0, 0), "16 to 256 bytes": (8, 128)}  # least and most words
PER_BLOCK = 1000  # tensors in a block of the model


def write_file(path: Path, tensors: int, least: int, most: int) -> None:
    """Write bf16 vectors of `least` to `most` words, named as the experts of a model are."""
    rng = np.random.default_rng(0)
    ends = 2 * np.cumsum(rng.integers(least, most + 1, tensors))
    entries, begin = [], 0
    for i, end in enumerate(ends.tolist()):
        block, expert = divmod(i, PER_BLOCK)
        info = {"dtype": "BF16", "shape": [(end - begin) // 2], "data_offsets": [begin, end]}
        name = f"model.layers.{block}.mlp.experts.{expert}.up_proj.bias"
        entries.append(f"{json.dumps(name)}:{json.dumps(info)}")
        begin = end
    head = ("{" + ",".join(entries) + "}").encode()
    words = rng.standard_normal(begin // 2, np.float32).view(np.uint32) >> 16
    path.write_bytes(len(head).to_bytes(8, "little") + head + words.astype(np.uint16).tobytes())


def change_file(path: Path, to: Path) -> None:
    """Write a file again with the last bit of some words turned."""
    whole = np.fromfile(path, np.uint8)
    at = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    words = whole[at:].view("<u2")
    words ^= np.random.default_rng(1).random(words.size) < CHANGED
    whole.tofile(to)


def step(*command: str) -> tuple[float, int]:
    """What the process of one command does; returns its processor seconds and peak memory."""
    from tpde.cli import main as tpde

    sys.argv = ["tpde", *command]
    try:
        tpde()
    except SystemExit as ended:
        if ended.code:
            raise
    sys.stdout.flush()
    return time.process_time(), peak_bytes()


def measure(folder: Path, kind: str, tensors: int, runs: int, page: Page) -> list[list[str]]:
    """Write a file, and run each command on it; unpacked bytes must be the same, and patched ones."""
    names = "plain", "packed", "back", "changed", "patched"
    plain, packed, back, changed, patched = files = [str(folder / f"{it}.safetensors") for it in names]
    delta = str(folder / "changes.tpde")
    note(f"writing {tensors:,} tensors, {kind}")
    write_file(Path(plain), tensors, *KINDS[kind])
    change_file(Path(plain), Path(changed))
    commands = {
        "pack": ["pack", plain, packed, "--force"],
        "inspect": ["inspect", packed],
        "inspect --json": ["inspect", packed, "--json"],
        "verify": ["verify", packed],
        "verify --against": ["verify", packed, "--against", plain],
        "unpack": ["unpack", packed, back, "--force"],
        "diff": ["diff", plain, changed, delta, "--force"],
        "patch": ["patch", plain, delta, patched, "--force"],
    }
    laps, found = Laps(), dict[str, list[list[float]]]()
    for _ in range(runs):
        for name, command in commands.items():
            note(" ".join(Path(part).name for part in command))
            found.setdefault(name, []).append(laps(name, partial(call, step, *command)))
    restored = {
        "unpack": same_bytes(Path(plain), Path(back)),
        "patch": same_bytes(Path(changed), Path(patched)),
    }
    rows = []
    for name, same in restored.items():
        page.judge(same, f"bytes of {name}, {kind}")
    for name, them in found.items():
        seconds, (cpu, peak) = laps.median(name, 0), map(statistics.median, zip(*them, strict=True))
        bar = BARS.get(name, BAR_SECONDS)
        judged = page.judge(seconds <= bar, f"{name}, {kind}")
        cells = [f"{seconds:.1f}", f"{cpu:.1f}", f"{peak / 2**20:.0f}", str(bar), judged]
        said = "" if name not in restored else "same" if restored[name] else "DIFFERS"
        rows.append([f"`{name}`", f"{tensors:,}, {kind}", *cells, said])
    for path in (*files, delta):
        Path(path).unlink()
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--tensors", type=int, default=300_000, help="tensors in a file")
    parser.add_argument("--runs", type=int, default=3, help="of each command")
    parser.add_argument("--dir", type=Path, help="folder for the files, which are removed afterwards")


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure one kind of file after the other."""
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        every = [measure(Path(place), kind, options.tensors, options.runs, page) for kind in KINDS]
    page.say(
        f"bf16 in one file, named as experts are; medians of {options.runs} runs. Wall and processor time "
        "are those of the whole process, peak is the most resident memory it ever had."
    )
    columns = ["command", "tensors", "wall, s", "CPU, s", "peak, MiB", "bar, s", "", "restored bytes"]
    page.table(columns, [row for rows in every for row in rows])
