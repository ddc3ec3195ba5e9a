"""Packed weights that come to host memory in the background: who waits, and what fails."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.host import MIB, Gate, at, bring_in_vain, check, content, extents, threads, wait_for_threads
from support.locking import SHIFT, FakeLock

from tpde.errors import OutOfMemory, ReadError, Truncated, UnsupportedDevice
from tpde.host.pinned import HostMemory
from tpde.host.ranges import PAGE
from tpde.io.sources import Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLock:
    monkeypatch.delenv("TPDE_HOST_MEMORY", raising=False)
    return FakeLock()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileSource]:
    (tmp_path / "blobs").write_bytes(os.urandom(5 * MIB + 77))
    made = FileSource(tmp_path / "blobs")
    yield made
    made.close()


def given_back(memory: HostMemory, extent: Extent) -> bool:
    try:
        memory.there(extent)
    except ReadError:
        return True
    return False


def assert_prints(code: str, expected: str) -> None:
    """A process of its own says this, and no more, until it has ended."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


# ---- in the background ----


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_nothing_is_brought_before_it_is_wanted(mode: str, fake: FakeLock, source: FileSource) -> None:
    wanted = extents(source)
    with_begin, asked, given_back = (HostMemory(wanted, fake, mode=mode) for _ in range(3))
    assert not any(it.there(wanted[0]) for it in (with_begin, asked, given_back))
    assert not threads()
    with_begin.begin()
    with_begin.begin()  # as often as anybody likes
    wait_for_threads()
    assert with_begin.there(wanted[3])
    check(fake, asked, wanted)
    wait_for_threads()
    given_back.close()
    given_back.begin()
    with pytest.raises(ReadError, match="was given back; load the model again"):
        given_back.complete()
    assert not threads()
    with_begin.close()
    asked.close()
    assert not fake.locked


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_a_range_is_used_before_the_next_is_there(mode: str, fake: FakeLock, source: FileSource) -> None:
    gate, wanted = Gate(fake, 1), extents(source)
    memory = HostMemory(wanted, fake, mode=mode)
    check(fake, memory, wanted[:3])
    assert gate.reached.wait(60)
    assert not memory.there(wanted[3])
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, wanted[3]) for ask in (memory.address, memory.device_address)]
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
    memory = HostMemory(wanted, fake, mode=mode)
    with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
        memory.complete()
    check(fake, memory, wanted[:3])
    assert not memory.there(wanted[3])
    ticket = memory.request(wanted[3])
    for ask in (lambda _: ticket.wait(), memory.address, memory.device_address):
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

    made.append(HostMemory(extents(source), fake, mode=mode, progress=told))
    handed.set()
    with pytest.raises(ReadError, match="was given back; load the model again"):
        made[0].complete()
    made[0].close()
    assert len(seen) == 1
    assert not threads()
    assert not fake.locked


def test_whoever_closes_it_second_waits_too(fake: FakeLock, source: FileSource) -> None:
    """Files are closed after that, which the thread may still read."""
    gate, memory = Gate(fake, 1), HostMemory(extents(source), fake)
    memory.begin()
    assert gate.reached.wait(60)
    first = threading.Thread(target=memory.close)
    first.start()
    while not given_back(memory, extents(source)[0]):  # until it has begun
        first.join(0.001)
    threading.Timer(0.1, gate.open.set).start()
    memory.close()
    assert not threads()
    first.join()
    assert not fake.locked


def test_what_is_there_in_part_is_there_up_to_its_last_byte(fake: FakeLock, source: FileSource) -> None:
    """In steps of pages: what ends with one is there, and what has a byte more is not."""
    fake.step = PAGE
    gate, memory = Gate(fake, 2), HostMemory([Extent(source, 0, 4 * PAGE, "t")], fake)
    memory.begin()
    assert gate.reached.wait(60)
    inside, across = Extent(source, PAGE, PAGE, "inside"), Extent(source, PAGE, PAGE + 1, "across")
    assert memory.there(inside)
    assert not memory.there(across)
    assert memory.address(inside) + SHIFT == memory.device_address(inside)
    gate.open.set()
    assert memory.device_address(across) == memory.address(across) + SHIFT
    assert memory.there(across)
    memory.close()


