"""Host memory is given back with its last reference: neither progress nor errors keep it."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
from support.host import extents
from support.locking import FakeLock

from tpde.errors import Corrupt, Truncated
from tpde.host.pinned import HostMemory
from tpde.io.sources import Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.mark.parametrize("refused", [False, True])
def test_progress(fake: FakeLock, source: FileSource, refused: bool) -> None:
    """As many bytes as there are, also where they are brought in twice."""
    fake.refuse = lambda read_only, locked: refused and read_only and locked == 1
    seen: list[int] = []
    memory = HostMemory(extents(source), fake, progress=seen.append)
    memory.complete()
    assert sum(seen) == sum(it.size for it in extents(source))
    assert min(seen) > 0
    memory.close()


def test_given_back_with_the_last_reference(fake: FakeLock, source: FileSource) -> None:
    memory = HostMemory(extents(source), fake)
    memory.complete()
    assert fake.locked
    del memory
    gc.collect()
    assert not fake.locked


class _App:
    """Has memory, and is told of its progress."""

    def __init__(self, source: FileSource, fake: FakeLock, fails: bool) -> None:
        self.fails = fails
        self.memory = HostMemory(extents(source), fake, mode="arena", progress=self.told)

    def told(self, nbytes: int) -> None:
        if self.fails:
            raise _Odd


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_progress_that_knows_the_memory_does_not_keep_it(
    fails: bool, wanted: bool, fake: FakeLock, source: FileSource
) -> None:
    app = _App(source, fake, fails)
    with pytest.raises(_Odd) if fails and wanted else nullcontext():
        if wanted:
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

    memory = HostMemory(extents(source), fake, mode="arena")
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

    monkeypatch.setattr(mmap, "mmap", Map)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    memory = HostMemory(extents(source), fake, mode="arena")
    with pytest.raises(Truncated):
        memory.complete()
    memory.close()
    assert [it.closed for it in made] == [True]
