"""The kept pool: order, errors, forks, and that it is used exactly when it pays."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.forks import needs_fork, require_in_fork

from tpde.codec import pool, zstd
from tpde.codec.selection import core_layout, plan_tensor
from tpde.codec.zstd import ZstdCodec
from tpde.errors import Corrupt
from tpde.format.container import TensorSpec


def test_results_come_in_order_and_other_threads_take_part() -> None:
    seen: set[int] = set()

    def slow_square(number: int) -> int:
        seen.add(threading.get_ident())
        time.sleep(0.002)
        return number * number

    found = pool.each(slow_square, range(5, 45), seconds=0.0, threads=4, shared=True)
    assert found == [n * n for n in range(5, 45)]
    assert 1 < len(seen) <= 4
    assert threading.get_ident() in seen


def test_what_is_begun_runs_beside_this_thread_and_gives_its_result() -> None:
    may_end = threading.Event()

    def wait() -> int:
        return threading.get_ident() if may_end.wait(60) else 0

    result = pool.begin(wait, seconds=60)
    may_end.set()
    assert result() not in (0, threading.get_ident())


def test_what_does_not_pay_is_done_at_once_by_this_thread() -> None:
    assert pool.begin(threading.get_ident, seconds=0)() == threading.get_ident()


@pytest.mark.parametrize("seconds", [0, 60])
def test_what_is_begun_raises_its_error(seconds: float) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.begin(lambda: 1 // 0, seconds=seconds)()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_lowest_error_is_raised_once_nobody_works_any_longer(kind: type[BaseException]) -> None:
    running: set[int] = set()

    def fail(number: int) -> int:
        running.add(number)
        time.sleep(0.001 * (40 - number) / 40)
        running.discard(number)
        if number >= 7:
            raise kind(number)
        return number

    for _ in range(20):
        with pytest.raises(kind, match=r"^7$"):
            pool.each(fail, range(40), seconds=0.0, threads=8, shared=True)
        assert not running


def test_after_an_error_no_thread_takes_another_number() -> None:
    failed: list[int] = []

    def fail(number: int) -> None:
        if number >= 5:
            failed.append(number)
            raise ValueError(number)

    for threads in (2, 3, 8):
        failed.clear()
        with pytest.raises(ValueError, match=r"^5$"):
            pool.each(fail, range(200), seconds=0.0, threads=threads, shared=True)
        assert len(failed) <= threads  # those that had a number already


def test_the_threads_are_kept() -> None:
    pool.each(time.sleep, range(0), seconds=0.0, threads=2, shared=True)
    pool.hand_off(3)
    before = threading.active_count()
    for _ in range(50):
        pool.each(lambda _: time.sleep(0), range(3), seconds=0.0, threads=3, shared=True)
    assert threading.active_count() <= max(before, 3)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Let handing work to threads cost so many seconds, by the clock that measures it."""

    def put(seconds: float) -> None:
        ticks = itertools.count()
        monkeypatch.setattr(time, "perf_counter", lambda: seconds * next(ticks))
        pool.hand_off.cache_clear()

    yield put
    pool.hand_off.cache_clear()


def test_sharing_follows_the_measured_break_even(costs: Callable[[float], None]) -> None:
    costs(0.0)
    assert not pool.pays(30e-6, 2), "what takes so little is never shared"
    assert pool.pays(31e-6, 2)
    costs(100e-6)
    assert not pool.pays(1.0, 1)
    assert not pool.pays(190e-6, 2)
    assert pool.pays(210e-6, 2)
    assert not pool.pays(100e-6, 4)
    assert pool.pays(140e-6, 4)
    used: set[int] = set()

    def note(_: int) -> None:
        used.add(threading.get_ident())
        time.sleep(0.001)

    pool.each(note, range(8), seconds=150e-6, threads=2)
    assert used == {threading.get_ident()}
    pool.each(note, range(8), seconds=250e-6, threads=2)
    assert len(used) == 2


def test_the_hand_off_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = pool.hand_off(2)
    assert 0 < first < 1
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("it is measured again"))
    assert pool.hand_off(2) == first


@needs_fork
def test_a_forked_process_has_a_pool_of_its_own() -> None:
    pool.each(abs, range(4), seconds=0.0, threads=2, shared=True)
    require_in_fork(lambda: pool.each(abs, range(4), seconds=0.0, threads=2, shared=True) == [0, 1, 2, 3])


@pytest.mark.parametrize("share", [False, True])
def test_zstd_gives_the_same_bits_and_errors_on_the_pool(share: bool, costs: Callable[[float], None]) -> None:
    costs(0.0 if share else 1000.0)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1000, 300_000).view(np.uint8)
    plan = plan_tensor(TensorSpec("I64", (300_000,)), words, "zstd")
    assert plan is not None
    header = plan.header
    codec = ZstdCodec(header, core_layout(header))
    out = np.empty(codec.bound(header.words, header.chunks), np.uint8)
    made = codec.encode(words, 0, header.chunks, 0, out, threads=3)
    data, back = made.data.copy(), np.empty_like(words)
    codec.decode(made.records, 0, data, 0, data.size, back, threads=3)
    assert np.array_equal(words, back)
    starts = made.records.view("<u4")[::3].astype(np.int64) << header.unit_log2
    data[starts[2] + 60] ^= 1
    data[starts[4] + 60] ^= 1
    with pytest.raises(Corrupt) as error:
        codec.decode(made.records, 0, data, 0, data.size, back, threads=3)
    assert error.value.chunk == 2


def test_each_thread_has_zstd_contexts_of_its_own() -> None:
    mine, theirs = zstd._own.decompressor, []
    thread = threading.Thread(target=lambda: theirs.append(zstd._own.decompressor))
    thread.start()
    thread.join()
    assert zstd._own.decompressor is mine
    assert theirs[0] is not mine


_ENDING = """
import atexit, threading, time
from tpde.codec import pool

def work():
    done = []
    while threading.main_thread().is_alive() and {late}:
        time.sleep(0.01)
    beside = pool.Beside()
    results = [beside.submit(done.append, i) for i in range(9)]
    assert [it.result() for it in results] == [None] * 9
    assert done == list(range(9))
    failed = beside.submit(lambda: 1 // 0)
    assert isinstance(failed.exception(), ZeroDivisionError)
    beside.shutdown()
    assert pool.each(str, range(5), seconds=60, threads=3) == list("01234")
    assert pool.each(str, range(5), seconds=60, threads=3, shared=True) == list("01234")
    assert pool.begin(lambda: 7, seconds=60)() == 7
    print("all of it")
"""


@pytest.mark.parametrize("late", ["thread", "function"])
@pytest.mark.parametrize("used", [False, True])
def test_at_the_interpreters_end_callers_do_it_themselves(late: str, used: bool) -> None:
    """In a thread that it waits for, and in a function that it calls."""
    script = _ENDING.format(late=late == "thread")
    if used:
        script += "pool.each(str, range(5), seconds=60, threads=3, shared=True)\n"
    script += "threading.Thread(target=work).start()" if late == "thread" else "atexit.register(work)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("all of it\n", "")


def test_what_is_submitted_late_comes_after_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, may_end, seen = pool.Beside(), threading.Event(), list[int]()

    def refuse(*_: object) -> None:
        threading.Timer(0.05, may_end.set).start()
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    beside.submit(lambda: may_end.wait(60) and seen.append(1))
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    beside.submit(seen.append, 2)
    assert seen == [1, 2]
    beside.shutdown()
