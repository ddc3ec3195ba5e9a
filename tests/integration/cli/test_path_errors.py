"""Paths that cannot be read or written, and disks that are full: exit codes and messages."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.cli import Outcome, Run
from support.commands import process
from support.folders import names

from tpde.cli import common


def test_missing_source(run: Run, tmp_path: Path) -> None:
    gone = tmp_path / "gone.safetensors"
    for args in (["pack", gone, "t"], ["unpack", gone, "t"], ["verify", gone], ["inspect", gone]):
        run(*args).failed(2, "gone.safetensors` does not exist", "check the path")


def test_unreadable_source(run: Run, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:  # root may read everything
        if os.fspath(path) == str(plain):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opener(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    run("pack", plain, tmp_path / "t").failed(2, "may not be read by this user", "change its permissions")


def test_permissions_of_other_files(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.fspath(path).endswith(".json"):  # `config.json` and the index
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opener(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    run("pack", model, tmp_path / "t").failed(
        2, "(config|index).json` may not be read by this user", "change its permissions"
    )


def test_a_pipe_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for command in ("verify", "inspect"):
        run(command, tmp_path / "pipe.safetensors").failed(2, "is not a regular file", "name one")


def test_destinations_that_cannot_be(run: Run, plain: Path, model: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[object], str, str]] = [
        (["pack", plain, model], "exists already", "`--force`"),
        (["pack", plain, plain, "--force"], "is the source itself", f"such as `{tmp_path}/model-new.safeten"),
        (["pack", model, model], "is the source itself", f"choose .*, such as `{tmp_path}/model-new`"),
        (["pack", plain, tmp_path / "no" / "t"], "cannot be written", "create the folder first"),
        (["pack", plain, plain / "t"], "cannot be written: Not a directory", "choose another"),
        (["pack", plain, "/proc/t"], "`/proc/t` cannot be written", "."),
        (["pack", model, model / "t"], "lies inside the source", "outside it"),
        (["pack", model, plain / "t"], "cannot be written: Not a directory", "choose another"),
        (["inspect", plain, "--plot", "/proc/x.png"], "`/proc/x.png` cannot be written", "choose another"),
    ]
    before = names(tmp_path)
    for args, error, hint in cases:
        run(*args).failed(2, error, hint)
    assert names(tmp_path) == before


def test_a_file_is_written_to_no_name_that_ends_with_a_slash(
    run: Run, plain: Path, model: Path, tmp_path: Path
) -> None:
    """As `cp` writes none."""
    packed, delta = tmp_path / "packed", tmp_path / "delta"
    assert run("pack", plain, packed).code == 0
    assert run("diff", plain, plain, delta).code == 0
    before = names(tmp_path)
    for args in (["pack", plain], ["unpack", packed], ["diff", plain, packed], ["patch", plain, delta]):
        run(*args, f"{tmp_path}/new/").failed(2, "new/` names a folder", "leave out the slash")
    assert names(tmp_path) == before
    assert run("pack", model, f"{tmp_path}/new/").code == 0
    assert run("unpack", tmp_path / "new", f"{tmp_path}/restored/").code == 0


def test_read_only_folder(run: Run, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opener(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    run("pack", plain, tmp_path / "t").failed(
        2, "cannot be written: Permission denied", "change its permissions"
    )


@pytest.mark.parametrize("source", ["plain", "model"])
def test_full_disk(
    run: Run, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(source)
    before = names(tmp_path)

    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    run("pack", path, tmp_path / "t").failed(4, "t.*No space left on device", "make room")
    assert names(tmp_path) == before


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks the system for names of open files")
@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("command", ["pack", "unpack", "patch"])
def test_full_disk_when_other_files_come(
    run: Run, command: str, fails: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are not written as weights are."""
    packed, delta, other = (tmp_path / name for name in ("packed", "delta", "other"))
    (model / "notes.txt").write_text("text")
    shutil.copytree(model, other)
    (other / "notes.txt").write_text("another text")
    assert run("pack", model, packed).code == 0
    assert run("diff", model, other, delta).code == 0
    before, real = names(tmp_path), getattr(os, fails)

    def full(fd: int, *args: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(("notes.txt", "config.json")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(real(fd, *args) or 0)

    monkeypatch.setattr(os, fails, full)
    given = {"pack": [model], "unpack": [packed], "patch": [model, delta]}[command]
    run(command, *given, tmp_path / "t").failed(
        4, r"t/(notes.txt|config.json)`: .* failed.*: No space left on device; nothing was left", "make room"
    )
    assert names(tmp_path) == before


def test_file_size_limit(plain: Path, tmp_path: Path) -> None:
    code = (
        "import resource as r; from tpde.cli import main; r.setrlimit(r.RLIMIT_FSIZE, (20000, 20000)); main()"
    )
    before = names(tmp_path)
    done = process("pack", plain, tmp_path / "t", code=code)
    Outcome(done.returncode, done.stdout, done.stderr).failed(
        4, "File too large; nothing was left behind", "make room"
    )
    assert names(tmp_path) == before


def test_files_whose_names_are_not_utf8(run: Run, plain: Path, tmp_path: Path) -> None:
    name = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.safetensors"))
    try:
        plain.rename(name)
    except OSError:
        pytest.skip("this file system has names of Unicode only")
    packed = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xfe"))
    assert run("pack", name, packed, "--json").code == 0
    assert run("verify", packed, "--against", name).code == 0
    assert run("inspect", packed).code == 0
    assert run("unpack", packed, tmp_path / "again").code == 0
    assert (tmp_path / "again").read_bytes() == name.read_bytes()
    packed.write_bytes(b"x")
    found = run("unpack", packed, tmp_path / "other")
    found.failed(common.DAMAGED_INPUT, r"udcfe", "fetch")


def test_deltas_whose_bases_are_not_utf8(run: Run, plain: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has names of Unicode only")
    base = plain.rename(folder / "base")
    target = Path(os.fsdecode(os.fsencode(folder) + b"/\xfe"))
    target.write_bytes(base.read_bytes())
    before = names(tmp_path)
    run("diff", base, target, tmp_path / "delta").failed(
        2, r"cannot hold the path of its base, `\\udcff/base`, which", "rename what is not UTF-8"
    )
    assert names(tmp_path) == before
    assert run("diff", base, target, folder / "delta").code == 0  # beside which the base has a name of UTF-8
    assert run("verify", folder / "delta").code == 0
