"""A second process that holds most of the card, and what this one takes of it."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading
import time
from types import TracebackType
from typing import Any

GRAIN = 2 << 20  # the driver gives memory in pages of this size
BLOCK = 64 << 30  # at most so much at a time
EVERY = 0.005  # seconds between looks
ANSWER_S = 60.0
NOTHING = -1  # in the place of bytes that are to be left: hold nothing


class Holder:
    """Starts the second process, as a fork: this one must not have touched the GPU.

    Attributes
    ----------
    ends : list of int
        Descriptors for `Held`, in forks of this process.
    """

    def __init__(self) -> None:
        commands, answers = os.pipe(), os.pipe()
        self.ends = [answers[0], commands[1]]
        for end in self.ends:
            os.set_inheritable(end, True)
        self._process = multiprocessing.get_context("fork").Process(
            target=_hold, args=(commands[0], answers[1], self.ends), daemon=True
        )
        self._process.start()
        os.close(commands[0])
        os.close(answers[1])

    def close(self) -> None:
        """End the process, which frees its memory."""
        for end in self.ends:
            os.close(end)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Holder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Held:
    """What a fork tells the second process."""

    def __init__(self, ends: list[int]) -> None:
        self._answers, self._commands = ends
        self._rest = b""

    def leave(self, nbytes: int) -> None:
        """Hold all but so many bytes of what is free when nothing is held; `NOTHING` holds nothing."""
        number = time.monotonic_ns()  # answers to processes that were ended are told by it
        os.write(self._commands, f"{number} {nbytes}\n".encode())
        while True:
            line = self._line().split()
            if int(line[0]) != number:
                continue
            if line[1] != b"held":
                raise RuntimeError("the rest of the card cannot be held: " + b" ".join(line[1:]).decode())
            return

    def _line(self) -> bytes:
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], ANSWER_S)[0]:
                raise RuntimeError(f"the process that holds the rest of the card is silent for {ANSWER_S} s")
            more = os.read(self._answers, 4096)
            if not more:
                raise RuntimeError("the process that holds the rest of the card has ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class _Card:
    """The first GPU as the driver has it, without PyTorch."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        from tpde.cuda.capability import call

        self._driver, self._call, self._kept = driver, call, list[Any]()
        call(driver.cuInit(0), "starting the driver")
        device = call(driver.cuDeviceGet(0), "opening the GPU")
        call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device), "a context")), "using it")

    def free(self) -> int:
        """Bytes, once the driver has got back all that ended processes had."""
        last = -1
        for _ in range(40):
            now = int(self._call(self._driver.cuMemGetInfo(), "asking for free memory")[0])
            if now == last:
                break
            last = now
            time.sleep(0.02)
        return last

    def release(self) -> None:
        while self._kept:
            self._call(self._driver.cuMemFree(self._kept.pop()), "giving memory back")

    def leave(self, nbytes: int) -> int:
        """Hold all but so many bytes; returns how many are free then, at most a page of the driver more."""
        self.release()
        less = 0  # what the driver's own tables take beside what is asked for
        for _ in range(64):
            spare = (self.free() - nbytes - less) // GRAIN * GRAIN
            if spare < -less and self._kept:
                self._call(self._driver.cuMemFree(self._kept.pop()), "giving memory back")
                less += GRAIN
                continue
            if spare <= 0:
                break
            code, made = self._driver.cuMemAlloc(min(spare, BLOCK))
            if int(code):  # not in one piece
                code, made = self._driver.cuMemAlloc(GRAIN)
            if int(code):
                break
            self._kept.append(made)
        return self.free()


def _hold(commands: int, answers: int, others: list[int]) -> None:
    """The second process."""
    for end in others:
        os.close(end)
    card = None
    with os.fdopen(commands) as lines:
        for line in lines:
            number, wanted = (int(it) for it in line.split())
            try:
                card = card or _Card()
                if wanted == NOTHING:
                    card.release()
                    answer = "held"
                else:
                    free = card.leave(wanted)
                    off = abs(free - wanted)
                    answer = "held" if off <= 4 * GRAIN else f"{free} bytes are free, not {wanted}"
            except Exception as error:
                answer = f"{type(error).__name__}: {error}".replace("\n", " ")
            os.write(answers, f"{number} {answer}\n".encode())


def card() -> tuple[int, int]:
    """Bytes of the first GPU that are free, and all."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return int(free), int(total)


class Use:
    """What this process takes of the card beyond the bare context, while nobody else but `held` changes it.

    Parameters
    ----------
    ends : list of int, optional
        Those of a `Holder`.

    Attributes
    ----------
    peak : int
        Most bytes seen since `watch`.
    """

    def __init__(self, ends: list[int] | None = None) -> None:
        import torch

        self._held = Held(ends) if ends else None
        if self._held is not None:
            self._held.leave(NOTHING)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.zeros(1, device="cuda")  # torch's own first pages are part of what is counted from here
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = card()
        self._start, self.peak = total - free, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def limit(self, nbytes: int) -> None:
        """Let the other process hold all of the card but so many bytes and the bare context."""
        if self._held is not None:
            used = self.now()
            self._held.leave(nbytes - used)
            free, total = card()
            self._start = total - free - used

    def release(self) -> None:
        """Let the other process hold nothing. What is in use is not known any more."""
        if self._held is not None:
            self._held.leave(NOTHING)

    def now(self) -> int:
        """Bytes in use; they count for the peak."""
        free, total = card()
        used = total - free - self._start
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
