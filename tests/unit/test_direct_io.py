"""Reads past the page cache: short ones, file systems that refuse them, files that are opened once."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from support.simulated import probed

from tpde.errors import InvalidInput
from tpde.host.direct_io import BLOCK, Files
from tpde.io.sources import FileSource

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file system reads past its cache: what is asked for is that it does not."""
    if not hasattr(os, "O_DIRECT") or not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs direct reads, and /proc")
    monkeypatch.setattr(os, "O_DIRECT", 0)


@pytest.mark.usefixtures("everywhere")
def test_short_direct_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(8 * BLOCK)
    path = tmp_path / "file"
    path.write_bytes(data)
    source, files, real, out = FileSource(path), Files(), os.preadv, bytearray(len(data))

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        assert descriptor != source.fileno(), "it is read past the page cache"
        assert offset % BLOCK == 0
        return real(descriptor, [buffers[0][: 3 * BLOCK // 2]], offset)

    monkeypatch.setattr(os, "preadv", short)
    files.read(source, 0, memoryview(out), len(data))
    assert bytes(out) == data
    files.close()
    source.close()


@pytest.mark.usefixtures("everywhere")
def test_files_that_were_opened_for_direct_reads_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    source, files = FileSource(path), Files()
    before = len(os.listdir("/proc/self/fd"))
    assert files.direct(source)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
    source.close()


def test_two_threads_open_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    source, opened, real, found = FileSource(path), list[str](), os.open, list[bool]()
    files, probe = probed(Files, "Lock")

    def read() -> None:
        found.append(files.direct(source))
        probe.asked.set()  # had it not asked

    other = threading.Thread(target=read)

    def slow(name: str, flags: int) -> int:
        opened.append(name)
        if len(opened) == 1:
            other.start()
            assert probe.asked.wait(60)
        return real(name, flags)

    monkeypatch.setattr(os, "open", slow)
    past = files.direct(source)
    other.join()
    files.close()
    source.close()
    assert len(opened) == 1
    assert found == [past], "both read past the page cache, or neither"


def test_files_that_were_closed_are_opened_again(tmp_path: Path) -> None:
    path, out = tmp_path / "file", memoryview(mmap.mmap(-1, BLOCK))
    path.write_bytes(b"abc" * 4096)
    source, files = FileSource(path), Files()
    for _ in range(2):
        files.read(source, 0, out, 100)
        assert bytes(out[:100]) == (b"abc" * 4096)[:100]
        files.close()
        out[:100] = bytes(100)
    source.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_file_systems_that_refuse_direct_reads(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read through the page cache from then on; a disk that fails is not tried again."""
    path, out = tmp_path / "file", memoryview(mmap.mmap(-1, BLOCK))
    path.write_bytes(b"abc" * 4096)
    source, files, real, tried = FileSource(path), Files(), os.preadv, list[int]()

    def preadv(descriptor: int, *args: Any) -> int:
        if descriptor != source.fileno():
            tried.append(descriptor)
            raise OSError(code, os.strerror(code))
        return real(descriptor, *args)

    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output") if code == errno.EIO else nullcontext():
            files.read(source, 0, out, 100)
            assert bytes(out[:100]) == (b"abc" * 4096)[:100]
            assert not out[100:].tobytes().strip(b"\0"), "no more than was asked for"
    assert len(tried) == (2 if code == errno.EIO else 1)
    files.close()
    source.close()


def test_a_directory_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a directory, not a regular file; name a file"):
        FileSource(tmp_path)