def test_garbage_that_one_of_its_own_threads_collects(fake: FakeLock, source: FileSource) -> None:
    """Waiting for itself would never end: it is given back when its thread ends."""
    made: list[HostMemory] = []
    handed = threading.Event()

    fake.first, fake.then = lambda: handed.wait(60), made.clear  # the last reference
    made.append(HostMemory(extents(source), fake))
    made[0].begin()
    handed.set()
    wait_for_threads()
    assert not made
    assert fake.attempts
    assert not fake.locked


_EXIT = """
import atexit, threading, time
from tpde.io.sources import Extent
from tpde.host.page_lock import CudaPageLock
from tpde.host.pinned import HostMemory

class Endless:
    name, size, reads, begun = "endless", 1 << 30, 0, threading.Event()
    def read_into(self, offset, out):
        self.reads += 1
        self.begun.set()
        time.sleep(0.01)  # all of it would take minutes, however late the main thread goes on

def look():
    print(source.reads < source.size // 4096, [it.name for it in threading.enumerate()][1:])

source = Endless()
atexit.register(look)  # called last
small = CudaPageLock(0, step=4096)
memory = HostMemory([Extent(source, 0, source.size, "all")], small, mode="pageable")
memory.begin()
assert source.begun.wait(60)
"""


def test_the_end_of_a_process_does_not_wait_for_the_rest() -> None:
    assert_prints(_EXIT, "True []\n")


_LOCKED_AT_EXIT = """
import atexit, threading, time
from tpde.io.sources import Extent
from tpde.host.pinned import HostMemory

class Zeros:
    name, size = "zeros", 1 << 30
    def read_into(self, offset, out):
        pass

class Lock:
    step = 1 << 20
    def lock(self, address, size, *, read_only):
        locked.set()
    def unlock(self, address):
        print("unlocked")
    def device_address(self, address):
        return None

atexit.register(lambda: print("end"))  # called last
locked, source = threading.Event(), Zeros()
memory = HostMemory([Extent(source, 0, source.size, "all")], Lock(), mode="arena")
memory.begin()
assert locked.wait(60)
"""


def test_the_end_of_a_process_leaves_unlocking_to_the_system() -> None:
    assert_prints(_LOCKED_AT_EXIT, "end\n")


_END_OF_MAIN = """
import threading
from tpde.io.sources import Extent
from tpde.host.page_lock import CudaPageLock
from tpde.host.pinned import HostMemory

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
memory = HostMemory([Extent(source, 0, source.size, "all")], CudaPageLock(0), mode="pageable")
memory.begin()
threading.Thread(target=use).start()
"""


def test_another_thread_uses_it_when_the_main_one_has_ended() -> None:
    assert_prints(_END_OF_MAIN, "complete\n")


# ---- faults ----


@pytest.mark.parametrize("mode", ["mapped", "arena", "pageable"])
def test_truncated_before(mode: str, fake: FakeLock, source: FileSource) -> None:
    os.truncate(source.name, 4 * MIB + 9)
    with pytest.raises(
        Truncated, match=r"blobs` has 4194313 bytes, but `t3` ends at 5242957.*fetch the rest"
    ):
        HostMemory(extents(source), fake, mode=mode)
    assert not fake.attempts


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_truncated_between_check_and_use(mode: str, fake: FakeLock, source: FileSource) -> None:
    memory = HostMemory(extents(source), fake, mode=mode)
    os.truncate(source.name, 4 * MIB + 9)
    with pytest.raises(Truncated, match="ends at byte 4194313"):
        memory.complete()
    memory.close()
    assert not fake.locked
    assert not threads()


