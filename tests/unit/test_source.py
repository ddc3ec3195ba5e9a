"""Sources give the bytes asked for or say that the file ends."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from support.contents import fill, spec_of
from support.craft import bounded
from support.files import pack_bytes, safetensors_bytes

from tpde.errors import InvalidDestination, InvalidInput, TpdeError, Truncated
from tpde.files.operations import unpack
from tpde.files.reader import PackedFile
from tpde.io.sinks import FileSink
from tpde.io.sources import BytesSource, FileSource, read


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


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "loop"])
def test_names_that_no_file_can_have_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidInput, match="cannot be opened") as caught:
        FileSource(str(tmp_path / name))
    assert caught.value.hint == "check the path"
    assert caught.value.message.count("cannot be opened") == 1


def test_when_too_many_files_are_open_the_path_is_not_to_blame(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))  # what is open stays so
    try:
        with pytest.raises(InvalidInput, match="Too many open files") as reading:
            FileSource(tmp_path / "x")
        with pytest.raises(InvalidDestination, match="Too many open files") as writing:
            FileSink(tmp_path / "y")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reading.value.hint == writing.value.hint == "close some, or raise the limit (`ulimit -n`)"


def test_what_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InvalidInput, match="may not be read by this user") as caught:
        FileSource(tmp_path / "x")
    assert (caught.value.hint, caught.value.where) == ("change its permissions", str(tmp_path / "x"))


def test_views_are_of_memory_alone_and_within_it(source: Any) -> None:
    if isinstance(source, FileSource):
        assert source.view(0, 10) is None
        return
    for offset, size in ((0, 100), (97, 3), (100, 0)):
        assert bytes(source.view(offset, size)) == bytes(range(100))[offset : offset + size]
    for offset, size in ((0, 101), (100, 1), (200, 0)):
        with pytest.raises(Truncated, match=r"some\.file") as caught:
            source.view(offset, size)
        assert (caught.value.found, caught.value.needed) == (100, offset + size)


def test_what_was_closed_is_not_read(source: Any) -> None:
    source.close()
    with pytest.raises(InvalidInput, match="is closed"):
        source.read_into(0, memoryview(bytearray(1)))


def test_memory_of_any_shape_is_bytes() -> None:
    import numpy as np

    found = BytesSource(np.arange(6, dtype=np.uint16).reshape(2, 3))
    assert found.size == 12
    assert read(found, 2, 4) == b"\1\0\2\0"


def test_a_stream_begins_at_the_start_and_leaves_the_file_open(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    source = FileSource(tmp_path / "x")
    for _ in range(2):
        with source.stream() as stream:
            assert stream.read(4) == b"0123"
    assert read(source, 8, 2) == b"89"
    assert os.fstat(source.fileno()).st_size == source.size == 10
    source.close()
