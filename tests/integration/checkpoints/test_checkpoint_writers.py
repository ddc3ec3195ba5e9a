"""Who writes a checkpoint store: threads in the background, and one process at a time."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training import check, equal, filled, held_back

from tpde import CheckpointStore
from tpde.errors import InvalidInput, Truncated
from tpde.io.sinks import FileSink
from tpde.store.chain import name_of

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


def test_a_background_save_has_the_state_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    held_back(monkeypatch, begin)
    tensor, array, other = torch.arange(1000), np.arange(10), np.arange(10, dtype=">i4")
    with CheckpointStore(tmp_path) as store:
        store.save(1, [tensor, tensor.view(10, 100).t(), array, other], background=True)
        tensor.zero_()
        array[:] = 0
        other[:] = 0
        begin.set()
    whole = torch.arange(1000)
    found = store.load(1)
    assert torch.equal(found[0], whole)
    assert torch.equal(found[1], whole.view(10, 100).t())
    assert np.array_equal(found[2], np.arange(10))
    assert np.array_equal(found[3], np.arange(10))


def test_memory_of_background_saves_is_used_again(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        places = []
        for step, size in enumerate((1000, 1000, 10, 2000)):
            store.save(step, {"weight": torch.full((size,), float(step))}, background=True)
            store.wait()
            places.append(store._staging._buffer.data_ptr())
        assert places[0] == places[1] == places[2]
    for step in range(4):
        assert CheckpointStore(tmp_path).load(step)["weight"][0] == step
    assert store._staging._buffer.size == 0


@pytest.mark.parametrize("call", ["save", "load", "steps", "wait", "close", "verify", "prune", "export"])
def test_what_fails_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    store = CheckpointStore(tmp_path / "store")
    store.save(1, {"x": 1})
    write = os.pwritev

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: store.save(3, {"x": 3}),
        "load": store.load,
        "steps": lambda: store.steps,
        "wait": store.wait,
        "close": store.close,
        "verify": store.verify,
        "prune": lambda: store.prune(1),
        "export": lambda: store.export(1, tmp_path / "out"),
    }
    monkeypatch.setattr(os, "pwritev", full)
    store.save(2, {"x": 2}, background=True)
    with pytest.raises(OSError, match="No space left"):
        calls[call]()
    assert "step 2 was not saved" in caplog.text
    monkeypatch.setattr(os, "pwritev", write)
    assert store.steps == (1,)  # once alone
    store.save(2, {"x": 2})
    assert store.load() == {"x": 2}
    store.close()


def test_an_error_of_ours_in_the_background_names_the_step(tmp_path: Path, run: dict[int, Any]) -> None:
    filled(tmp_path, {1: run[1]})
    path = tmp_path / name_of(1)
    path.write_bytes(path.read_bytes()[:-1])
    store = CheckpointStore(tmp_path)
    store.save(2, run[2], background=True)
    with pytest.raises(Truncated, match=r"step 2 was not saved.*step-00000001\.tpde"):
        store.wait()
    store.close()


def test_one_writer_at_a_time(tmp_path: Path, run: dict[int, Any]) -> None:
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.save(1, run[1])
    with pytest.raises(InvalidInput, match="being written"):
        second.save(2, run[2])
    with pytest.raises(InvalidInput, match="being written"):
        second.prune(1)
    assert equal(second.load(), run[1])  # reading is free
    first.close()
    second.save(2, run[2])
    with pytest.raises(InvalidInput, match="being written"):
        first.save(3, run[3])
    del second  # without `close`
    first.save(3, run[3])
    first.close()
    check(tmp_path, run, (1, 2, 3))


@pytest.mark.parametrize("what", ["removed", "replaced", "unlocked"])
def test_a_folder_that_was_replaced_is_not_written_to(what: str, tmp_path: Path, run: dict[int, Any]) -> None:
    """Steps would stand on what the other one never had, beside a writer that has the new lock."""
    folder, other = tmp_path / "store", tmp_path / "other"
    filled(other, {1: run[2]})
    store = CheckpointStore(folder, retain=True)
    store.save(1, run[1])
    if what == "unlocked":
        (folder / "writer.lock").unlink()
    else:
        shutil.rmtree(folder)
    if what == "replaced":
        other.rename(folder)
    for call in (lambda: store.save(3, run[3]), lambda: store.prune(1)):
        with pytest.raises(InvalidInput, match=r"store` was removed or replaced while .*; close this store"):
            call()
    if what == "removed":
        assert not folder.exists()
        for read in (store.load, lambda: store.load(1)):
            with pytest.raises(InvalidInput, match=r"has no steps|no checkpoint store"):
                read()
    store.close()
    store.save(3, run[3])
    assert equal(store.load(), run[3])
    store.close()


@pytest.mark.parametrize("options", [{"background": True}, {"retain": True}])
def test_threads_share_a_store(tmp_path: Path, options: dict[str, bool]) -> None:
    background, retain = options.get("background", False), options.get("retain", False)
    shown = 0
    for turn in range(10):
        store = CheckpointStore(tmp_path / str(turn), retain=retain)
        store.save(0, {"w": torch.zeros(1000)})

        def save(step: int, store: CheckpointStore = store) -> int:
            try:
                store.save(step, {"w": torch.full((1000,), float(step))}, background=background)
            except InvalidInput as error:  # a larger one was faster
                assert "is not larger" in str(error)  # noqa: PT017
                return 0
            return 1

        with ThreadPoolExecutor(6) as pool:
            saved = sum(pool.map(save, range(1, 7)))
        store.close()
        assert len(store.steps) == 1 + saved
        for step in store.steps:
            assert torch.equal(store.load(step)["w"], torch.full((1000,), float(step)))
        shown += saved
    assert shown >= 10


def test_the_thread_that_saves_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What logs its error may ask the store."""
    begin = threading.Event()
    held_back(monkeypatch, begin)
    store = CheckpointStore(tmp_path)
    asked = list[str]()

    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for call in (store.close, store.load, lambda: store.save(3, {})):
                with pytest.raises(RuntimeError, match="step 2 cannot wait for itself"):
                    call()
                asked.append(record.levelname)

    monkeypatch.setattr(FileSink, "commit", None)
    handler = Asks()
    log = logging.getLogger("tpde")
    log.addHandler(handler)
    try:
        store.save(2, {"x": 2}, background=True)
        threading.Timer(0.1, begin.set).start()
        with pytest.raises(TypeError):
            store.save(3, {"x": 3})
    finally:
        log.removeHandler(handler)
    assert asked == ["ERROR"] * 3
    store.close()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_is_another_store(tmp_path: Path, how: Callable[[CheckpointStore], CheckpointStore]) -> None:
    with CheckpointStore(tmp_path, keyframe_every=2) as store:
        store.save(1, {"x": torch.ones(10)})
        store.save(2, {"x": torch.ones(10)}, background=True)
        other = how(store)
        assert other.load(1)["x"].tolist() == [1.0] * 10
        with pytest.raises(InvalidInput, match="being written"):
            other.save(3, {})
        del other
        with pytest.raises(InvalidInput, match="being written"):
            CheckpointStore(tmp_path).save(3, {})
        store.save(3, {})
        other = how(store)
    other.save(4, {})
    other.close()
    assert [it.base for it in other.describe()] == [None, 1, None, 3]


