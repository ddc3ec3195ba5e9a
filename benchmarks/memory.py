"""Peak memory of packing and unpacking files larger than memory should need, one tensor and many.

Needs about three times `--gib` of disk. Each step runs in a process of its own; counted is the most
memory that it ever held (`VmHWM`), minus that of an interpreter that has only started.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.data.files import same_bytes, write_bf16_file
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.processes import call
from benchmarks.harness.report import Page, mib, note

TITLE = "Memory of packing and unpacking"
BAR_MIB = 512
COLUMNS = 4096


def step(action: str, source: str, destination: str, threads: int | None) -> tuple[float, int]:
    """What the process of one step does; returns its seconds and its peak memory."""
    import tpde

    start = time.perf_counter()
    getattr(tpde, action)(source, destination, threads=threads)
    return time.perf_counter() - start, peak_bytes()


def interpreter_bytes() -> int:
    """Peak memory of an interpreter that has only started."""
    code = "import sys; sys.stdout.write(open('/proc/self/status').read())"
    if not Path("/proc/self/status").exists():
        code = "import resource; print('VmHWM:', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    text = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:"))


def measure(
    folder: Path, tensors: int, base: int, options: argparse.Namespace, page: Page
) -> list[list[str]]:
    """Generate a file, pack it, unpack it, compare."""
    gib = options.gib
    rows_each = int(gib * 2**30) // (2 * COLUMNS * tensors)
    plain, packed, back = (folder / f"{name}.safetensors" for name in ("plain", "packed", "back"))
    name = f"{gib:g} GiB in {tensors} tensor{'s' if tensors > 1 else ''}"
    note(f"writing {name}")
    nbytes = write_bf16_file(plain, (rows_each, COLUMNS), tensors)
    rows = []
    for action, source, destination in (("pack", plain, packed), ("unpack", packed, back)):
        note(f"{action} {source.name}")
        seconds, peak = call(step, action, str(source), str(destination), options.threads)
        judged = page.judge(peak - base <= BAR_MIB << 20, f"{action} {name}")
        cells = [mib(peak - base), str(BAR_MIB), judged]
        rows.append([f"{action} {name}", *cells, f"{seconds:.1f}", f"{nbytes / seconds / 1e9:.3f}"])
    same = same_bytes(plain, back)
    page.judge(same, f"unpacked bytes, {name}")
    ratio = plain.stat().st_size / packed.stat().st_size
    for path in (plain, packed, back):
        path.unlink()
    return [[*row, f"{ratio:.4f}", "same" if same else "DIFFERS"] for row in rows]


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--gib", type=float, default=8, help="size of each file (default 8)")
    parser.add_argument("--dir", type=Path, help="folder for the files, which are removed afterwards")
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 32], help="tensors in a file")
    parser.add_argument("--threads", type=int, help="by default one for each processor")


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure one file after the other."""
    base = interpreter_bytes()
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        every = [measure(Path(place), tensors, base, options, page) for tensors in options.tensors]
    page.say(
        "bf16, normal, generated piece by piece. Peak: the most resident memory of the step's process, minus "
        f"the {base / 2**20:.0f} MiB of an interpreter that has only started. Times are those of files, "
        "`fsync` included, and depend on the disk."
    )
    columns = ["step", "peak, MiB", "bar", "", "seconds", "GB/s of the original", "ratio", "unpacked bytes"]
    page.table(columns, [row for rows in every for row in rows])
