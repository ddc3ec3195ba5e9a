"""Interrupts, kills and failures while a folder is replaced leave the old one or the new."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import renames
from support.folders import NEW, OLD, names, visible

from tpde.files import folder_swap
from tpde.files.operations import pack


@pytest.mark.parametrize("what", ["success", "failure"])
def test_a_folder_that_was_locked_is_let_go(what: str, model: Path, old: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no list of open files here")

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    if what == "success":
        pack(model, old, force=True, threads=1)
    else:
        with pytest.raises(KeyboardInterrupt):
            pack(model, old, force=True, threads=1, progress=fail)
    assert len(os.listdir("/proc/self/fd")) == before


CALLS = {
    "sync": (os, "fsync"),
    "rename": (os, "rename"),
    "rename with flags": None,
    "link": (os, "link"),
    "unlink": (os, "unlink"),
    "remove a folder": (os, "rmdir"),
    "list": (os, "listdir"),
    "remove a tree": (shutil, "rmtree"),
}


def _interrupt(patch: pytest.MonkeyPatch, call: str, number: int, after: bool) -> Callable[[], bool]:
    """Raise Ctrl-C before or after one call of the system; tells whether it came to that."""
    place, calls = CALLS[call], 0
    real: Any = getattr(*place) if place else renames.present()

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            raise KeyboardInterrupt
        result = real(*args, **options)
        if calls == number:
            raise KeyboardInterrupt
        return result

    if place:
        patch.setattr(*place, interrupted)
    else:
        patch.setattr(ctypes, "CDLL", renames.libraries(interrupted))
    return lambda: calls >= number


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_interrupts_leave_the_old_folder_or_the_new(
    call: str, after: bool, model: Path, old: Path, way: str
) -> None:
    for number in range(1, 40):
        with pytest.MonkeyPatch.context() as patch:
            happened = _interrupt(patch, call, number, after)
            with contextlib.suppress(KeyboardInterrupt):
                pack(model, old, force=True)
        text = (old / "config.json").read_text()
        assert names(old) == (OLD if text == '{"a": "old"}' else NEW)
        folder_swap.clear(old.parent)  # as the next run would
        assert visible(old.parent) == ["model", "there"]
        assert names(old) == (OLD if text == '{"a": "old"}' else NEW)
        if not happened():
            return
    pytest.fail("there are more calls than were tried")


@pytest.mark.parametrize("call", ["remove a tree", "unlink"])
def test_an_interrupt_while_the_old_folder_goes_lets_it_go_all_the_same(
    call: str, model: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to wait for the next run."""
    happened = _interrupt(monkeypatch, call, 1, after=False)
    with pytest.raises(KeyboardInterrupt):
        pack(model, old, force=True)
    assert happened()
    assert names(old) == NEW
    assert visible(old.parent) == ["model", "there"]


KILLED = """
import ctypes, os, signal, sys
from support import renames
from tpde.files.operations import pack

number, flags = int(sys.argv[1]), sys.argv[2] == "exchange"
calls = 0

def killing(real):
    def call(*args, **options):
        global calls
        for _ in range(2):  # before it, and after
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if _ == 0:
                result = real(*args, **options)
        return result
    return call

for name in ("rename", "fsync", "link", "unlink", "rmdir"):
    setattr(os, name, killing(getattr(os, name)))
if not flags:
    ctypes.CDLL = renames.libraries(None)
ctypes.CDLL = renames.libraries(killing(renames.present()))
pack(sys.argv[3], sys.argv[4], force=True)
print(calls)
"""


def _killed(number: int, way: str, model: Path, old: Path) -> int | None:
    """Pack in a process that is killed at one of the calls; how many there were if it came to its end."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(number), way, str(model), str(old)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if done.returncode == 0:
        return int(done.stdout)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return None


@pytest.mark.parametrize("number", [1, 5, 9, 13, 17, 21, 25, 29, 33, 37])
@pytest.mark.parametrize("kind", ["exchange", "renames"])
def test_kills_leave_the_old_folder_or_the_new(number: int, kind: str, model: Path, old: Path) -> None:
    ended = _killed(number, kind, model, old)
    if kind == "exchange" or ended is not None:
        assert names(old) in (OLD, NEW)  # complete before anything sets it right
    pack(model, model.with_name("other"))  # the next run sets it right
    text = (old / "config.json").read_text()
    assert names(old) == (OLD if text == '{"a": "old"}' else NEW)
    assert visible(old.parent) == ["model", "other", "there"]


def test_everything_is_synced_before_the_old_folder_goes(
    model: Path, old: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "notes").write_text("notes")
    synced: set[int] = set()
    events: list[str] = []
    real_sync, real_unlink = os.fsync, os.unlink

    def fsync(descriptor: int) -> None:
        real_sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def renamed(new: Path, there: Path, swap: bool) -> None:
        if there != old:
            return
        if not events:  # which finds that something is there
            missing = [it for it in (new, *new.rglob("*")) if it.stat().st_ino not in synced]
            assert not missing
            events.append("put")
        elif swap:  # from here on only the journal tells the old folder from the new
            assert {it.stat().st_ino for it in (new.parent / "journal", new.parent)} <= synced
            assert names(new) == NEW | {"sub", "sub/notes"}  # complete as soon as it is there
            carried = [new, *(new / name for name in (".cache", ".cache/deep", "logs"))]
            assert {it.stat().st_ino for it in carried} <= synced
            assert there.parent.stat().st_ino in synced
            events.append("exchange")
        else:
            return
        synced.clear()

    def unlink(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).name == "config.json":  # the first that goes of the old model
            assert {old.parent.stat().st_ino, Path(path).parent.parent.stat().st_ino} <= synced
            events.append("settle")
        real_unlink(path, *args, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "unlink", unlink)
    renames.watched(monkeypatch, renamed)
    pack(model, old, force=True)
    assert events == ["put", "exchange", "settle"]


def test_a_second_rename_that_fails_puts_the_old_folder_back(
    model: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames.missing(monkeypatch)
    real, failed = os.rename, []

    def failing(here: Path, there: Path) -> None:
        if there == old and not there.exists() and not failed:
            failed.append(here)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(here))
        real(here, there)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        pack(model, old, force=True)
    assert failed
    assert names(old) == OLD
    assert visible(old.parent) == ["model", "there"]
