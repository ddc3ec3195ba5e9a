"""Renaming where the system cannot rename without replacing, and what is left by other users."""

from __future__ import annotations

import errno
import os
import types
from pathlib import Path
from typing import Any

import pytest

from tpde.format import rename, sink, temporary
from tpde.format.rename import exchange, rename_new


@pytest.fixture(params=[True, False], ids=["with the call", "without"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(rename, "_LIBC", types.SimpleNamespace())


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

    monkeypatch.setattr(rename, "_LIBC", types.SimpleNamespace())
    monkeypatch.setattr(rename.os, "link", no_link)
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
    monkeypatch.setattr(rename, "_LIBC", types.SimpleNamespace())
    assert not exchange(one, other)
    assert (one.read_text(), other.read_text()) == ("one", "other")


def test_what_another_user_left_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = temporary.temporary_name(tmp_path / "x")
    left.write_text("half")
    me = os.geteuid()
    monkeypatch.setattr(temporary.os, "geteuid", lambda: me + 1)
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
    fsync, sync_folder, path = os.fsync, sink.sync_folder, tmp_path / "x"

    def synced(descriptor: int) -> None:
        done.append("file, named" if path.exists() else "file")
        fsync(descriptor)

    def folder_synced(folder: Path) -> None:
        assert folder == tmp_path
        done.append("folder, named" if path.exists() else "folder")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            sync_folder(folder)

    monkeypatch.setattr(sink.os, "fsync", synced)
    monkeypatch.setattr(sink, "sync_folder", folder_synced)
    made = sink.FileSink(path)
    made.write(0, [b"abc"])
    made.commit()
    assert done == ["file", "folder, named"]


@pytest.mark.parametrize("mode", [0o600, 0o640, None])
def test_others_may_not_read_what_is_being_written_of_a_private_file(
    tmp_path: Path, mode: int | None
) -> None:
    before = os.umask(0)
    try:
        made = sink.FileSink(tmp_path / "x", mode=mode)
        (temporary_file,) = tmp_path.iterdir()
        assert temporary_file.stat().st_mode & 0o777 == (0o666 if mode is None else 0o600)
        made.commit()
        assert (tmp_path / "x").stat().st_mode & 0o777 == (0o666 if mode is None else mode)
    finally:
        os.umask(before)
