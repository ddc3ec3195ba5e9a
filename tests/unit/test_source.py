"""Sources give the bytes asked for or say that the file ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.contents import fill, spec_of
from support.craft import bounded
from support.files import pack_bytes, safetensors_bytes

from tpde.errors import InvalidInput, TpdeError, Truncated
from tpde.format.source import BytesSource, FileSource, read
from tpde.packing.api import unpack
from tpde.packing.reader import PackedFile


@pytest.fixture(params=["file", "bytes"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> FileSource | BytesSource:
    data = bytes(range(100))
    (tmp_path / "some.file").write_bytes(data)
    if request.param == "file":
        return FileSource(tmp_path / "some.file")
    return BytesSource(data, "some.file")


def test_bytes_are_read_at_their_offset(source: Any) -> None:
    assert source.size == 100
    assert read(source, 0, 100) == bytes(range(100))
    assert read(source, 97, 3) == b"abc"
    assert read(source, 100, 0) == b""
    source.close()


def test_reading_past_the_end_is_truncated_before_allocating(source: Any) -> None:
    for offset, size in ((0, 101), (100, 1), (99, 2), (200, 1), (0, 1 << 60)):
        with bounded(1), pytest.raises(Truncated, match=r"some\.file.*fetch the rest"):
            read(source, offset, size)
    with pytest.raises(Truncated, match=r"some\.file.*fetch the rest"):
        source.read_into(98, memoryview(bytearray(3)))
    source.close()
    source.close()


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(200)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    source = FileSource(tmp_path / "x")
    assert read(source, 3, 190) == bytes(range(3, 193))
    source.close()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        FileSource(tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="not a regular file"):
        FileSource(tmp_path)
    if hasattr(os, "mkfifo"):
        (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
        with pytest.raises(InvalidInput, match="does not exist"):
            FileSource(tmp_path / "dangling")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    path, errors = tmp_path / "pipe", list[BaseException]()
    os.mkfifo(path)

    def work() -> None:
        try:
            FileSource(path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    waits = thread.is_alive()
    if waits:  # somebody who writes ends that
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(20)
    assert not waits
    assert isinstance(errors[0], InvalidInput)
    assert "not a regular file" in str(errors[0])


def test_a_file_that_shrinks_while_it_is_open_is_truncated(tmp_path: Path) -> None:
    spec = spec_of("BF16", 50_000)
    path = tmp_path / "x.safetensors"
    data = pack_bytes(
        safetensors_bytes({"a": (spec, fill("normal", spec)), "b": (spec, fill("random", spec))})
    )
    path.write_bytes(data)
    with PackedFile(path) as file:
        os.truncate(path, len(data) // 4)
        for name in ("a", "b"):
            with pytest.raises(Truncated, match=r"x\.safetensors"):
                file.read(name)
    with pytest.raises(TpdeError):
        unpack(path, tmp_path / "y")
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("kind", ["text", "folder", "pipe"])
def test_a_file_that_cannot_be_opened_is_closed(kind: str, tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no list of open files here")
    if kind == "text":
        (tmp_path / "x").write_bytes(b"no safetensors file")
    elif kind == "folder":
        (tmp_path / "x").mkdir()
    else:
        os.mkfifo(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(TpdeError):
            PackedFile(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before
