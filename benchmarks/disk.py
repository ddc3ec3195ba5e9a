"""Weights that exceed host memory: read from the packed files each time, against plain `O_DIRECT` reading.

    python benchmarks/disk.py --dir FOLDER [--ram 4] [--vram 4] [--layers 12 --ram 1.5 --vram 2]

`FOLDER` must be on the disk to be measured; it needs 11 GB, with fewer layers less.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import _offload
from _disk import Resident, bytes_read, direct_rate, drop
from _gpu import reason
from _machine import arguments, emit, note, table, verdict
from _model import SHAPES, import_everything, wait
from _rows import rows, tell

BAR = 0.85  # of the best rate of plain reading
MEMORY_BAR = 1 << 30  # above `ram`
PREDICTED_BAR = 0.15
THREADS = (1, 4, 16)
READ_BYTES = 6 << 30  # for each number of threads, or
READ_SECONDS = 4.0
TIMED_SECONDS = 20.0  # of tokens, unless one takes longer


def use(given: dict[str, Any]) -> None:
    """Load the model under both budgets, and time tokens."""
    from _offload import generate

    import tpde

    import_everything()
    resident = Resident(Path(given["packed"]))
    model: Any = tpde.from_pretrained(
        given["packed"],
        device="cuda",
        vram=f"{given['vram']:g}GiB",
        ram=f"{given['ram']:g}GiB",
        max_tokens=1024,
    )
    generate(model, 0, 0)
    wait()
    start = time.perf_counter()
    generate(model, 0, 0)
    count = max(min(given["tokens"], int(TIMED_SECONDS / (time.perf_counter() - start)) - 1), 1)
    before = bytes_read()
    seconds, _ = generate(model, 0, count)
    read = bytes_read() - before  # by the prompt's forward pass and `count` more, each of which reads as much
    tell(
        used={
            "token_s": seconds,
            "rate": read / (1 + count) / seconds,
            "a_token": read / (1 + count),
            "memory": resident.close(),
            "resident": resident.all,
        }
    )
    model.tpde_streamer.close()


def perform(task: str, given: dict[str, Any]) -> None:
    """Do a task in this process."""
    if task != "use":
        _offload.perform(task, given)
        return
    try:
        use(given)
    except Exception as error:
        import traceback

        traceback.print_exc()
        tell(problem=reason(error))


def main() -> int:
    """Parse the command line, run, print."""
    if sys.argv[1:2] == ["--task"]:
        perform(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--ram", type=float, default=4, help="GiB")
    parser.add_argument("--vram", type=float, default=4, help="GiB")
    parser.add_argument("--tokens", type=int, default=4, help="timed tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, required=True, help="keeps the packed model")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each process")
    options = parser.parse_args()
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.transformers.streamed  # noqa: F401

    layers = options.layers or SHAPES[options.shape][2]
    base = options.dir / f"{options.shape}-{layers}-{options.seed}"
    base.mkdir(parents=True, exist_ok=True)
    given = {
        "title": "Streaming from a disk",
        "shape": options.shape,
        "layers": layers,
        "seed": options.seed,
        "dir": str(base),
        "packed": str(base / "packed"),
        "budgets": [],
        "ram": options.ram,
        "vram": options.vram,
        "tokens": options.tokens,
        "budget": options.vram,
        "turn": 0,
    }
    first: dict[str, Any] = {}
    for row in rows(__file__, "start", given, options.limit, perform):
        first |= row
    if "made" not in first:
        raise SystemExit(f"error: the model could not be made: {first.get('problem')}")
    head, made = first["head"], first["made"]
    files = sorted((base / "packed").glob("*.safetensors"))
    plain = dict.fromkeys(THREADS, 0.0)

    def read() -> None:
        """As fast as plain reading was so far: disks of virtual machines are faster at times."""
        for threads in THREADS:
            drop(files)
            rate = direct_rate(files, threads, READ_BYTES, READ_SECONDS)
            note(f"O_DIRECT, {threads} threads: {rate / 1e9:.2f} GB/s")
            plain[threads] = max(plain[threads], rate)

    read()
    found = [
        row for task in ("predict", "use") for row in rows(__file__, task, given, options.limit, perform)
    ]
    read()
    used = next((row["used"] for row in found if "used" in row), None)
    predicted = next((row["predicted"][1] for row in found if "predicted" in row), None)
    lines = [[f"O_DIRECT, {n} threads, GB/s", f"{rate / 1e9:.2f}", "", ""] for n, rate in plain.items()]
    met = used is not None and predicted is not None
    if used is not None and predicted is not None:
        least, most = BAR * max(plain.values()), int(options.ram * 2**30) + MEMORY_BAR
        off = predicted / used["token_s"] - 1
        good = used["rate"] >= least, used["memory"] <= most, abs(off) <= PREDICTED_BAR
        met = all(good)
        lines.append(["tpde, GB/s", f"{used['rate'] / 1e9:.2f}", f">= {least / 1e9:.2f}", verdict(good[0])])
        held = f"{used['memory'] / 2**30:.2f}"
        lines.append(["memory, GiB", held, f"{most / 2**30:.2f}", verdict(good[1])])
        lines.append(["with libraries, GiB", f"{used['resident'] / 2**30:.2f}", "", ""])
        lines.append(["s/token", f"{used['token_s']:.3f}", "", ""])
        said = f"{predicted:.3f}, {100 * off:+.1f} %"
        lines.append(["predicted, s/token", said, f"{100 * PREDICTED_BAR:.0f} %", verdict(good[2])])
        lines.append(["read, GB/token", f"{used['a_token'] / 1e9:.2f}", "", ""])
    lines += [["problem", row["problem"], "", verdict(False)] for row in found if "problem" in row]
    about = (
        f"{options.shape} shape, {made['layers']} layers, {made['packed_bytes'] / 1e9:.2f} GB packed, in "
        f"{options.vram:g} GiB of device memory and {options.ram:g} GiB of host memory. Memory: pages that "
        "are private, of the mapped packed files, or locked; with libraries: and those of mapped libraries. "
        "Plain reading: blocks of 8 MiB past the page cache, the faster of before and after. Predicted: what "
        "`tpde plan` says right before; again, at most twice, where others use the processor (`_quiet.py`).\n"
    )
    emit(f"{head}\n{about}\n{table(['what', 'found', 'bar', ''], lines)}", options.out)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
