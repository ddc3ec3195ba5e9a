"""Packed weights in host memory: which pages, and in which mode."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.host import MIB, Gate, at, bring_in_vain, check, content, extents, threads
from support.locking import SHIFT, FakeLock

from tpde.errors import InvalidInput, ReadError, UnsupportedDevice
from tpde.host.page_lock import STEP, steps
from tpde.host.pinned import HostMemory
from tpde.host.ranges import GAP_BYTES, PAGE, merge
from tpde.io.sources import BytesSource, Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.fixture
def small_steps(fake: FakeLock) -> None:
    fake.step = 4 * PAGE


def complete(wanted: list[Extent], fake: FakeLock) -> HostMemory:
    memory = HostMemory(wanted, fake)
    memory.complete()
    return memory


def test_locked_in_place(fake: FakeLock, source: FileSource) -> None:
    wanted = extents(source)
    memory = HostMemory(wanted, fake)
    assert (memory.kind, memory.private_bytes) == ("mapped", 0)
    assert all(read_only for _, read_only in fake.locked.values())
    # Pages 1 to 23, and from 4 MiB to the page in which the file ends.
    assert sorted(size for size, _ in fake.locked.values()) == [22 * PAGE, MIB + PAGE]
    assert memory.locked_bytes == fake.bytes
    check(fake, memory, wanted)
    inside = Extent(source, 5100, 300, "inside")
    across = Extent(source, 70_000, 20_000, "across")
    check(fake, memory, [inside, across])
    ticket = memory.request(inside)
    ticket.copied(None)
    ticket.cancel()
    assert ticket.ready()
    assert not memory.ahead
    memory.close()
    memory.close()
    assert not fake.locked
    with pytest.raises(ReadError, match="was given back"):
        memory.address(inside)


@pytest.mark.parametrize("before", [0, 1])
def test_an_arena_where_locking_in_place_is_refused(fake: FakeLock, source: FileSource, before: int) -> None:
    """At once, or from the second range on."""
    fake.refuse = lambda read_only, locked: read_only and locked == before
    memory = HostMemory(extents(source), fake)
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
        memory = complete(extents(source), fake)
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
    memory = HostMemory(extents(source), fake, mode=argument)
    assert memory.kind == mode
    assert fake.attempts == {"mapped": 2, "arena": 2, "pageable": 0}[mode]
    check(fake, memory, extents(source))
    memory.close()
    fake.refuse = lambda read_only, locked: True
    if mode != "pageable":
        with pytest.raises(UnsupportedDevice, match=r"cannot be page-locked.*CUDA_ERROR_NOT_SUPPORTED"):
            bring_in_vain(extents(source), fake, mode=argument)
    assert not fake.locked


def test_unknown_mode(fake: FakeLock, source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPDE_HOST_MEMORY", "fast")
    with pytest.raises(InvalidInput, match=r"`fast` is unknown; `TPDE_HOST_MEMORY` takes mapped, arena"):
        HostMemory(extents(source), fake)


def test_other_failures_are_reported(fake: FakeLock, source: FileSource) -> None:
    fake.error = UnsupportedDevice("page-locking failed: CUDA_ERROR_DEINITIALIZED")
    with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
        bring_in_vain(extents(source), fake)
    assert fake.attempts == 1
    assert not threads()


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_steps(mode: str, fake: FakeLock, source: FileSource) -> None:
    """What is locked at once ends at multiples of the step, wherever the memory lies."""
    wanted = extents(source)
    memory = HostMemory(wanted, fake, mode=mode)
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
def test_refused_within_a_range(after: int, used: bool, fake: FakeLock, source: FileSource) -> None:
    """It is copied as a whole, as those after it; what of it was locked stays so only if it is used."""
    gate, wanted = Gate(fake, after), extents(source)
    fake.refuse = lambda read_only, locked: read_only and locked == after

    def bring() -> HostMemory:
        memory = HostMemory(wanted, fake)
        memory.begin()
        assert gate.reached.wait(60)
        if used:
            early = wanted[0 if after == 3 else 3]
            memory.request(early._replace(size=100)).wait()
        gate.open.set()
        memory.complete()
        return memory

    memory = bring()
    assert memory.kind == "arena"
    first = after == 3  # all of it is copied, or only the second range
    assert memory.private_bytes == (23 * PAGE + MIB if first else MIB + PAGE)
    assert memory.locked_bytes == fake.bytes
    kept = sum(read_only for _, read_only in fake.locked.values())
    whole = sum(1 for _ in steps(memory.address(wanted[0]) // PAGE * PAGE, 22 * PAGE, fake.step))
    assert kept == (after if used else 0 if first else whole)
    check(fake, memory, wanted)
    memory.close()
    assert not fake.locked


@pytest.mark.usefixtures("small_steps")
def test_an_arena_that_is_locked_in_part(fake: FakeLock, source: FileSource) -> None:
    """It is locked as far as it may be."""
    fake.refuse = lambda read_only, locked: read_only or locked == 4
    with pytest.warns(RuntimeWarning, match="cannot be page-locked") as caught:
        memory = complete(extents(source), fake)
    assert f"({23 * PAGE + MIB - fake.bytes} bytes)" in str(caught[0].message), "what stays pageable"
    assert memory.kind == "pageable"
    assert memory.locked_bytes == fake.bytes
    assert len(fake.locked) == 4
    check(fake, memory, extents(source))
    assert memory.device_address(extents(source)[3]) is None
    memory.close()
    assert not fake.locked


@pytest.mark.usefixtures("small_steps")
def test_kernels_find_nothing_where_the_device_sees_it_in_pieces(fake: FakeLock, source: FileSource) -> None:
    far = iter(range(1 << 44, 1 << 60, 1 << 45))
    fake.there = lambda address: next(far)
    memory = HostMemory(extents(source), fake)
    assert memory.device_address(Extent(source, 5000, 100, "in one")) == (1 << 44) + 5000 - PAGE
    assert memory.device_address(extents(source)[0]) is None
    assert at(memory.address(extents(source)[0]), 70_000) == content(source, extents(source)[0])
    memory.close()


def test_kernels_read_no_further_than_to_what_the_device_sees_elsewhere(
    fake: FakeLock, source: FileSource
) -> None:
    """Though what follows is where it would be if all were in one piece."""
    fake.step, calls = PAGE, iter(range(100))
    fake.there = lambda address: address + (2 if next(calls) == 2 else 1) * SHIFT
    memory = HostMemory([Extent(source, 0, 5 * PAGE, "t")], fake)
    memory.complete()
    for pages, there in ((1, True), (2, True), (3, False), (5, False)):
        extent = Extent(source, 0, pages * PAGE, "part")
        assert memory.device_address(extent) == (memory.address(extent) + SHIFT if there else None)
    memory.close()


@given(st.integers(0, 1 << 48), st.integers(1, 1 << 30))
def test_cutting_into_steps(address: int, size: int) -> None:
    cuts = list(steps(address, size))
    assert sum(n for _, n in cuts) == size
    for (begin, n), follows in zip(cuts, [*(it for it, _ in cuts[1:]), size], strict=True):
        assert 0 < n == follows - begin
        assert (address + begin) // STEP == (address + follows - 1) // STEP


def test_what_was_not_asked_for(fake: FakeLock, source: FileSource) -> None:
    memory = HostMemory(extents(source), fake)
    for offset, size in ((0, 10), (4999, 5), (94_200, 100), (2 * MIB, 5), (4 * MIB - 1, 5)):
        with pytest.raises(ValueError, match="were not asked for"):
            memory.address(Extent(source, offset, size, "x"))
    with pytest.raises(ValueError, match="were not asked for"):
        memory.address(Extent(BytesSource(b"12345"), 0, 5, "x"))
    memory.close()


def test_bytes_that_are_no_file(fake: FakeLock, source: FileSource) -> None:
    other = BytesSource(os.urandom(5 * MIB))
    wanted = [*extents(other), *extents(source)]
    memory = HostMemory(wanted, fake)
    assert memory.kind == "arena"
    check(fake, memory, wanted)
    memory.close()


def test_nothing(fake: FakeLock) -> None:
    memory = HostMemory([], fake)
    assert (memory.kind, memory.locked_bytes) == ("mapped", 0)
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
    with tempfile.TemporaryDirectory() as folder:
        fake, sources = FakeLock(step), []
        for i in range(2):
            Path(folder, str(i)).write_bytes(os.urandom(1000) * (_SPAN // 1000) + os.urandom(i * 123))
            sources.append(FileSource(Path(folder, str(i))))
        wanted = [
            Extent(sources[i], offset, min(size, sources[i].size - offset), f"{i}:{offset}")
            for i, offset, size in places
            if offset < sources[i].size
        ]
        memory = HostMemory(wanted, fake, mode=mode)
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
