"""A second process that holds most of the card, and what this one takes of it.

Run as a program it takes lines on stdin: how many bytes of the card to leave free. It answers how many it
holds.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

GRAIN = 2 << 20  # the driver gives memory in pages of this size
EVERY = 0.002  # seconds between looks


def card() -> tuple[int, int]:
    """Bytes of the first GPU that are free, and all."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return int(free), int(total)


class Holder:
    """Starts the second process; `leave` tells it what to leave free."""

    def __init__(self) -> None:
        self.held, before = 0, card()[0]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.context = before - self._tell("start")

    def _tell(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that should hold the rest of the card has ended")
        return int(answer)

    def leave(self, nbytes: int) -> None:
        """Hold all but so many bytes that are free now."""
        self.held = self._tell(str(nbytes))

    def close(self) -> None:
        """End the process, which frees its memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def __enter__(self) -> Holder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Use:
    """What this process takes of the card beyond the bare context, while nobody but a `Holder` changes it.

    Attributes
    ----------
    holder : Holder or None
        Whose memory is not ours.
    peak : int
        Most bytes seen since `watch`.
    """

    def __init__(self) -> None:
        import torch

        torch.cuda.init()
        torch.zeros(1, device="cuda")  # torch's own first pages are part of what is counted from here
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = card()
        self._start, self.peak = total - free, 0
        self.holder: Holder | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def now(self) -> int:
        """Bytes in use; they count for the peak."""
        free, total = card()
        others = 0 if self.holder is None else self.holder.held + self.holder.context
        used = total - free - self._start - others
        self.peak = max(self.peak, used)
        return used

    def watch(self) -> None:
        """Look from a thread until `pause`, from a peak of nothing."""
        self.peak = 0
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self.now()

    def pause(self) -> None:
        """Stop looking, so that what follows can be timed."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        self.now()


def hold() -> None:
    """The second process."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    kept: list[Any] = []
    for line in sys.stdin:
        if line.strip() == "start":
            print(card()[0], flush=True)
            continue
        kept.clear()
        torch.cuda.empty_cache()
        time.sleep(0.05)
        size = (card()[0] - int(line)) // GRAIN * GRAIN
        if size > 0:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        print(max(size, 0), flush=True)


if __name__ == "__main__":
    hold()
