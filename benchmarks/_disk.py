"""Reading files past the page cache with some threads: what a disk gives, and what this process has read."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

BLOCK = 8 << 20  # of a read; a multiple of 4096, as O_DIRECT needs
EVERY = 0.05  # seconds between looks at memory


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
    todo, lock, done = iter(blocks), threading.Lock(), []

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


def memory(field: str) -> int:
    """A field of `/proc/self/status`, in bytes, such as `VmRSS` (all that is resident) or `RssFile`."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0  # some systems tell no more than `VmRSS`


def mapped(folder: Path) -> int:
    """Resident bytes of the files in a folder that this process has mapped."""
    name, total = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:") and name.startswith(f"{folder}/"):
            total += int(line.split()[1]) * 1024
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else ""
    return total


class Resident:
    """The most memory that was resident, from a thread.

    Private and locked pages at a time, and those of the mapped files of a folder when it is closed; but not
    those of mapped libraries, which other processes share and which are read again when they are wanted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._private, self.all = folder.resolve(), 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self._look()

    def _look(self) -> None:
        everything = memory("VmRSS")
        self.all = max(self.all, everything)
        self._private = max(self._private, everything - memory("RssFile"))

    def close(self) -> int:
        """Look once more, and stop; returns the peak. `all` has that of all pages, libraries' too."""
        self._stop.set()
        self._thread.join()
        self._look()
        return self._private + mapped(self._folder)