_FORKS = """
import os, sys, torch
from tpde import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"x": torch.ones(10)})
closed, close = os.pipe()
told, tell = os.pipe()
child = os.fork()
if not child:
    os.close(close)
    try:
        store.save(2, {"x": torch.ones(10)})
        os.write(tell, b"wrote")
    except Exception as error:
        os.write(tell, str(error).encode())
    os.read(closed, 1)  # until the parent is done
    os._exit(0)
print(os.read(told, 10000).decode())
store.close()
with CheckpointStore(sys.argv[1]) as other:  # the child, which lives, holds no lock
    other.save(3, {"x": torch.ones(10)})
os.close(close)
os.waitpid(child, 0)
print(CheckpointStore(sys.argv[1]).steps)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_neither_writes_nor_holds_the_lock(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, steps = done.stdout.splitlines()
    assert "is being written by another process" in said
    assert steps == "(1, 3)"


_FORKS_MEANWHILE = """
import os, sys, threading, torch
from tpde import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"x": torch.ones(10)})
write, writes, forked = os.pwritev, threading.Event(), threading.Event()
def slowly(*args):
    writes.set()
    assert forked.wait(60)
    return write(*args)
os.pwritev = slowly
saves = threading.Thread(target=store.save, args=(2, {"x": torch.ones(10)}))
saves.start()
assert writes.wait(60)
child = os.fork()
if not child:
    try:
        store.save(3, {"x": torch.ones(10)})
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
forked.set()
saves.join()
print(store.steps)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_is_forked_while_a_thread_saves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS_MEANWHILE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, steps = done.stdout.splitlines()
    assert "is being written by another process" in said
    assert steps == "(1, 2)"


@pytest.mark.parametrize("call", ["save", "prune"])
def test_a_killed_writer_holds_nothing(tmp_path: Path, call: str) -> None:
    script = """
import os, signal, sys, torch
from tpde import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"x": torch.ones(10)})
os.pwritev = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
store.save(2, {"x": torch.ones(10)})
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    left = {it.name for it in tmp_path.iterdir()}
    assert len(left) == 3  # the step, the lock, and what was being written
    with CheckpointStore(tmp_path) as store:
        assert store.steps == (1,)
        if call == "save":
            store.save(2, {"x": 2})
        else:
            assert store.prune(1) == ()
        there = {*map(name_of, store.steps), "writer.lock"}
    assert {it.name for it in tmp_path.iterdir()} == there


def test_a_lock_ends_with_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When what modules hold is gone already."""
    from tpde.store import writer_lock

    lock = writer_lock.WriterLock(tmp_path)
    with monkeypatch.context() as patch:
        for name in ("os", "fcntl"):
            patch.setattr(writer_lock, name, None)
        lock.__del__()
    writer_lock.WriterLock(tmp_path).release()
