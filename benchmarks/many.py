"""Each command on files of very many small tensors: time, processor time and peak memory.

    python benchmarks/many.py [--tensors 300000] [--runs 3] [--dir DIR] [--out FILE.md]

Each command runs in a process of its own, as `tpde` on the command line does; what it prints is thrown away.
Counted is all of the process: its start, its imports and its `fsync`. Figures are medians of runs, in which
all commands take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _data import same_bytes
from _machine import arguments, emit, header, note, peak_bytes, table, verdict

BAR_SECONDS = 10
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


def step(command: list[str]) -> None:
    """What the process of one command does; on stderr, last, its processor seconds and peak memory."""
    from tpde.cli import main as tpde

    sys.argv = ["tpde", *command]
    try:
        tpde()
    finally:
        sys.stdout.flush()
        print(json.dumps({"cpu": time.process_time(), "peak": peak_bytes()}), file=sys.stderr)


def run_step(command: list[str]) -> list[float]:
    """Run a command in a process of its own; returns wall seconds, processor seconds and peak MiB."""
    note(" ".join(Path(part).name for part in command))
    arguments = [sys.executable, __file__, "--step", *command]
    start = time.perf_counter()
    done = subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - start
    found = json.loads(done.stderr.strip().split("\n")[-1])
    return [seconds, found["cpu"], found["peak"] / 2**20]


def measure(folder: Path, kind: str, tensors: int, runs: int) -> tuple[list[list[str]], bool]:
    """Write a file, and run each command on it; whether all were in time, and unpacked bytes are the same."""
    plain, packed, back = (str(folder / f"{name}.safetensors") for name in ("plain", "packed", "back"))
    note(f"writing {tensors:,} tensors, {kind}")
    write_file(Path(plain), tensors, *KINDS[kind])
    commands = {
        "pack": ["pack", plain, packed, "--force"],
        "inspect": ["inspect", packed],
        "inspect --json": ["inspect", packed, "--json"],
        "verify": ["verify", packed],
        "verify --against": ["verify", packed, "--against", plain],
        "unpack": ["unpack", packed, back, "--force"],
    }
    found = [{name: run_step(command) for name, command in commands.items()} for _ in range(runs)]
    rows, good = [], True
    for name in commands:
        seconds, cpu, peak = map(statistics.median, zip(*(run[name] for run in found), strict=True))
        passed = seconds <= BAR_SECONDS
        good &= passed
        cells = [f"{seconds:.1f}", f"{cpu:.1f}", f"{peak:.0f}", str(BAR_SECONDS), verdict(passed)]
        rows.append([f"`{name}`", f"{tensors:,}, {kind}", *cells])
    same = same_bytes(Path(plain), Path(back))
    rows[-1].append("same" if same else "DIFFERS")
    for path in (plain, packed, back):
        Path(path).unlink()
    return rows, good and same


def main() -> int:
    """Parse the command line, run, print; 1 if the bar is missed or a byte differs."""
    if sys.argv[1:2] == ["--step"]:
        step(sys.argv[2:])
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=300_000, help="tensors in a file")
    parser.add_argument("--runs", type=int, default=3, help="of each command")
    parser.add_argument("--dir", type=Path, help="folder for the files, which are removed afterwards")
    options = parser.parse_args()
    head, rows, good = header("Very many tensors"), list[list[str]](), True
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        for kind in KINDS:
            more, passed = measure(Path(place), kind, options.tensors, options.runs)
            rows += more
            good &= passed
    rows = [row if len(row) == len(rows[-1]) else [*row, ""] for row in rows]
    columns = ["command", "tensors", "wall, s", "CPU, s", "peak, MiB", "bar, s", "", "unpacked bytes"]
    about = (
        f"bf16 in one file, named as experts are; medians of {options.runs} runs. Wall and processor time "
        "are those of the whole process, peak is the most resident memory it ever had.\n"
    )
    emit(f"{head}\n{about}\n{table(columns, rows)}", options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
