"""Weights that exceed host memory: read from the packed files each time, against plain `O_DIRECT` reading.

`--dir` must be on the disk to be measured; it needs 11 GB, with fewer layers less.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.data.llama import SHAPES, import_everything
from benchmarks.harness.gpu import wait
from benchmarks.harness.memory import Resident
from benchmarks.harness.processes import guarded, rows, tell, told
from benchmarks.harness.report import Page, gib, note
from benchmarks.offload import work
from benchmarks.offload.decoding import generate

TITLE = "Streaming from a disk"
BAR = 0.85  # of the best rate of plain reading
MEMORY_BAR = 1 << 30  # above `ram`
PREDICTED_BAR = 0.15
THREADS = (1, 4, 16)
READ_BYTES = 6 << 30  # for each number of threads, or
READ_SECONDS = 4.0
TIMED_SECONDS = 20.0  # of tokens, unless one takes longer
BLOCK = 8 << 20  # of a read; a multiple of 4096, as O_DIRECT needs


def drop(files: Sequence[Path]) -> None:
    """Ask the page cache to forget files."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def direct_rate(files: Sequence[Path], threads: int, limit: int, seconds: float) -> float:
    """Bytes a second of reading files with O_DIRECT, in their order: `limit` bytes, or until time is over."""
    handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    blocks = [
        (handle, at)
        for handle, path in zip(handles, files, strict=True)
        for at in range(0, path.stat().st_size, BLOCK)
    ][: limit // BLOCK]
    todo, lock, done = iter(blocks), threading.Lock(), list[int]()

    def work() -> None:
        buffer, count = mmap.mmap(-1, BLOCK), 0  # page-aligned
        while True:
            with lock:
                block = next(todo, None) if time.perf_counter() - start < seconds else None
            if block is None:
                done.append(count)
                return
            count += os.preadv(block[0], [buffer], block[1])

    workers = [threading.Thread(target=work) for _ in range(threads)]
    start = time.perf_counter()
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(done) / (time.perf_counter() - start)
    finally:
        for handle in handles:
            os.close(handle)


def bytes_read() -> int:
    """What this process has read by system calls so far."""
    found = re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


def use(given: dict[str, Any]) -> None:
    """Load the model under both budgets, and time tokens."""
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
    guarded({**work.TASKS, "use": use}, task, given)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--ram", type=float, default=4, help="GiB")
    parser.add_argument("--vram", type=float, default=4, help="GiB")
    parser.add_argument("--tokens", type=int, default=4, help="timed tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, required=True, help="keeps the packed model")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each process")


def run(options: argparse.Namespace, page: Page) -> None:
    """Make the model, read its files plainly, stream them, and read them again."""
    import_everything()  # once; processes are forks of this one, which leaves the GPU alone
    import tpde.integrations.transformers.streamed  # noqa: F401

    layers = options.layers or SHAPES[options.shape][2]
    base = options.dir / f"{options.shape}-{layers}-{options.seed}"
    base.mkdir(parents=True, exist_ok=True)
    given = {
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
    first = list(rows(perform, "start", given, options.limit))
    made, page.facts["GPU"] = told(first, "made"), told(first, "gpu", "")
    if made is None:
        raise SystemExit(f"error: the model could not be made: {told(first, 'problem')}")
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
    found = [row for task in ("predict", "use") for row in rows(perform, task, given, options.limit)]
    read()
    used, predicted = told(found, "used"), told(found, "predicted")
    lines = [[f"O_DIRECT, {n} threads, GB/s", f"{rate / 1e9:.2f}", "", ""] for n, rate in plain.items()]

    def judged(what: str, said: str, bar: str, met: bool) -> None:
        lines.append([what, said, bar, page.judge(met, what)])

    if used is None or predicted is None:
        page.judge(False, "measured")
    else:
        token, least, most = used["token_s"], BAR * max(plain.values()), int(options.ram * 2**30) + MEMORY_BAR
        off = predicted[1] / token - 1
        judged("tpde, GB/s", f"{used['rate'] / 1e9:.2f}", f">= {least / 1e9:.2f}", used["rate"] >= least)
        judged("memory, GiB", gib(used["memory"]), gib(most), used["memory"] <= most)
        lines.append(["with libraries, GiB", gib(used["resident"]), "", ""])
        lines.append(["s/token", f"{token:.3f}", "", ""])
        said = f"{predicted[1]:.3f}, {100 * off:+.1f} %"
        judged("predicted, s/token", said, f"{100 * PREDICTED_BAR:.0f} %", abs(off) <= PREDICTED_BAR)
        lines.append(["read, GB/token", f"{used['a_token'] / 1e9:.2f}", "", ""])
    lines += [
        ["problem", row["problem"], "", page.judge(False, "problem")] for row in found if "problem" in row
    ]
    page.say(
        f"{options.shape} shape, {made['layers']} layers, {made['packed_bytes'] / 1e9:.2f} GB packed, in "
        f"{options.vram:g} GiB of device memory and {options.ram:g} GiB of host memory. Memory: pages that "
        "are private, of the mapped packed files, or locked; with libraries: and those of mapped libraries. "
        "Plain reading: blocks of 8 MiB past the page cache, the faster of before and after. Predicted: what "
        "`tpde plan` says right before; again, at most twice, where others use the processor "
        "(`harness/quiet.py`)."
    )
    page.table(["what", "found", "bar", ""], lines)
