"""A destination appears whole or not at all, whatever fails."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import DestinationExists, InvalidDestination
from tpde.files.file_writer import FileWriter
from tpde.files.operations import pack, unpack
from tpde.io import sinks
from tpde.io.sinks import (
    BytesSink,
    FileSink,
    ValueSink,
    kind_of,
    refuse_file,
    require_writable,
    sync_folder,
    unwritable,
)

SPEC = spec_of("BF16", 30_000)
DATA = fill("normal", SPEC)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(safetensors_bytes({"w": (SPEC, DATA), "v": (SPEC, DATA)}))
    pack(path, folder / "packed.safetensors")
    return path


def _fail(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0, module: Any = os) -> None:
    """Let a system call fail as on a full disk, after some calls that do not."""
    real: Callable[..., Any] = getattr(module, name)
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize(
    ("call", "after"), [("pwritev", 0), ("pwritev", 1), ("pwritev", 2), ("fsync", 0), ("replace", 0)]
)
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("action", [pack, unpack])
def test_a_full_disk_leaves_what_was_there(
    call: str, after: int, exists: bool, action: Any, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    if exists:
        (out / "file").write_text("old")
    path = source if action is pack else source.with_name("packed.safetensors")
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with monkeypatch.context() as patch:
        if call == "replace" and not exists:
            _fail(patch, "rename_new", module=sinks)
        else:
            _fail(patch, call, after)
        with pytest.raises(OSError, match="No space left"):
            action(path, out / "file", force=exists)
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [p.name for p in out.iterdir()] == (["file"] if exists else [])
    if exists:
        assert (out / "file").read_text() == "old"
        action(path, out / "file", force=True)
        assert (out / "file").stat().st_size > 3


def _write(path: Path, data: bytes, error: BaseException | None = None) -> None:
    with FileWriter(path, {"w": SPEC}) as writer:
        writer.write("w", data)
        if error is not None:
            raise error


def test_an_exception_between_pieces_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError, match="mine"):
        _write(path, DATA[:1000], RuntimeError("mine"))
    with pytest.raises(KeyboardInterrupt):
        _write(path, DATA, KeyboardInterrupt())
    with pytest.raises(ValueError, match="not complete"):
        _write(path, DATA[:1000])
    assert not list(tmp_path.iterdir())


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with FileWriter(path, {"w": SPEC}) as writer:
        writer.write("w", DATA)
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_what_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    sink = FileSink(path)
    sink.write(0, [b"mine"])
    path.write_text("theirs")
    with pytest.raises(DestinationExists):
        sink.commit()
    sink.abort()
    assert path.read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_destinations_that_cannot_be_say_why(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    with pytest.raises(DestinationExists, match=r"there.*--force"):
        FileSink(tmp_path / "there")
    with pytest.raises(InvalidDestination, match="is a folder"):
        FileSink(tmp_path, force=True)
    with pytest.raises(InvalidDestination, match="create the folder first"):
        FileSink(tmp_path / "no" / "file")
    with pytest.raises(InvalidDestination):
        FileSink(tmp_path / "there" / "file")


@pytest.mark.parametrize("kind", ["file", "bytes"])
def test_writes_may_come_in_any_order_and_number(kind: str, tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "x") if kind == "file" else BytesSink()
    sink.write(5, [b"", b"fg", bytearray(b"h"), memoryview(b"ij")])
    sink.write(0, [bytes([97 + i]) for i in range(5)])
    sink.write(12, [b"m"])
    sink.write(20, [bytes([i % 256]) for i in range(3000)])  # more buffers than one call takes
    sink.write(3, [])
    sink.commit()
    found = (tmp_path / "x").read_bytes() if isinstance(sink, FileSink) else bytes(sink.data)
    assert found == b"abcdefghij\0\0m".ljust(20, b"\0") + bytes(i % 256 for i in range(3000))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, []

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(offset)
        assert len(calls) <= 30  # of 200 bytes
        first = next(memoryview(b) for b in buffers if len(b))
        return real(fd, [first[:7]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    sink = FileSink(tmp_path / "x")
    sink.write(0, [bytes(range(100)), bytes(range(100, 200))])
    sink.commit()
    assert (tmp_path / "x").read_bytes() == bytes(range(200))


# ---- what may be replaced


def test_links_are_replaced_and_what_they_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("theirs")
    (tmp_path / "named").chmod(0o600)
    for target in ("named", "nothing"):
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(DestinationExists):
            FileSink(link)
        made = FileSink(link, force=True)
        made.write(0, [b"mine"])
        made.commit()
        assert not link.is_symlink()
        assert link.read_text() == "mine"
        (tmp_path / "new").touch()
        assert link.stat().st_mode == (tmp_path / "new").stat().st_mode  # neither the link's nor the other's
    assert (tmp_path / "named").read_text() == "theirs"
    assert not (tmp_path / "nothing").exists()


def test_pipes_and_sockets_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        for name, what in (("pipe", "a pipe"), ("socket", "a socket")):
            for force in (False, True):
                with pytest.raises(InvalidDestination, match=f"{name}` is {what}, which is never replaced"):
                    refuse_file(Path(name), force)
    with pytest.raises(InvalidDestination, match="is a device, which is never replaced"):
        refuse_file(Path(os.devnull), True)


def test_what_is_there_is_told_and_nothing_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert refuse_file(path, False) is refuse_file(path, True) is None
    path.write_text("old")
    found = refuse_file(path, True)
    assert found is not None
    assert found.st_size == 3
    with pytest.raises(DestinationExists) as caught:
        refuse_file(path, False)
    assert caught.value.where == str(path)
    with pytest.raises(InvalidDestination, match="cannot be written"):
        refuse_file(tmp_path / ("x" * 300), True)


def test_kinds_of_files_have_names() -> None:
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    assert {mode: kind_of(mode | 0o644) for mode in kinds} == kinds


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "change its permissions, or choose another destination",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file"), "create the folder first"),
        (OSError(errno.EROFS, "Read-only file system"), "choose another destination"),
    ],
)
def test_what_cannot_be_written_says_what_to_do(error: OSError, hint: str) -> None:
    found = unwritable(Path("x"), error)
    assert (found.message, found.hint, found.where) == (f"`x` cannot be written: {error.strerror}", hint, "x")


def test_a_place_for_a_file_is_known_before_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("new", "file"):
        require_writable(tmp_path / name)
    for path, says in ((tmp_path, "Is a directory"), (tmp_path / "no" / "x", "create the folder first")):
        with pytest.raises(InvalidDestination, match=says):
            require_writable(path)
    asked = []
    monkeypatch.setattr(
        os, "access", lambda path, how: asked.append((path, how))
    )  # root may write everywhere
    with pytest.raises(InvalidDestination, match="change its permissions"):
        require_writable(tmp_path / "new")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    assert [it.name for it in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["a folder", "a pipe"])
def test_what_is_never_replaced_may_appear_meanwhile(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    made = FileSink(path, force=True)
    path.mkdir() if what == "a folder" else os.mkfifo(path)
    with pytest.raises(InvalidDestination, match=what):
        made.commit()
    made.abort()
    assert [it.name for it in tmp_path.iterdir()] == ["x"]


# ---- the temporary file


def _free(path: Path) -> bool:
    """Whether nobody has locked a file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_locked_until_it_has_its_name(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes what killed processes left takes only what is not locked."""
    seen = []
    for module, name in ((sinks, "rename_new"), (os, "replace")):
        real = getattr(module, name)

        def renamed(old: Path, new: Path, real: Any = real) -> None:
            seen.append(_free(old))
            real(old, new)

        monkeypatch.setattr(module, name, renamed)
    path = tmp_path / "x"
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    made = FileSink(path, force=force)
    (temporary,) = tmp_path.iterdir()
    assert not _free(temporary)
    made.commit()
    assert seen == [False]
    assert _free(path)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_aborted_is_gone_also_twice_and_after_it_failed(tmp_path: Path) -> None:
    made = FileSink(tmp_path / "x")
    made.write(0, [b"abc"])
    assert len(list(tmp_path.iterdir())) == 1
    made.abort()
    made.abort()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("pwritev", "writing failed at byte 5: No space left on device; nothing was left behind"),
        ("fchmod", "completing the file failed: No space left on device; nothing was left behind"),
        ("fsync", "completing the file failed: No space left on device; nothing was left behind"),
        ("dup", "completing the file failed: No space left on device; nothing was left behind"),
        ("replace", "giving the file its name failed: No space left on device; nothing was left behind"),
    ],
)
def test_what_fails_is_told_by_the_files_own_name(
    call: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FileSink(tmp_path / "x", force=True, mode=0o600)

    def write() -> None:
        made.write(5, [b"abc"])
        made.commit()

    with monkeypatch.context() as patch:
        _fail(patch, call)
        with pytest.raises(OSError, match="No space") as caught:
            write()
    assert (caught.value.errno, caught.value.strerror) == (errno.ENOSPC, says)
    assert caught.value.filename == str(tmp_path / "x")
    made.abort()
    assert not list(tmp_path.iterdir())


def test_writing_goes_on_where_the_last_call_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, offsets = os.pwritev, []

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        offsets.append(offset)
        assert 0 < len(buffers) <= 512
        return real(fd, buffers[:2], offset)

    monkeypatch.setattr(os, "pwritev", short)
    made = FileSink(tmp_path / "x")
    made.write(10, [b"ab", b"", b"cd", b"ef", b"gh", b"i"])
    made.write(30, [b"", b""])  # nothing: the system is not asked
    made.commit()
    assert offsets == [10, 14, 18]
    assert (tmp_path / "x").read_bytes() == bytes(10) + b"abcdefghi"


def test_a_system_that_writes_nothing_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def nothing(*_: Any) -> int:
        assert len(asked) < 10
        asked.append(0)
        return 0

    monkeypatch.setattr(os, "pwritev", nothing)
    made = FileSink(tmp_path / "x")
    with pytest.raises(OSError, match="writing failed at byte 7: the system writes nothing") as caught:
        made.write(7, [b"abc"])
    assert caught.value.errno == errno.EIO
    made.abort()
    assert not list(tmp_path.iterdir())


# ---- names that outlast a loss of power


@pytest.mark.parametrize(
    "code", ["EINVAL", "ENOSYS", "ENOTSUP", "EOPNOTSUPP", "EBADF", "EACCES", "EPERM", "EIO"]
)
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_folders_are_synced_where_they_can_be(
    code: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(errno, code)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None

    def failing(*_: Any) -> None:
        raise OSError(number, "it failed")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        if code == "EIO":
            with pytest.raises(
                OSError, match="making names outlast a loss of power failed: it failed"
            ) as caught:
                sync_folder(tmp_path)
            assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
        else:
            sync_folder(tmp_path)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


# ---- bytes in memory


def test_what_is_skipped_is_zero_whatever_was_in_the_buffer() -> None:
    for capacity in (4, 64):
        made = BytesSink(buffer=np.full(capacity, 7, np.uint8))
        made.write(3, [b"ab"])
        made.write(9, [b"c"])
        made.write(1, [b"x"])
        assert bytes(made.data) == b"\0x\0ab\0\0\0\0c"
        made.abort()
        assert bytes(made.data) == b""


def test_a_buffer_grows_by_as_much_as_is_skipped() -> None:
    made = BytesSink(4)
    made.write(1000, [b"x" * 500])
    assert bytes(made.data) == bytes(1000) + b"x" * 500


def test_a_buffer_that_is_large_enough_is_kept() -> None:
    buffer = np.zeros(10, np.uint8)
    made = BytesSink(buffer=buffer)
    room = made.room(2, 8)
    assert room.size == 8
    room[:] = 5
    made.write(2, [room])  # was written there directly
    assert bytes(made.data) == b"\0\0" + b"\5" * 8
    assert np.shares_memory(np.frombuffer(made.data, np.uint8), buffer)
    made.write(10, [b"y"])
    assert bytes(made.data) == b"\0\0" + b"\5" * 8 + b"y"
    assert not np.shares_memory(np.frombuffer(made.data, np.uint8), buffer)


def test_growing_doubles_so_that_few_copies_are_made() -> None:
    made, grown = BytesSink(8), set()
    for at in range(4096):
        made.write(at, [bytes([at % 251])])
        grown.add(made.data.obj.size)  # type: ignore[attr-defined]
    assert bytes(made.data) == bytes(at % 251 for at in range(4096))
    assert len(grown) <= 11


def test_values_grow_and_are_not_copied_again() -> None:
    sink, first = ValueSink(), np.arange(5, dtype=np.uint8)
    sink.write(8, [first, b"", memoryview(b"xyz")])
    first[0] = 9  # it has been taken
    sink.write(0, [b"0123"])
    assert sink.room(3, 4) is None
    sink.commit()
    assert sink.value() == b"0123" + bytes(4) + bytes(range(5)) + b"xyz"
    sink.abort()
    assert sink.value() == b""
