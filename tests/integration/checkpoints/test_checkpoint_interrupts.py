"""Ctrl-C at any time: each step has its own bits, or is not there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.training import held_back

from tpde import CheckpointStore
from tpde.errors import InvalidInput

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Have Ctrl-C raise, also where whoever started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(1000) + 1000 * step}


def _check(folder: Path, must: set[int], may: set[int]) -> None:
    """Each step that was saved is there, none but those and what may be, and each is its own."""
    store = CheckpointStore(folder)
    assert must <= {*store.steps} <= must | may
    assert store.verify() == []
    for step in store.steps:
        assert torch.equal(store.load(step)["w"], _state(step)["w"])


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_while_the_thread_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, begins: bool, retain: bool
) -> None:
    """Before it runs, or when it does."""
    begin, start = threading.Event(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "tpde-save-2":
            start(thread)
            return
        if begins:
            start(thread)
        os.kill(os.getpid(), signal.SIGINT)

    held_back(monkeypatch, begin)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with CheckpointStore(tmp_path, retain=retain) as store:
        store.save(1, _state(1))
        with pytest.raises(KeyboardInterrupt):
            store.save(2, _state(2), background=True)
        threading.Timer(0.1, begin.set).start()  # the next save is there before, if it waits for nothing
        store.save(3, _state(3), background=True)
        store.save(4, _state(4))
    _check(tmp_path, {1, 3, 4}, {2} if begins else set())


@pytest.mark.parametrize("call", ["wait", "load", "save", "close"])
def test_while_a_save_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The next call waits, too, and nobody else writes before."""
    waits, came, begin, opens = threading.Event(), threading.Event(), threading.Event(), os.open

    def late(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and threading.current_thread().name == "tpde-save-2":
            assert waits.wait(60)
            # Python sees one that comes just before it waits for a lock when it has that lock: not now.
            os.kill(os.getpid(), signal.SIGINT)
            while not came.wait(10):
                os.kill(os.getpid(), signal.SIGINT)
            assert begin.wait(60)
        return opens(path, flags, *args, **options)

    store = CheckpointStore(tmp_path)
    calls: dict[str, Callable[[], Any]] = {
        "wait": store.wait,
        "load": store.load,
        "save": lambda: store.save(3, _state(3)),
        "close": store.close,
    }
    store.save(1, _state(1))
    monkeypatch.setattr(os, "open", late)
    store.save(2, _state(2), background=True)

    def interrupted() -> None:
        waits.set()
        calls[call]()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    came.set()
    try:
        with pytest.raises(InvalidInput, match="being written"):
            CheckpointStore(tmp_path).save(3, _state(3))
    finally:
        threading.Timer(0.1, begin.set).start()
    store.save(4, _state(4), background=True)
    store.close()
    _check(tmp_path, {1, 2, 4}, set())


_TRACED = ("store/checkpoints.py", "store/staging.py", "store/background_save.py", "memory/turn.py")


class _InterruptsAt:
    """Ctrl-C before a line of what a store executes in this thread."""

    def __init__(self, line: int) -> None:
        self._left, self.came = line, False

    def __enter__(self) -> None:
        sys.settrace(self._calls)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._lines if frame.f_code.co_filename.endswith(_TRACED) else None

    def _lines(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self._left -= 1
            if not self._left:
                self.came = True
                raise KeyboardInterrupt
        return self._lines


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_before_every_line_of_a_save(tmp_path: Path, *, background: bool, retain: bool, again: bool) -> None:
    """Also of a step that was there before, and was dropped."""
    for line in range(1, 1000):
        interrupts, folder = _InterruptsAt(line), tmp_path / str(line)
        store = CheckpointStore(folder, retain=retain, keep=3)
        store.save(1, _state(1), background=background)
        if again:
            store.save(2, _state(7))
            store.prune(drop=[2])
        with contextlib.suppress(KeyboardInterrupt), interrupts:
            store.save(2, _state(2), background=background)
            store.wait()
        for step in (3, 4):
            store.save(step, _state(step), background=background)
        store.close()
        _check(folder, {3, 4}, {1, 2})
        if not interrupts.came:
            break
    assert 20 < line < 999


def test_before_every_line_of_a_close(tmp_path: Path) -> None:
    for line in range(1, 1000):
        interrupts, folder = _InterruptsAt(line), tmp_path / str(line)
        store = CheckpointStore(folder)
        store.save(1, _state(1), background=True)
        with contextlib.suppress(KeyboardInterrupt), interrupts:
            store.close()
        store.close()
        with CheckpointStore(folder) as other:
            other.save(2, _state(2))
        _check(folder, {1, 2}, set())
        if not interrupts.came:
            break
    assert 10 < line < 999
