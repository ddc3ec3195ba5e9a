"""Peak memory of packing and unpacking files larger than memory should need, one tensor and many.

    python benchmarks/memory.py [--gib 8] [--dir DIR] [--out FILE.md]

Needs about three times `--gib` of disk. Each step runs in a process of its own; counted is the most
memory that it ever held (`VmHWM`), minus that of an interpreter that has only started.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _data import same_bytes, write_bf16_file
from _machine import arguments, emit, header, note, peak_bytes, table, verdict

BAR_MIB = 512
COLUMNS = 4096


def step(action: str, source: str, destination: str, threads: int | None) -> None:
    """What the process of one step does; prints what it took as JSON."""
    import tpde

    start = time.perf_counter()
    if action == "pack":
        tpde.pack(source, destination, threads=threads)
    else:
        tpde.unpack(source, destination, threads=threads)
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak_bytes()}))


def run_step(action: str, source: Path, destination: Path, threads: int | None) -> tuple[float, int]:
    """Run a step in a process of its own; returns its seconds and its peak memory."""
    note(f"{action} {source.name}")
    command = [sys.executable, __file__, "--step", action, str(source), str(destination)]
    command += ["--threads", str(threads)] if threads else []
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result["seconds"], result["peak"]


def interpreter_bytes() -> int:
    """Peak memory of an interpreter that has only started."""
    code = "import sys; sys.stdout.write(open('/proc/self/status').read())"
    if not Path("/proc/self/status").exists():
        code = "import resource; print('VmHWM:', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    text = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:"))


def measure(
    folder: Path, gib: float, tensors: int, threads: int | None, base: int
) -> tuple[list[list[str]], bool]:
    """Generate a file, pack it, unpack it, compare."""
    rows_each = int(gib * 2**30) // (2 * COLUMNS * tensors)
    plain, packed, back = (folder / f"{name}.safetensors" for name in ("plain", "packed", "back"))
    name = f"{gib:g} GiB in {tensors} tensor{'s' if tensors > 1 else ''}"
    note(f"writing {name}")
    nbytes = write_bf16_file(plain, (rows_each, COLUMNS), tensors)
    rows, good = [], True
    for action, source, destination in (("pack", plain, packed), ("unpack", packed, back)):
        seconds, peak = run_step(action, source, destination, threads)
        used = (peak - base) / 2**20
        good &= used <= BAR_MIB
        cells = [f"{used:.0f}", str(BAR_MIB), verdict(used <= BAR_MIB)]
        rows.append([f"{action} {name}", *cells, f"{seconds:.1f}", f"{nbytes / seconds / 1e9:.3f}"])
    same = same_bytes(plain, back)
    good &= same
    ratio = plain.stat().st_size / packed.stat().st_size
    for row in rows:
        row += [f"{ratio:.4f}", "same" if same else "DIFFERS"]
    for path in (plain, packed, back):
        path.unlink()
    return rows, good


def main() -> int:
    """Parse the command line, run, print; 1 if the bar is missed or a byte differs."""
    parser = arguments(__doc__)
    parser.add_argument("--gib", type=float, default=8, help="size of each file (default 8)")
    parser.add_argument("--dir", type=Path, help="folder for the files, which are removed afterwards")
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 32], help="tensors in a file")
    parser.add_argument("--threads", type=int, help="by default one for each processor")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        action, source, destination = options.step
        step(action, source, destination, options.threads)
        return 0
    head, base = header("Memory of packing and unpacking"), interpreter_bytes()
    rows: list[list[str]] = []
    good = True
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        for tensors in options.tensors:
            more, passed = measure(Path(place), options.gib, tensors, options.threads, base)
            rows += more
            good &= passed
    columns = ["step", "peak, MiB", "bar", "", "seconds", "GB/s of the original", "ratio", "unpacked bytes"]
    about = (
        "bf16, normal, generated piece by piece. Peak: the most resident memory of the step's process, minus "
        f"the {base / 2**20:.0f} MiB of an interpreter that has only started. Times are those of files, "
        "`fsync` included, and depend on the disk.\n"
    )
    emit(f"{head}\n{about}\n{table(columns, rows)}", options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
