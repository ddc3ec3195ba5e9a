"""Packed weights in host memory: which pages, in which mode, what happens when something fails."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.locking import SHIFT, FakeLock

from tpde.errors import Corrupt, InvalidInput, OutOfMemory, ReadError, Truncated, UnsupportedDevice
from tpde.format.source import BytesSource, Extent, FileSource
from tpde.streaming import arena as arenas
from tpde.streaming import bringing, lock, mapping
from tpde.streaming.host import HostMemory
from tpde.streaming.pieces import GAP_BYTES
from tpde.streaming.ranges import PAGE, merge

MIB = 1 << 20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLock:
    """Whatever is locked is one step, at whichever address the system puts it."""
    monkeypatch.setattr(lock, "STEP", 1 << 56)
    return FakeLock(monkeypatch)


@pytest.fixture
def small_steps(fake: FakeLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STEP", 4 * PAGE)


def complete(wanted: list[Extent]) -> HostMemory:
    memory = HostMemory(wanted, 0)
    memory.complete()
    return memory


def bring_in_vain(wanted: list[Extent], **options: Any) -> None:
    """Memory that cannot be brought; giving it back leaves nothing locked, and no thread."""
    memory = HostMemory(wanted, 0, **options)
    try:
        memory.complete()
        pytest.fail("all of it came")
    finally:
        memory.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileSource]:
    (tmp_path / "blobs").write_bytes(os.urandom(5 * MIB + 77))
    made = FileSource(tmp_path / "blobs")
    yield made
    made.close()


def extents(source: Any) -> list[Extent]:
    """Two neighbours, one after a small gap, one far off at the end of the file."""
    places = [(5000, 70_000), (75_008, 9000), (90_112, 4096), (4 * MIB, source.size - 4 * MIB)]
    return [Extent(source, at, size, f"t{i}") for i, (at, size) in enumerate(places)]


def content(source: Any, extent: Extent) -> bytes:
    out = bytearray(extent.size)
    source.read_into(extent.offset, memoryview(out))
    return bytes(out)


def at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def check(fake: FakeLock, memory: HostMemory, wanted: list[Extent]) -> None:
    """Bytes are compared, in mappings too: nothing truncates these files."""
    for extent in wanted:
        address = memory.wait(memory.request(extent))
        assert at(address, extent.size) == content(extent.source, extent), extent.name
        assert (address - extent.offset) % PAGE == 0, "blobs are aligned as they are in the file"
        assert memory.ready(extent)
        device = memory.device_address(extent)
        assert device == (address + SHIFT if covered(fake, address, extent.size) else None)


def covered(fake: FakeLock, address: int, size: int) -> bool:
    """Whether all of it is locked."""
    end = address + size
    while address < end:
        step = next((it + n for it, (n, _) in fake.locked.items() if it <= address < it + n), None)
        if step is None:
            return False
        address = step
    return True


def threads() -> list[str]:
    return [it.name for it in threading.enumerate() if it.name == "tpde-host"]


def test_locked_in_place(fake: FakeLock, source: FileSource) -> None:
    wanted = extents(source)
    memory = HostMemory(wanted, 0)
    assert (memory.kind, memory.private_bytes) == ("mapped", 0)
    assert all(read_only for _, read_only in fake.locked.values())
    # Pages 1 to 23, and from 4 MiB to the page in which the file ends.
    assert sorted(size for size, _ in fake.locked.values()) == [22 * PAGE, MIB + PAGE]
    assert memory.locked_bytes == fake.bytes
    check(fake, memory, wanted)
    inside = Extent(source, 5100, 300, "inside")
    across = Extent(source, 70_000, 20_000, "across")
    check(fake, memory, [inside, across])
    memory.copied(memory.request(inside), None)
    memory.cancel(memory.request(inside))
    assert memory.ready(inside)
    assert not memory.ahead
    memory.close()
    memory.close()
    assert not fake.locked
    with pytest.raises(ValueError, match="was given back"):
        memory.address(inside)


@pytest.mark.parametrize("before", [0, 1])
def test_an_arena_where_locking_in_place_is_refused(fake: FakeLock, source: FileSource, before: int) -> None:
    """At once, or from the second range on."""
    fake.refuse = lambda read_only, locked: read_only and locked == before
    memory = HostMemory(extents(source), 0)
    assert memory.kind == "arena"
    assert [read_only for _, read_only in fake.locked.values()] == [it < before for it in range(2)]
    assert memory.locked_bytes == fake.bytes == 23 * PAGE + MIB
    assert memory.private_bytes == (MIB + PAGE if before else 23 * PAGE + MIB)
    check(fake, memory, extents(source))
    memory.close()
    assert not fake.locked


@pytest.mark.parametrize("before", [0, 1])
def test_pageable_where_locking_is_refused(fake: FakeLock, source: FileSource, before: int) -> None:
    fake.refuse = lambda read_only, locked: read_only or locked == before
    with pytest.warns(RuntimeWarning, match=r"cannot be page-locked .*stays pageable.*ulimit -l") as caught:
        memory = complete(extents(source))
    assert len(caught) == 1
    assert (memory.kind, memory.private_bytes) == ("pageable", 23 * PAGE + MIB)
    assert memory.locked_bytes == fake.bytes == before * 22 * PAGE
    check(fake, memory, extents(source))
    memory.close()
    assert not fake.locked


@pytest.mark.parametrize("how", ["argument", "environment"])
@pytest.mark.parametrize("mode", ["mapped", "arena", "pageable"])
def test_forced(
    mode: str, how: str, fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("TPDE_HOST_MEMORY", mode)
    argument = mode if how == "argument" else None
    memory = HostMemory(extents(source), 0, mode=argument)
    assert memory.kind == mode
    assert fake.attempts == {"mapped": 2, "arena": 2, "pageable": 0}[mode]
    check(fake, memory, extents(source))
    memory.close()
    fake.refuse = lambda read_only, locked: True
    if mode != "pageable":
        with pytest.raises(UnsupportedDevice, match=r"cannot be page-locked.*CUDA_ERROR_NOT_SUPPORTED"):
            bring_in_vain(extents(source), mode=argument)
    assert not fake.locked


def test_unknown_mode(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPDE_HOST_MEMORY", "fast")
    with pytest.raises(InvalidInput, match=r"`fast` is unknown; `TPDE_HOST_MEMORY` takes mapped, arena"):
        HostMemory(extents(source), 0)


def test_other_failures_are_reported(fake: FakeLock, source: FileSource) -> None:
    fake.error = UnsupportedDevice("page-locking failed: CUDA_ERROR_DEINITIALIZED")
    with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
        bring_in_vain(extents(source))
    assert fake.attempts == 1
    assert not threads()


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_steps(mode: str, fake: FakeLock, source: FileSource) -> None:
    """What is locked at once ends at multiples of the step, wherever the memory lies."""
    wanted = extents(source)
    memory = HostMemory(wanted, 0, mode=mode)
    assert memory.locked_bytes == fake.bytes == 23 * PAGE + MIB
    for address, (size, _) in fake.locked.items():
        assert address // (4 * PAGE) == (address + size - 1) // (4 * PAGE)
    assert len(fake.locked) >= (23 * PAGE + MIB) // (4 * PAGE)
    check(fake, memory, [*wanted, Extent(source, 5100, 88_000, "across")])
    memory.close()
    assert not fake.locked


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("after", [3, 9])
def test_refused_within_a_range(
    after: int, used: bool, fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied as a whole, as those after it; what of it was locked stays so only if it is used."""
    gate, wanted = Gate(monkeypatch, fake, after), extents(source)
    fake.refuse = lambda read_only, locked: read_only and locked == after

    def bring() -> HostMemory:
        memory = HostMemory(wanted, 0)
        assert gate.reached.wait(60)
        if used:
            early = wanted[0 if after == 3 else 3]
            memory.wait(memory.request(early._replace(size=100)))
        gate.open.set()
        memory.complete()
        return memory

    memory = bring()
    assert memory.kind == "arena"
    first = after == 3  # all of it is copied, or only the second range
    assert memory.private_bytes == (23 * PAGE + MIB if first else MIB + PAGE)
    assert memory.locked_bytes == fake.bytes
    kept = sum(read_only for _, read_only in fake.locked.values())
    whole = sum(1 for _ in lock.steps(memory.address(wanted[0]) // PAGE * PAGE, 22 * PAGE))
    assert kept == (after if used else 0 if first else whole)
    check(fake, memory, wanted)
    memory.close()
    assert not fake.locked


@pytest.mark.usefixtures("small_steps")
def test_an_arena_that_is_locked_in_part(fake: FakeLock, source: FileSource) -> None:
    """It is locked as far as it may be."""
    fake.refuse = lambda read_only, locked: read_only or locked == 4
    with pytest.warns(RuntimeWarning, match="cannot be page-locked"):
        memory = complete(extents(source))
    assert memory.kind == "pageable"
    assert memory.locked_bytes == fake.bytes
    assert len(fake.locked) == 4
    check(fake, memory, extents(source))
    assert memory.device_address(extents(source)[3]) is None
    memory.close()
    assert not fake.locked


@pytest.mark.usefixtures("small_steps")
def test_kernels_find_nothing_where_the_device_sees_it_in_pieces(
    fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = iter(range(1 << 44, 1 << 60, 1 << 45))
    monkeypatch.setattr(lock, "device_address", lambda address, device: next(far))
    memory = HostMemory(extents(source), 0)
    assert memory.device_address(Extent(source, 5000, 100, "in one")) == (1 << 44) + 5000 - PAGE
    assert memory.device_address(extents(source)[0]) is None
    assert at(memory.address(extents(source)[0]), 70_000) == content(source, extents(source)[0])
    memory.close()


@given(st.integers(0, 1 << 48), st.integers(1, 1 << 30))
def test_cutting_into_steps(address: int, size: int) -> None:
    cuts = list(lock.steps(address, size))
    assert sum(n for _, n in cuts) == size
    for (begin, n), follows in zip(cuts, [*(it for it, _ in cuts[1:]), size], strict=True):
        assert 0 < n == follows - begin
        assert (address + begin) // lock.STEP == (address + follows - 1) // lock.STEP


def test_what_was_not_asked_for(fake: FakeLock, source: FileSource) -> None:
    memory = HostMemory(extents(source), 0)
    for offset, size in ((0, 10), (4999, 5), (94_200, 100), (2 * MIB, 5), (4 * MIB - 1, 5)):
        with pytest.raises(ValueError, match="were not asked for"):
            memory.address(Extent(source, offset, size, "x"))
    with pytest.raises(ValueError, match="were not asked for"):
        memory.address(Extent(BytesSource(b"12345"), 0, 5, "x"))
    memory.close()


def test_bytes_that_are_no_file(fake: FakeLock, source: FileSource) -> None:
    other = BytesSource(os.urandom(5 * MIB))
    wanted = [*extents(other), *extents(source)]
    memory = HostMemory(wanted, 0)
    assert memory.kind == "arena"
    check(fake, memory, wanted)
    memory.close()


def test_nothing(fake: FakeLock) -> None:
    memory = HostMemory([], 0)
    assert (memory.kind, memory.locked_bytes) == ("mapped", 0)
    memory.close()


@pytest.mark.parametrize("refused", [False, True])
def test_progress(fake: FakeLock, source: FileSource, refused: bool) -> None:
    """As many bytes as there are, also where they are brought in twice."""
    fake.refuse = lambda read_only, locked: refused and read_only and locked == 1
    seen: list[int] = []
    memory = HostMemory(extents(source), 0, progress=seen.append)
    memory.complete()
    assert sum(seen) == sum(it.size for it in extents(source))
    assert min(seen) > 0
    memory.close()


def test_given_back_with_the_last_reference(fake: FakeLock, source: FileSource) -> None:
    memory = HostMemory(extents(source), 0)
    memory.complete()
    assert fake.locked
    del memory
    gc.collect()
    assert not fake.locked


class _App:
    """Has memory, and is told of its progress."""

    def __init__(self, source: FileSource, fails: bool) -> None:
        self.fails = fails
        self.memory = HostMemory(extents(source), 0, mode="arena", progress=self.told)

    def told(self, nbytes: int) -> None:
        if self.fails:
            raise _Odd


@pytest.mark.parametrize("fails", [False, True])
def test_progress_that_knows_the_memory_does_not_keep_it(
    fails: bool, fake: FakeLock, source: FileSource
) -> None:
    app = _App(source, fails)
    with pytest.raises(_Odd) if fails else nullcontext():
        app.memory.complete()
    memory = weakref.ref(app.memory)
    del app
    gc.collect()
    assert memory() is None
    assert not fake.locked


class _Odd(Exception):
    """Is not made of its arguments."""

    def __init__(self) -> None:
        super().__init__("odd", 1)
        self.more = 2


@pytest.mark.parametrize("error", [Corrupt("damaged", tensor="t", chunk=3), OSError(errno.EIO, "x"), _Odd()])
def test_an_error_does_not_keep_the_memory(error: Exception, fake: FakeLock, source: FileSource) -> None:
    """Whoever asks is in its traceback, and whoever called that, such as a model."""
    error.__cause__ = ValueError("why")

    def fail(read_only: bool, before: int) -> bool:
        fake.error = error  # the next time
        return False

    fake.refuse = fail

    def ask(memory: HostMemory, extent: Extent) -> None:
        with pytest.raises(type(error)) as caught:
            memory.address(extent)
        assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))
        assert str(caught.value.__cause__) == "why"
        assert "put" in [it.name for it in caught.traceback], "where it came from"

    memory = HostMemory(extents(source), 0, mode="arena")
    for _ in range(2):
        ask(memory, extents(source)[3])
    assert fake.locked
    del memory
    gc.collect()
    assert not fake.locked


def test_an_error_does_not_keep_the_bytes(
    fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given back when the memory is closed, though a failed read was given a part of them."""
    made: list[mmap.mmap] = []

    class Map(mmap.mmap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)

    monkeypatch.setattr(arenas.mmap, "mmap", Map)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    memory = HostMemory(extents(source), 0, mode="arena")
    with pytest.raises(Truncated):
        memory.complete()
    memory.close()
    assert [it.closed for it in made] == [True]


# ---- in the background ----


class Gate:
    """Lets locking go on when a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch, fake: FakeLock, before: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

        def lock_(*args: Any, **kwargs: Any) -> None:
            if fake.attempts == before:
                self.reached.set()
                assert self.open.wait(60)
            fake.lock(*args, **kwargs)

        patch.setattr(lock, "lock", lock_)


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_a_range_is_used_before_the_next_is_there(
    mode: str, fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, wanted = Gate(monkeypatch, fake, 1), extents(source)
    memory = HostMemory(wanted, 0, mode=mode)
    check(fake, memory, wanted[:3])
    assert gate.reached.wait(60)
    assert not memory.ready(wanted[3])
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, wanted[3]) for ask in (memory.wait, memory.device_address)]
        assert not any(it.done() for it in waiting)
        gate.open.set()
        address, device = (it.result(60) for it in waiting)
    assert address is not None
    assert device == address + SHIFT
    check(fake, memory, wanted)
    memory.close()


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_what_fails_later_leaves_what_is_there(mode: str, fake: FakeLock, source: FileSource) -> None:
    """Whoever waits for the rest is told, each time; nothing hangs."""

    def fail(read_only: bool, before: int) -> bool:
        fake.error = UnsupportedDevice("page-locking failed: CUDA_ERROR_DEINITIALIZED")  # the next time
        return False

    fake.refuse = fail
    wanted = extents(source)
    memory = HostMemory(wanted, 0, mode=mode)
    with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
        memory.complete()
    check(fake, memory, wanted[:3])
    assert not memory.ready(wanted[3])
    for ask in (memory.wait, memory.address, memory.device_address):
        with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
            ask(wanted[3])
    memory.close()
    assert not fake.locked


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_closed_by_its_progress(mode: str, fake: FakeLock, source: FileSource) -> None:
    """In a thread of its own: that does not wait for itself, and brings nothing more."""
    seen, made, handed = list[int](), list[HostMemory](), threading.Event()

    def told(nbytes: int) -> None:
        assert handed.wait(60)
        seen.append(nbytes)
        made[0].close()

    made.append(HostMemory(extents(source), 0, mode=mode, progress=told))
    handed.set()
    with pytest.raises(ReadError, match="was given back; load the model again"):
        made[0].complete()
    made[0].close()
    assert len(seen) == 1
    assert not threads()
    assert not fake.locked


def test_garbage_that_one_of_its_own_threads_collects(
    fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for itself would never end: it is given back when its thread ends."""
    made: list[HostMemory] = []
    handed = threading.Event()

    def lock_(*args: Any, **kwargs: Any) -> None:
        assert handed.wait(60)
        fake.lock(*args, **kwargs)
        made.clear()  # the last reference

    monkeypatch.setattr(lock, "lock", lock_)
    made.append(HostMemory(extents(source), 0))
    thread = made[0]._bringing._thread
    handed.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not made
    assert fake.attempts
    assert not fake.locked


_EXIT = """
import atexit, threading
from tpde.format.source import Extent
from tpde.streaming import arena
from tpde.streaming.host import HostMemory

class Endless:
    name, size, reads, begun = "endless", 1 << 30, 0, threading.Event()
    def read_into(self, offset, out):
        self.reads += 1
        self.begun.set()

def look():
    print(source.reads < source.size // arena.PIECE_BYTES, [it.name for it in threading.enumerate()][1:])

source = Endless()
arena.PIECE_BYTES = 4096
atexit.register(look)  # called last
memory = HostMemory([Extent(source, 0, source.size, "all")], 0, mode="pageable")
assert source.begun.wait(60)
"""


def test_the_end_of_a_process_does_not_wait_for_the_rest() -> None:
    command = [sys.executable, "-c", _EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True []\n", "")


_LOCKED_AT_EXIT = """
import atexit, threading
from tpde.format.source import Extent
from tpde.streaming import lock
from tpde.streaming.host import HostMemory

class Zeros:
    name, size = "zeros", 1 << 30
    def read_into(self, offset, out):
        pass

atexit.register(lambda: print("end"))  # called last
lock.lock = lambda *args, **kwargs: locked.set()
lock.unlock = lambda *args: print("unlocked")
lock.device_address = lambda *args: None
lock.STEP = 1 << 20
locked, source = threading.Event(), Zeros()
memory = HostMemory([Extent(source, 0, source.size, "all")], 0, mode="arena")
assert locked.wait(60)
"""


def test_the_end_of_a_process_leaves_unlocking_to_the_system() -> None:
    command = [sys.executable, "-c", _LOCKED_AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


_END_OF_MAIN = """
import threading
from tpde.format.source import Extent
from tpde.streaming.host import HostMemory

class Late:
    name, size = "late", 1 << 20
    def read_into(self, offset, out):
        main_has_ended.wait()

def use():
    threading.main_thread().join()
    main_has_ended.set()
    memory.complete()
    print("complete")

main_has_ended, source = threading.Event(), Late()
memory = HostMemory([Extent(source, 0, source.size, "all")], 0, mode="pageable")
threading.Thread(target=use).start()
"""


def test_another_thread_uses_it_when_the_main_one_has_ended() -> None:
    command = [sys.executable, "-c", _END_OF_MAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "complete\n", "")


# ---- faults ----


@pytest.mark.parametrize("mode", ["mapped", "arena", "pageable"])
def test_truncated_before(mode: str, fake: FakeLock, source: FileSource) -> None:
    os.truncate(source.name, 4 * MIB + 9)
    with pytest.raises(
        Truncated, match=r"blobs` has 4194313 bytes, but `t3` ends at 5242957.*fetch the rest"
    ):
        HostMemory(extents(source), 0, mode=mode)
    assert not fake.attempts


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_truncated_between_check_and_use(
    mode: str, fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpde.streaming.host.require", lambda extents: os.truncate(source.name, 4 * MIB + 9))
    with pytest.raises(Truncated, match="ends at byte 4194313"):
        bring_in_vain(extents(source), mode=mode)
    assert not fake.locked
    assert not threads()


def test_truncated_after_mapping(fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are gone are an error of the call that brings them in, not a signal that kills."""
    populate = mapping.populate

    def late(piece: Any) -> None:
        os.truncate(source.name, 4 * MIB + 9)
        populate(piece)

    monkeypatch.setattr(bringing, "populate", late)
    with pytest.raises(Truncated, match="ends at byte 4194313"):
        bring_in_vain(extents(source))
    assert not fake.locked


def test_an_arena_outlives_its_file(fake: FakeLock, source: FileSource) -> None:
    wanted = extents(source)
    before = [content(source, it) for it in wanted]
    memory = HostMemory(wanted, 0, mode="arena")
    memory.complete()
    os.truncate(source.name, 0)
    os.unlink(source.name)
    assert [at(memory.address(it), it.size) for it in wanted] == before
    memory.close()


def test_a_mapping_outlives_its_name(fake: FakeLock, source: FileSource) -> None:
    """The file that was opened is mapped, not what has its name by then."""
    wanted, other = extents(source), Path(source.name + ".new")
    before = [content(source, it) for it in wanted]
    other.write_bytes(bytes(source.size))
    other.replace(source.name)
    memory = HostMemory(wanted, 0)
    assert [at(memory.address(it), it.size) for it in wanted] == before
    memory.close()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EIO, "the disk failed"), (errno.ESTALE, "the file has gone")]
)
def test_the_disk_fails(
    code: int, words: str, fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset > 4 * MIB:
            raise OSError(code, os.strerror(code))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(arenas, "PIECE_BYTES", MIB // 4)
    with pytest.raises(ReadError, match=rf"bytes \d+ to \d+ of `.*blobs` cannot be read.*{words}"):
        bring_in_vain(extents(source), mode="arena")
    assert not fake.locked
    assert not threads()


def test_ctrl_c(fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "PIECE_BYTES", 64 << 10)

    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    for mode in ("mapped", "arena"):
        with pytest.raises(KeyboardInterrupt):
            bring_in_vain(extents(source), mode=mode, progress=interrupt)
        assert not threads()
        assert not fake.locked


def test_ctrl_c_while_the_thread_starts(
    fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has the memory, and the thread has begun."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostMemory(extents(source), 0)
    gc.collect()
    assert not threads()
    assert not fake.locked


def test_too_little_memory(fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arenas.mmap, "mmap", refuse)
    with pytest.raises(OutOfMemory, match=r"GiB of host memory are needed.*free some"):
        bring_in_vain(extents(source), mode="arena")


def test_old_kernels_do_not_populate(
    fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_POPULATE_READ", 9999)
    memory = HostMemory(extents(source), 0)
    check(fake, memory, extents(source))
    memory.close()


# ---- any extents ----

_SPAN = 6 * MIB


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, _SPAN - 1), st.integers(1, 300_000)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["mapped", "arena"]),
    st.sampled_from([PAGE, 1 << 18, 1 << 26]),
)
def test_any_extents(places: list[tuple[int, int, int]], mode: str, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        fake = FakeLock(patch)
        patch.setattr(lock, "STEP", step)
        sources = []
        for i in range(2):
            Path(folder, str(i)).write_bytes(os.urandom(1000) * (_SPAN // 1000) + os.urandom(i * 123))
            sources.append(FileSource(Path(folder, str(i))))
        wanted = [
            Extent(sources[i], offset, min(size, sources[i].size - offset), f"{i}:{offset}")
            for i, offset, size in places
            if offset < sources[i].size
        ]
        memory = HostMemory(wanted, 0, mode=mode)
        check(fake, memory, wanted)
        ranges = merge(wanted)
        assert memory.locked_bytes == fake.bytes == sum(it.size for it in ranges)
        for before, after in pairwise(ranges):
            assert before.source is not after.source or after.first - before.last > GAP_BYTES
        # A piece may reach over the gap between two extents if that is small.
        for one in wanted:
            for two in wanted:
                gap = two.offset - one.offset - one.size
                if one.source is two.source and 0 <= gap <= GAP_BYTES:
                    begin, end = one.offset, two.offset + two.size
                    check(fake, memory, [Extent(one.source, begin, end - begin, "both")])
        memory.close()
        assert not fake.locked
        for source in sources:
            source.close()
