"""Renaming where the system cannot rename without replacing, and what is left by other users."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from support import renames

from tpde.io import sinks, temporary
from tpde.io.rename import exchange, rename_new


@pytest.fixture(params=[True, False], ids=["with the call", "without"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        renames.missing(monkeypatch)


@pytest.mark.usefixtures("system")
def test_a_file_gets_its_name_once(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("a")
    rename_new(old, new)
    assert [it.name for it in tmp_path.iterdir()] == ["new"]
    old.write_text("b")
    with pytest.raises(FileExistsError):
        rename_new(old, new)
    assert (old.read_text(), new.read_text()) == ("b", "a")


@pytest.mark.usefixtures("system")
def test_what_was_linked_before_loses_its_old_name(tmp_path: Path) -> None:
    """As a kill between linking and removing leaves it."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("a")
    os.link(old, new)
    rename_new(old, new)
    assert [it.name for it in tmp_path.iterdir()] == ["new"]


@pytest.mark.usefixtures("system")
def test_a_folder_takes_no_folders_place(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    with pytest.raises(FileExistsError):
        rename_new(old, new)
    assert (new / "file").read_text() == "new"


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    renames.missing(monkeypatch)
    monkeypatch.setattr(os, "link", no_link)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("a")
    rename_new(old, new)
    assert new.read_text() == "a"
    old.write_text("b")
    with pytest.raises(FileExistsError):
        rename_new(old, new)
    assert new.read_text() == "a"


def test_an_exchange_is_one_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.write_text(path.name)
    if exchange(one, other):
        assert (one.read_text(), other.read_text()) == ("other", "one")
        exchange(one, other)
    renames.missing(monkeypatch)
    assert not exchange(one, other)
    assert (one.read_text(), other.read_text()) == ("one", "other")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_a_file_system_that_does_not_take_the_flags(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames.refused(monkeypatch, code)
    (tmp_path / "old").write_text("a")
    assert not exchange(tmp_path / "old", tmp_path / "old")
    rename_new(tmp_path / "old", tmp_path / "new")
    assert [it.name for it in tmp_path.iterdir()] == ["new"]


def test_other_errors_are_told_with_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renames.refused(monkeypatch, errno.EIO)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("a")
    for call in (exchange, rename_new):
        with pytest.raises(OSError, match="Input/output error") as caught:
            call(old, new)
        assert (caught.value.errno, caught.value.filename, caught.value.filename2) == (
            errno.EIO,
            str(old),
            str(new),
        )
    assert [it.name for it in tmp_path.iterdir()] == ["old"]


@pytest.mark.usefixtures("system")
def test_a_link_that_leads_nowhere_is_something_and_is_moved_as_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "new").symlink_to("nothing")
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "file", tmp_path / "new")
    rename_new(tmp_path / "new", tmp_path / "newer")
    assert os.readlink(tmp_path / "newer") == "nothing"
    assert sorted(it.name for it in tmp_path.iterdir()) == ["file", "newer"]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("what", ["a file", "a link", "a full folder"])
