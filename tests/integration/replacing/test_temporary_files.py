"""Temporary files and folders: what killed processes left is removed, and nothing of others."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.changes import content
from support.contents import fill, spec_of
from support.folders import names, visible

from tpde import diff
from tpde.errors import InvalidInput
from tpde.files import folder_swap
from tpde.files.file_writer import FileWriter
from tpde.files.operations import pack, unpack, verify
from tpde.io import temporary
from tpde.io.sinks import FileSink

SPEC = spec_of("BF16", 2_000)


def test_what_killed_processes_left_is_removed(model: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom tpde.io.sinks import FileSink\n"
        "s = FileSink(sys.argv[1]); s.write(0, [b'1']); os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run([sys.executable, "-c", code, str(out / "x")], check=False, timeout=100)
    (left,) = visible(out)
    assert left.startswith(".x.")
    pack(model / "model.safetensors", out / "y")
    assert visible(out) == ["y"]


JOURNALS: dict[str, Any] = {
    "nothing": None,
    "no JSON": "{",
    "no object": "[]",
    "half": '{"name": "there"',
    "no name": {"old": 1, "removable": {}},
    "no number": {"name": "there", "removable": {}},
    "no list": {"name": "there", "old": 1},
    "a number": {"name": 5, "old": 1, "removable": {}},
    "another folder": {"name": "../there", "old": 1, "removable": {}},
    "names that lead out": {"name": "there", "old": "new", "removable": {"../victim": "victim"}},
    "deep": "[" * 100_000,
    "no folder's number": {"name": "there", "old": None, "removable": {}},
    "a list": {"name": "there", "old": "new", "removable": ["victim"]},
    "numbers": {"name": "there", "old": "new", "removable": {"victim": 1}},
    "a pipe": os.mkfifo,
    "a path": {"name": "there", "old": "new", "removable": {"/victim": "victim"}},
}


@pytest.mark.parametrize("kind", JOURNALS)
def test_a_journal_from_a_stranger_removes_nothing(kind: str, tmp_path: Path) -> None:
    """What was only begun is removed; of what is not ours nothing is known."""
    out = tmp_path / "out"
    left = out / ".there.01234567.tpde-tmp"
    (left / "new").mkdir(parents=True)
    (left / "new" / "file").touch()
    (left / "victim").touch()
    (out / "there").mkdir()
    value = JOURNALS[kind]
    if isinstance(value, dict):
        info = (left / "victim").stat()
        victim = [info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IFMT(info.st_mode)]
        value = dict(value)
        if value.get("old") == "new":
            value["old"] = (left / "new").stat().st_ino
            if isinstance(value["removable"], dict) and 1 not in value["removable"].values():
                value["removable"] = dict.fromkeys(value["removable"], victim)
        value = json.dumps(value)
    if value is os.mkfifo:
        os.mkfifo(left / "journal")
    elif value is not None:
        (left / "journal").write_text(value)
    folder_swap.clear(out)
    if value is None:
        assert names(out) == {"there"}
    else:
        assert names(left) == {"new", "new/file", "victim", "journal"}
        assert (out / "there").is_dir()


def test_what_was_replaced_is_put_back_or_settled_by_the_next_run(tmp_path: Path) -> None:
    for there in (False, True):
        out = tmp_path / str(there)
        left = out / ".there.01234567.tpde-tmp"
        (left / "old").mkdir(parents=True)
        for name in ("model", "changed", "theirs"):
            (left / "old" / name).write_text(name)
        number = (left / "old").stat().st_ino
        identities = {}
        for name in ("model", "changed", "gone"):
            info = os.stat(left / "old" / (name if name != "gone" else "model"))
            identities[name] = [info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IFREG]
        identities["changed"][1] += 1
        if there:
            (out / "there").mkdir()
        (left / "journal").write_text(json.dumps({"name": "there", "old": number, "removable": identities}))
        folder_swap.clear(out)
        assert visible(out) == ["there"]
        assert names(out / "there") == ({"changed", "theirs"} if there else {"changed", "model", "theirs"})


def test_what_others_are_writing_is_not_removed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    other = FileSink(out / "x")
    other.write(0, [b"theirs"])
    names_of_others = [".x.tmp", ".tpde-tmp", "x.01234567.tpde-tmp", ".x.0123456g.tpde-tmp"]
    for name in names_of_others:
        (out / name).touch()
    (out / ".l.01234567.tpde-tmp").symlink_to(model)
    pack(model / "model.safetensors", out / "y")
    pack(model, out / "z")
    other.commit()
    assert (out / "x").read_bytes() == b"theirs"
    assert visible(out) == sorted([*names_of_others, ".l.01234567.tpde-tmp", "x", "y", "z"])


STRAY = ".x.01234567.tpde-tmp"


def test_files_of_a_model_with_temporary_names_survive(model: Path, tmp_path: Path) -> None:
    """Beside weights, which are files of their own: writing one removes nothing in a folder being made."""
    (model / "sub").mkdir()
    for name in (STRAY, f"sub/{STRAY}"):
        (model / name).write_text(name)
    for name in ("model.safetensors", "other.safetensors"):
        shutil.copy(model / "model.safetensors", model / "sub" / name)
    packed, back = tmp_path / "packed", tmp_path / "back"
    pack(model, packed)
    assert verify(packed, against=model) == []
    unpack(packed, back)
    assert content(back) == content(model)
    (packed / "tpde_manifest.json").unlink()  # as if it had been saved again
    unpack(packed, tmp_path / "again")
    assert content(tmp_path / "again").keys() == content(model).keys()


@pytest.mark.parametrize("source", [STRAY, f"{STRAY}/model", "link"])
def test_a_source_with_a_temporary_name_beside_the_destination_is_refused(
    source: str, model: Path, tmp_path: Path
) -> None:
    """It would be removed as what a killed process left, before anything is read of it."""
    (tmp_path / "link").symlink_to(STRAY)
    if "/" in source:
        (tmp_path / STRAY).mkdir()
    model.rename(tmp_path / source if source != "link" else tmp_path / STRAY)
    weights = tmp_path / source / "model.safetensors"
    for path in (tmp_path / source, weights):
        with pytest.raises(InvalidInput, match=rf"{STRAY}` has the name of a temporary file .*; rename it"):
            pack(path, tmp_path / "packed")
    with pytest.raises(InvalidInput, match=r"rename it first"):
        diff(weights, weights, tmp_path / "delta")
    assert weights.is_file()
    (tmp_path / "out").mkdir()
    pack(tmp_path / source, tmp_path / "out" / "packed")  # elsewhere nothing removes it


def test_a_temporary_name_fits(tmp_path: Path) -> None:
    for name in ("a" * 255, "é" * 127, "x" + "é" * 127):
        found = temporary.temporary_name(tmp_path / name)
        assert 253 < len(os.fsencode(found.name)) <= 255
        assert found.name.encode().startswith(f".{name[:9]}".encode()), "no character is cut"
        FileSink(tmp_path / name).commit()
        assert (tmp_path / name).exists()


def test_temporary_names_of_names_that_are_not_text_are_told_apart(tmp_path: Path) -> None:
    one, other = (tmp_path / os.fsdecode(it) for it in (b"\xfe", b"\xff"))
    assert temporary.stands_for(temporary.temporary_name(one), one)
    assert not temporary.stands_for(temporary.temporary_name(one), other)


def test_names_that_the_locale_has_no_letters_for_are_written(model: Path, tmp_path: Path) -> None:
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shutil.copy(model / "model.safetensors", tmp_path / "alone.safetensors")
    for source, there in (("model", "über"), ("alone.safetensors", "ü.safetensors")):
        for command, *places in (("pack", source, there), ("unpack", there, f"{there}.back")):
            call = [sys.executable, "-m", "tpde", command, *places]
            subprocess.run(call, cwd=tmp_path, env=os.environ | environment, check=True, timeout=100)
    assert content(tmp_path / "über.back") == content(model)
    assert (tmp_path / "ü.safetensors.back").read_bytes() == (model / "model.safetensors").read_bytes()


def test_whoever_cleans_up_in_between_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is created and then locked: one that is removed in between is created again."""
    made: list[Path] = []

    def make(path: Path) -> int:
        made.append(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if len(made) == 1:
            temporary.clear_files(tmp_path)
        return descriptor

    path, descriptor = temporary.create(tmp_path / "x", make)
    os.close(descriptor)
    assert len(made) == 2
    assert visible(tmp_path) == [path.name] == [made[1].name]


def test_a_close_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = os.close, []

    writer = FileWriter(tmp_path / "x", {"w": SPEC}, threads=1)
    writer.write("w", fill("normal", SPEC))
    (written,) = (it.stat() for it in tmp_path.iterdir())

    def once(descriptor: int) -> None:
        first = not failed and os.path.samestat(os.fstat(descriptor), written)
        if first or descriptor in failed:
            failed.append(descriptor)
        real(descriptor)
        if first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", once)
    with pytest.raises(OSError, match=r"closing the file failed: Input/output error.*x") as told:
        writer.close()
    assert told.value.errno == errno.EIO
    assert len(failed) == 1  # by then it may be another file's
    assert not list(tmp_path.iterdir())


def test_a_close_that_is_not_complete_leaves_nothing(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "x", {"w": SPEC})
    with pytest.raises(ValueError, match="not complete"):
        writer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_interrupt_while_a_temporary_is_made_leaves_nothing(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = "open" if what == "file" else "mkdir"
    real = getattr(os, call)

    def interrupted(path: Any, *args: Any, **options: Any) -> Any:
        result = real(path, *args, **options)
        if ".tpde-tmp" in str(path):
            if what == "file":
                os.close(result)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(model if what == "folder" else model / "model.safetensors", tmp_path / "x")
    assert visible(tmp_path) == ["model"]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for mode in (0o600, 0o640):
        path.touch()
        path.chmod(mode)
        with FileWriter(path, {"w": SPEC}, force=True) as writer:
            writer.write("w", fill("normal", SPEC))
        assert stat.S_IMODE(path.stat().st_mode) == mode
