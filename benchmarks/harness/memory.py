"""Memory of this process, as the system has it, and its peaks, from threads that look."""

from __future__ import annotations

import re
import resource
import sys
import threading
from pathlib import Path

EVERY = 0.05  # seconds between looks at all that is resident


def said(field: str) -> int:
    """A field of `/proc/self/status`, in bytes, such as `VmRSS` (all that is resident) or `RssFile`.

    0 where there is none: some systems tell no more than `VmRSS`.
    """
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def peak_bytes() -> int:
    """Most memory that this process ever held.

    `VmHWM` belongs to the program that runs; `ru_maxrss` survives `exec`, so that a child starts with its
    parent's figure. It is used only where there is no `/proc`.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return said("VmHWM") or (peak if sys.platform == "darwin" else peak << 10)


def private_bytes() -> int:
    """Private memory of this process."""
    return said("RssAnon")


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
        everything = said("VmRSS")
        self.all = max(self.all, everything)
        self._private = max(self._private, everything - said("RssFile"))

    def close(self) -> int:
        """Look once more, and stop; returns the peak. `all` has that of all pages, libraries' too."""
        self._stop.set()
        self._thread.join()
        self._look()
        return self._private + mapped(self._folder)


class Watch:
    """Peaks of the device's memory beyond the bare context and of private host memory, from a thread."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.zeros(1, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._start = self._used()
        self.device = self.host = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        import torch

        if not self._cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def look(self) -> int:
        """Bytes of the device in use now; they count for the peak."""
        used = self._used() - self._start
        self.device, self.host = max(self.device, used), max(self.host, private_bytes())
        return used

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.look()

    def pause(self) -> None:
        """Stop looking, so that what follows can be timed."""
        self._stop.set()
        self._thread.join()
