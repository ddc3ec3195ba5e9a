"""A destination appears whole or not at all, whatever fails."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import DestinationExists
from tpde.files.file_writer import FileWriter
from tpde.files.operations import pack, unpack
from tpde.io import sinks
from tpde.io.sinks import FileSink, sync_folder

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