def test_truncated_after_mapping(fake: FakeLock, source: FileSource) -> None:
    """Pages that are gone are an error of the call that brings them in, not a signal that kills."""
    fake.populating = lambda: os.truncate(source.name, 4 * MIB + 9)
    with pytest.raises(Truncated, match="ends at byte 4194313"):
        bring_in_vain(extents(source), fake)
    assert not fake.locked


def test_an_arena_outlives_its_file(fake: FakeLock, source: FileSource) -> None:
    wanted = extents(source)
    before = [content(source, it) for it in wanted]
    memory = HostMemory(wanted, fake, mode="arena")
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
    memory = HostMemory(wanted, fake)
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
    fake.step = MIB // 4
    with pytest.raises(ReadError, match=rf"bytes \d+ to \d+ of `.*blobs` cannot be read.*{words}"):
        bring_in_vain(extents(source), fake, mode="arena")
    assert not fake.locked
    assert not threads()


def test_ctrl_c(fake: FakeLock, source: FileSource) -> None:
    fake.step = 64 << 10

    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    for mode in ("mapped", "arena"):
        with pytest.raises(KeyboardInterrupt):
            bring_in_vain(extents(source), fake, mode=mode, progress=interrupt)
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
        HostMemory(extents(source), fake).begin()
    gc.collect()
    assert not threads()
    assert not fake.locked


def test_ctrl_c_before_the_thread_has_a_number(
    fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing knows of no thread then; one that runs all the same must not touch files that are closed."""
    late: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        late.append(thread)
        raise KeyboardInterrupt

    memory, start = HostMemory(extents(source), fake), threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.begin()
    memory.close()
    start(late[0])
    late[0].join(60)
    with pytest.raises(ReadError, match="was given back"):
        memory.complete()
    assert not fake.populated, "it was at work"
    assert not fake.attempts


def test_too_little_memory(fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OutOfMemory, match=r"GiB of host memory are needed.*free some"):
        bring_in_vain(extents(source), fake, mode="arena")


def test_pages_that_cannot_be_read(fake: FakeLock, source: FileSource) -> None:
    """Though the file is as long as it was: its disk fails."""
    fake.populates = errno.EFAULT
    with pytest.raises(ReadError, match=r"bytes \d+ to \d+ of `.*blobs` cannot be read: .*the disk failed"):
        bring_in_vain(extents(source), fake)
    assert not fake.locked


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_last_page_that_cannot_be_read_may_be_of_a_file_that_became_shorter(
    shorter: int, fake: FakeLock, source: FileSource
) -> None:
    """The page ends after the file does, in any case."""
    last = source.size
    fake.populates, fake.populating = errno.EFAULT, lambda: os.truncate(source.name, last - shorter)
    with pytest.raises(Truncated if shorter else ReadError) as caught:
        bring_in_vain([Extent(source, 5 * MIB, last - 5 * MIB, "end")], fake)
    if shorter:
        assert isinstance(caught.value, Truncated)
        assert (caught.value.found, caught.value.needed) == (last - 1, last)


def test_pages_are_asked_for_before_they_are_waited_for(
    fake: FakeLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reads of 8 MiB; each once, and none beside them."""
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 20 * MIB + 77)
    source = FileSource(tmp_path / "large")
    asked, fadvise = list[tuple[int, ...]](), os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args) or fadvise(*args))
    memory = HostMemory(extents(source), fake, mode="mapped")
    memory.complete()
    assert {(it[0], it[3]) for it in asked} == {(source.fileno(), os.POSIX_FADV_WILLNEED)}
    pages = [(PAGE, 22 * PAGE), (4 * MIB, 8 * MIB), (12 * MIB, 8 * MIB), (20 * MIB, PAGE)]
    assert sorted((at, size) for _, at, size, _ in asked) == pages
    assert sorted(size for _, size in fake.populated) == sorted(size for _, size in pages)
    memory.close()
    source.close()


def test_old_kernels_do_not_populate(fake: FakeLock, source: FileSource) -> None:
    fake.populates = errno.ENOSYS
    memory = HostMemory(extents(source), fake)
    check(fake, memory, extents(source))
    memory.close()
