"""Folders and files are replaced at once, and with them nothing that is not theirs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.folders import NEW, names, visible

from tpde.errors import InvalidDestination
from tpde.files.operations import pack, unpack
from tpde.store.diffing import diff
from tpde.store.patching import patch


def test_force_carries_over_what_was_never_looked_at(model: Path, old: Path, way: str) -> None:
    pack(model, old, force=True)
    assert names(old) == NEW
    assert (old / ".cache/deep/notes").read_text() == "notes"
    assert os.readlink(old / "link") == "/nowhere"
    assert stat.S_ISFIFO((old / "pipe").lstat().st_mode)
    unpack(old, model.with_name("back"))
    pack(model, old, force=True)  # of its own kind
    assert names(old) == NEW
    assert visible(old.parent) == ["back", "model", "there"]


def test_force_keeps_what_appeared_while_packing(model: Path, old: Path, way: str) -> None:
    def appear(_: int) -> None:
        (old / "thesis.txt").write_text("a year of work")
        (old / "sub").mkdir(exist_ok=True)
        (old / "sub" / "more").write_text("more")

    pack(model, old, force=True, progress=appear)
    assert names(old) == NEW | {"thesis.txt", "sub", "sub/more"}
    assert (old / "thesis.txt").read_text() == "a year of work"


def test_force_keeps_a_file_that_changed_while_packing(
    model: Path, old: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    pack(model, old, force=True, progress=lambda _: (old / "config.json").write_text("edited") and None)
    (kept,) = old.parent.glob("there.replaced-*")
    assert (kept / "config.json").read_text() == "edited"
    assert names(kept) == {"config.json"}
    assert names(old) == NEW
    assert kept.name in caplog.text


def _same_size(path: Path) -> None:
    path.write_text('{"a": "OLD"}')


def _same_time(path: Path) -> None:
    before = path.stat()
    path.write_text("edited")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _another_file(path: Path) -> None:
    before, other = path.stat(), path.with_name("other")
    other.write_text('{"a": "OLD"}')
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def _a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("change", [_same_size, _same_time, _another_file, _a_link])
def test_force_tells_a_file_that_changed_by_each_of_its_marks(
    change: Callable[[Path], None], model: Path, old: Path
) -> None:
    done: list[int] = []

    def once(_: int) -> None:
        if not done:
            change(old / "config.json")
        done.append(1)

    pack(model, old, force=True, progress=once)
    (kept,) = old.parent.glob("there.replaced-*")
    assert names(kept) == {"config.json"}
    assert names(old) == NEW


def test_a_link_of_the_model_is_removed_and_what_it_leads_to_is_not(model: Path, old: Path, way: str) -> None:
    (old.parent / "elsewhere").write_text("theirs")
    (old / "config.json").unlink()
    (old / "config.json").symlink_to("../elsewhere")
    pack(model, old, force=True)
    assert names(old) == NEW
    assert not (old / "config.json").is_symlink()
    assert (old.parent / "elsewhere").read_text() == "theirs"
    assert visible(old.parent) == ["elsewhere", "model", "there"]


def test_what_is_carried_over_keeps_its_permissions(model: Path, old: Path, way: str) -> None:
    modes = {".cache": 0o751, ".cache/deep": 0o700, ".cache/deep/notes": 0o640, "logs": 0o705}
    for name, mode in modes.items():
        (old / name).chmod(mode)
    inode = (old / ".cache/deep/notes").stat().st_ino
    pack(model, old, force=True)
    assert {name: stat.S_IMODE((old / name).stat().st_mode) for name in modes} == modes
    assert (old / ".cache/deep/notes").stat().st_ino == inode


def test_a_folder_takes_no_links_place_and_a_link_no_folders(
    model: Path, old: Path, tmp_path: Path, way: str
) -> None:
    """What is carried over goes through no link, neither out of the old folder nor into the new one."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    (old / "to sub").mkdir()
    os.mkfifo(old / "to sub" / "pipe")
    for name in ("folder", "sub"):
        (model / name).mkdir()
        (model / name / "of the model").touch()
    (model / "to sub").symlink_to("sub")

    def appear(_: int) -> None:
        if not (old / "folder").is_symlink():
            (old / "folder").symlink_to("../theirs")

    pack(model, old, force=True, progress=appear)
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"
    assert names(old / "folder") == names(old / "sub") == {"of the model"}
    assert (old / "to sub").is_symlink()
    (kept,) = tmp_path.glob("there.replaced-*")
    assert names(kept) == {"folder", "to sub", "to sub/pipe"}
    assert (kept / "folder").is_symlink()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody change a folder that its owner may not write to, not even root."""
    for call in ("unlink", "rmdir"):
        real = getattr(os, call)

        def checked(path: Any, *args: Any, real: Any = real, **options: Any) -> None:
            if options.get("dir_fd") is None and not os.stat(os.path.dirname(path)).st_mode & stat.S_IWUSR:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            real(path, *args, **options)

        monkeypatch.setattr(os, call, checked)


def test_folders_that_may_not_be_written_to_are_replaced_all_the_same(
    model: Path, old: Path, strict: None, way: str
) -> None:
    (model / "sub" / "deep").mkdir(parents=True)
    (model / "sub" / "deep" / "notes").touch()
    pack(model, old, force=True)
    before = names(old)
    for name in ("sub/deep", "sub", ""):
        (old / name).chmod(0o555)
    pack(model, old, force=True)
    assert names(old) == before
    assert stat.S_IMODE((old / "sub").stat().st_mode) & 0o700 == 0o700
    assert visible(old.parent) == ["model", "there"]


def test_a_folder_replaces_links_but_no_files_or_devices(model: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "link2").symlink_to("file")
    (tmp_path / "file").write_text("theirs")
    os.mkfifo(tmp_path / "pipe")
    pack(model, tmp_path / "packed")
    diff(model, model, tmp_path / "delta")
    for call in (
        partial(pack, model, tmp_path / "file"),
        partial(unpack, tmp_path / "packed", tmp_path / "file"),
        partial(patch, model, tmp_path / "delta", tmp_path / "file"),
    ):
        for force in (False, True):
            with pytest.raises(InvalidDestination, match="file` is a file, which is never replaced by a"):
                call(force=force)
    for name in ("link", "link2"):
        pack(model, tmp_path / name, force=True)
        assert (tmp_path / name / "config.json").is_file()
        assert not (tmp_path / name).is_symlink()
    assert names(tmp_path / "victim") == {"file"}
    assert (tmp_path / "file").read_text() == "theirs"
    for source in (model, model / "model.safetensors"):
        for force in (False, True):
            with pytest.raises(InvalidDestination, match=r"pipe` is a pipe, which is never replaced"):
                pack(source, tmp_path / "pipe", force=force)
    assert visible(tmp_path) == ["delta", "file", "link", "link2", "model", "packed", "pipe", "victim"]
