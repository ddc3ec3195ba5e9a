"""Files, disks and systems that fail while weights come to host memory."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.host import MIB, at, bring_in_vain, check, content, extents, threads
from support.locking import FakeLock

from tpde.errors import OutOfMemory, ReadError, Truncated
from tpde.host.pinned import HostMemory
from tpde.host.ranges import PAGE
from tpde.io.sources import Extent, FileSource

pytestmark = pytest.mark.usefixtures("bounded")


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