def test_a_folder_takes_the_place_of_nothing(what: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    if what == "a file":
        new.write_text("b")
    elif what == "a link":
        new.symlink_to("nothing")
    else:
        new.mkdir()
        (new / "x").touch()
    with pytest.raises(FileExistsError):
        rename_new(old, new)
    assert old.is_dir()
    with pytest.raises(FileNotFoundError):
        rename_new(old, tmp_path / "none" / "new")
    rename_new(old, tmp_path / "free")
    assert (tmp_path / "free").is_dir()


def test_a_dangling_link_is_not_replaced_without_links_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    renames.missing(monkeypatch)
    monkeypatch.setattr(os, "link", no_link)
    (tmp_path / "old").write_text("a")
    (tmp_path / "new").symlink_to("nothing")
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").is_symlink()


# ---- what killed processes left


def test_what_is_left_is_told_by_its_name_its_kind_and_its_lock(tmp_path: Path) -> None:
    ours = [".x.01234567.tpde-tmp", ".a\nb.89abcdef.tpde-tmp", "..00000000.tpde-tmp"]
    others = [
        ".x.0123456.tpde-tmp",
        ".x.0123456G.tpde-tmp",
        "x.01234567.tpde-tmp",
        ".x.01234567.tpde-tmp2",
        "x",
    ]
    for name in (*ours, *others):
        (tmp_path / name).touch()
    (tmp_path / ".f.01234567.tpde-tmp").mkdir()
    os.mkfifo(tmp_path / ".p.01234567.tpde-tmp")
    (tmp_path / ".l.01234567.tpde-tmp").symlink_to("x")
    lives, descriptor = temporary.create(
        tmp_path / "lives", lambda it: os.open(it, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    )
    found = sorted(it.name for it in temporary.abandoned(tmp_path))
    assert found == sorted([*ours, ".f.01234567.tpde-tmp"])
    before = {it.name for it in tmp_path.iterdir()}
    temporary.clear_files(tmp_path)
    assert {it.name for it in tmp_path.iterdir()} == before - set(ours)
    os.close(descriptor)
    assert lives in set(temporary.abandoned(tmp_path))
    assert list(temporary.abandoned(tmp_path / "nothing")) == []


def test_what_is_looked_at_is_locked_meanwhile_and_free_again(tmp_path: Path) -> None:
    (tmp_path / ".x.01234567.tpde-tmp").touch()
    found = temporary.abandoned(tmp_path)
    path = next(found)
    with path.open("r+") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert list(found) == []
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_cannot_be_locked_is_made_and_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be locked, nobody's work is told from what was left."""

    def cannot(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", cannot)
    path, descriptor = temporary.create(
        tmp_path / "x", lambda it: os.open(it, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    )
    os.close(descriptor)
    assert list(temporary.abandoned(tmp_path)) == []
    temporary.clear_files(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("step", ["made", "locked"])
def test_an_interrupt_leaves_neither_a_file_nor_a_descriptor(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def make(path: Path) -> int:
        opened.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        if step == "made":
            os.close(opened[0])
            raise KeyboardInterrupt
        return opened[0]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        temporary.create(tmp_path / "x", make)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_file_system_that_tells_no_file_again_is_given_up(tmp_path: Path) -> None:
    opened: list[int] = []

    def make(path: Path) -> int:
        assert len(opened) < 1000
        opened.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        os.unlink(path)
        return opened[-1]

    with pytest.raises(OSError, match="gone at once") as caught:
        temporary.create(tmp_path / "x", make)
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(tmp_path / "x"))
    assert len(opened) > 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(max(opened))


def test_a_file_that_cannot_be_made_is_told_as_it_is(tmp_path: Path) -> None:
    def make(path: Path) -> int:
        path.touch()  # somebody else's
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    with pytest.raises(FileExistsError):
        temporary.create(tmp_path / "x", make)
    assert len(list(tmp_path.iterdir())) == 1


def test_removing_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "link", "nothing"):
        temporary.remove(tmp_path / name)
    assert sorted(it.name for it in tmp_path.rglob("*")) == ["kept", "x"]


def test_what_another_user_left_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = temporary.temporary_name(tmp_path / "x")
    left.write_text("half")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    temporary.clear_files(tmp_path)
    assert left.exists()
    monkeypatch.undo()
    temporary.clear_files(tmp_path)
    assert not left.exists()


# ---- files that are written ----


def test_a_file_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not synced may be lost with the power, in any order."""
    done: list[str] = []
    fsync, path = os.fsync, tmp_path / "x"

    def synced(descriptor: int) -> None:
        is_folder = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        done.append(f"{'folder' if is_folder else 'file'}{', named' * path.exists()}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    made = sinks.FileSink(path)
    made.write(0, [b"abc"])
    made.commit()
    assert done == ["file", "folder, named"]


@pytest.mark.parametrize("mode", [0o600, 0o640, None])
def test_others_may_not_read_what_is_being_written_of_a_private_file(
    tmp_path: Path, mode: int | None
) -> None:
    before = os.umask(0)
    try:
        made = sinks.FileSink(tmp_path / "x", mode=mode)
        (temporary_file,) = tmp_path.iterdir()
        assert temporary_file.stat().st_mode & 0o777 == (0o666 if mode is None else 0o600)
        made.commit()
        assert (tmp_path / "x").stat().st_mode & 0o777 == (0o666 if mode is None else mode)
    finally:
        os.umask(before)
