"""What bringing host memory in does to others: how long mapping memory takes in another thread meanwhile.

A file in the page cache is mapped and its pages brought into the process's tables, by one `madvise` for 8 MiB
or as `tpde` does; and read into new pages that `read` faults in, or that are touched first, as `tpde` does.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import wall

TITLE = "Bringing host memory in"
ROOM = 64 << 10  # what is mapped and unmapped elsewhere
POPULATE_READ = 22
Piece = Callable[[int], None]


class Libc:
    """Calls that release the interpreter's lock."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.madvise, self.munmap, self.mmap = libc.madvise, libc.munmap, libc.mmap
        self.madvise.argtypes, self.munmap.argtypes = [pointer, size, number], [pointer, size]
        self.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        self.mmap.restype = pointer

    def map_and_unmap(self) -> float:
        """Seconds."""
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return wall(lambda: self.munmap(self.mmap(None, ROOM, access, kind, -1, 0), ROOM))


def mapped(source: Any, libc: Libc, *, ours: bool) -> tuple[Piece, int, Callable[[], None]]:
    """Pinning a piece of a mapping in, how large pieces are, and what undoes it all."""
    from tpde.host.mapped import Mapping
    from tpde.host.page_lock import CudaPageLock
    from tpde.host.ranges import Range

    made = Mapping([Range(source, 0, source.size)], CudaPageLock(0))  # which locks nothing here
    pieces = {it.offset: it for it in made.pieces(0, 0, source.size)}

    def bring(at: int) -> None:
        it = pieces[at]
        if ours:
            made.populate(it)
        elif libc.madvise(it.address, it.size, POPULATE_READ):
            raise OSError("MADV_POPULATE_READ, of Linux 5.14, is missing")

    return bring, pieces[0].size, made.close


def copied(source: Any, _: Libc, *, ours: bool) -> tuple[Piece, int, Callable[[], None]]:
    """The same, of a copy in huge pages."""
    from tpde.host import arena
    from tpde.host.ranges import Range

    made = arena.Arena(source.size)
    of, size = Range(source, 0, source.size), arena.PIECE_BYTES

    def bring(at: int) -> None:
        if ours:
            arena.fill(made, arena.ArenaPart(of, at, at, size))
        else:
            with made.view[at : at + size] as room:
                source.read_into(at, room)

    return bring, size, made.close


def bring_all(source: Any, libc: Libc, threads: int, way: Any, ours: bool) -> tuple[float, list[float]]:
    """Seconds that bringing all of it took, and of what was mapped meanwhile."""
    bring, size, close = way(source, libc, ours=ours)
    left, lock, found = iter(range(0, source.size, size)), threading.Lock(), list[float]()

    def work() -> None:
        while True:
            with lock:
                at = next(left, None)
            if at is None:
                return
            bring(at)

    crew = [threading.Thread(target=work) for _ in range(threads)]
    start = time.perf_counter()
    for thread in crew:
        thread.start()
    while any(thread.is_alive() for thread in crew):
        found.append(libc.map_and_unmap())
    took = time.perf_counter() - start
    close()
    return took, found


def spread(found: list[float]) -> list[str]:
    """Median, mean, the 99th of a hundred and the most, in microseconds.

    Of little, all may be brought in before the other thread has its first turn.
    """
    if not found:
        return ["-"] * 4
    found = sorted(found)
    cells = [statistics.median(found), statistics.fmean(found), found[int(len(found) * 0.99)], found[-1]]
    return [f"{1e6 * it:.0f}" for it in cells]


WAYS = (
    ("mapped, `madvise` for 8 MiB", mapped, False),
    ("mapped, tpde", mapped, True),
    ("copied, `read` into new pages", copied, False),
    ("copied, tpde", copied, True),
)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--gib", type=float, default=2, help="size of the file")
    parser.add_argument(
        "--threads", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="that bring pages in"
    )
    parser.add_argument("--runs", type=int, default=5, help="of each way, after one that does not count")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the file is made")


def run(options: argparse.Namespace, page: Page) -> None:
    """Bring the file in by all ways, in turns."""
    from tpde.io.sources import FileSource

    libc = Libc()
    took: dict[str, list[float]] = {name: [] for name, _, _ in WAYS}
    waited: dict[str, list[float]] = {name: [] for name, _, _ in WAYS}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="tpde-pages-") as folder:
        path, block = Path(folder) / "file", bytes(range(256)) * (1 << 16)
        with path.open("wb") as file:
            for _ in range(int(options.gib * 2**30) // len(block)):
                file.write(block)
        source = FileSource(path)
        for turn in range(options.runs + 1):
            note(f"turn {turn} of {options.runs}")
            for name, way, ours in WAYS:
                seconds, found = bring_all(source, libc, options.threads, way, ours)
                if turn:
                    took[name].append(seconds)
                    waited[name] += found
        source.close()
        size = source.size
    rows = []
    for name, found in waited.items():
        rate = f"{size / statistics.median(took[name]) / 1e9:.1f}"
        rows.append([name, rate, str(len(found)), *spread(found)])
    page.say(
        f"{options.threads} threads bring in {options.gib:g} GiB from the page cache, another one maps and "
        f"unmaps {ROOM >> 10} KiB meanwhile. {options.runs} runs of each, by turns."
    )
    columns = ["how", "GB/s", "mapped meanwhile", "median, us", "mean, us", "99 %, us", "most, us"]
    page.table(columns, rows)
