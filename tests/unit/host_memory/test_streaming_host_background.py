"""Packed weights that come to host memory in the background: who waits, and when that ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.host import Gate, check, extents, threads, wait_for_threads
from support.locking import SHIFT, FakeLock

from tpde.errors import ReadError, UnsupportedDevice
from tpde.host.pinned import HostMemory
from tpde.host.ranges import PAGE
from tpde.io.sources import Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


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
