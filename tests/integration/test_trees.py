"""What is in a directory is kept, or named: files, links, folders, permissions."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import Corrupt, InvalidArgument, InvalidInput, MissingShard
from tpde.files.operations import pack, unpack, verify
from tpde.files.walk import stays_inside, walk
from tpde.format.constants import MANIFEST
from tpde.io.sources import FileSource

SPEC = spec_of("BF16", 3_000)
WEIGHTS = safetensors_bytes({"w": (SPEC, fill("normal", SPEC))}, {"format": "pt"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a model of one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, Any]:
    """Everything below a folder: bytes of files, targets of links, None for folders; and permissions."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name, mode = path.relative_to(folder).as_posix(), stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (None if path.is_dir() else path.read_bytes(), oct(mode))
    return found


def round_trip(model: Path) -> Path:
    """Pack, verify and unpack; returns the restored folder, which equals the source."""
    packed, back = model.with_name("packed"), model.with_name("back")
    assert not pack(model, packed).left_out
    assert verify(packed) == verify(packed, against=model) == []
    unpack(packed, back)
    assert contents(back) == contents(model)
    return back


def left_out(model: Path, **options: Any) -> dict[str, str]:
    """Pack; what was not taken, and why. What was is restored, and nothing says that it is all there is."""
    packed, back = model.with_name("packed"), model.with_name("back")
    found = {it.name: it.reason for it in pack(model, packed, **options).left_out}
    assert verify(packed) == []
    unpack(packed, back)
    assert found.keys().isdisjoint(contents(back))
    said = invoke("verify", packed, "--against", model)
    assert "equal" not in said.stdout
    for name in found:
        assert name in said.stdout + said.stderr
    return found


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such names")
def test_names_with_colons_and_backslashes(model: Path) -> None:
    for name in ("a:b", "a\\b", "C:\\x.safetensors", ":", "\\", "..\\up", "*?[]", " ", "\n", "é\u200f"):
        (model / name).write_bytes(WEIGHTS if name.endswith("safetensors") else name.encode())
    (model / "d:e").mkdir()
    (model / "d:e" / "f\\g").write_text("x")
    round_trip(model)


def test_links_that_stay_inside(model: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "notes").write_text("notes")
    for name, target in {
        "again.safetensors": "model.safetensors",
        "sub/up.safetensors": "../again.safetensors",
        "folder": "sub",
        "through": "folder/notes",
        "config": "config.json",
        "nowhere": "gone",
        "sub/root": "..",
        "loop": "loop",
    }.items():
        (model / name).symlink_to(target)
    back = round_trip(model)
    assert (back / "sub" / "up.safetensors").read_bytes() == WEIGHTS
    assert (model.with_name("packed") / "again.safetensors").is_symlink()


def test_an_index_names_links(model: Path) -> None:
    (model / "shard.safetensors").symlink_to("model.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "shard.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    round_trip(model)
    text = (model.with_name("packed") / "model.safetensors.index.json").read_text()
    assert json.loads(text)["weight_map"] == {"w_tpde": "shard.safetensors"}


def test_a_link_whose_target_is_packed_otherwise_is_a_file(model: Path) -> None:
    (model / "model.safetensors").rename(model / "blob")
    (model / "model.safetensors").symlink_to("blob")
    packed = model.with_name("packed")
    assert pack(model, packed).packed == 1
    assert not (packed / "model.safetensors").is_symlink()
    unpack(packed, model.with_name("back"))
    assert (model.with_name("back") / "model.safetensors").read_bytes() == WEIGHTS


def test_links_that_lead_out(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("content")
    (model / "file").symlink_to("../elsewhere/file")  # as in the hub's cache: taken as what it is
    (model / "absolute").symlink_to(model / "config.json")
    (model / "folder").symlink_to("../elsewhere")
    (model / "dangling").symlink_to("/nowhere")
    found = left_out(model)
    assert set(found) == {"folder", "dangling"}
    assert "a link to a folder" in found["folder"]
    for name in ("file", "absolute"):
        assert not (tmp_path / "packed" / name).is_symlink()
        assert (tmp_path / "back" / name).read_bytes() == (model / name).read_bytes()


def test_empty_folders(model: Path) -> None:
    (model / "logs" / "deep").mkdir(parents=True)
    packed = round_trip(model).with_name("packed")
    (packed / "logs" / "deep").rmdir()
    assert ["logs/deep` is missing" in it.message for it in verify(packed)] == [True]
    (model / "more").mkdir()
    assert ["more` was not packed" in it.message for it in verify(packed, against=model)[-1:]] == [True]


def test_executables_and_permissions(model: Path, tmp_path: Path) -> None:
    (model / "sub").mkdir(mode=0o750)
    for name, mode in {"run.sh": 0o755, "secret": 0o600, "sub/shared": 0o664, "config.json": 0o640}.items():
        (model / name).touch()
        (model / name).chmod(mode)
    (model / "model.safetensors").chmod(0o600)
    model.chmod(0o700)
    back = round_trip(model)
    for folder in (back, tmp_path / "packed"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in ("run.sh", "secret", "sub", "sub/shared", "config.json", "model.safetensors"):
            assert (folder / name).stat().st_mode == (model / name).stat().st_mode, name
    assert stat.S_IMODE((tmp_path / "packed" / MANIFEST).stat().st_mode) == 0o600
    (tmp_path / "packed" / "run.sh").chmod(0o644)
    assert ["executed" in it.message for it in verify(tmp_path / "packed", against=model)] == [True]


def test_a_private_file_stays_private(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").chmod(0o600)
    pack(model / "model.safetensors", tmp_path / "p")
    unpack(tmp_path / "p", tmp_path / "u")
    pack(model / "model.safetensors", tmp_path / "p", force=True)
    assert [stat.S_IMODE((tmp_path / it).stat().st_mode) for it in ("p", "u")] == [0o600, 0o600]


def test_the_hubs_notes_are_left_out_by_name(model: Path) -> None:
    (model / ".cache" / "huggingface").mkdir(parents=True)
    (model / ".cache" / "huggingface" / "notes").touch()
    assert list(left_out(model)) == [".cache"]
    assert verify(model.with_name("packed"), against=model) == []
    said = invoke("pack", model, model.with_name("again"))
    assert said.stderr == "note: `.cache` is left out: the hub's own notes\n"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note what is opened for reading."""
    names: list[str] = []
    real = FileSource.__init__

    def noting(self: FileSource, path: Any) -> None:
        names.append(os.path.basename(path))
        real(self, path)

    monkeypatch.setattr(FileSource, "__init__", noting)
    return names


def test_pipes_sockets_and_devices_are_never_opened(model: Path, opened: list[str]) -> None:
    os.mkfifo(model / "pipe.safetensors")
    os.mkfifo(model / "tokenizer.json")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(model)  # names of sockets are short
        server.bind("sock")
        os.chdir(here)
        found = left_out(model)
    assert found["pipe.safetensors"].startswith("a pipe")
    assert found["tokenizer.json"].startswith("a pipe")
    assert found["sock"].startswith("a socket")
    assert found.keys().isdisjoint(opened)


def test_devices_by_name(model: Path) -> None:
    try:
        os.mknod(model / "zero", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root may make devices")
    (model / "link").symlink_to("/dev/zero")
    found = left_out(model)
    assert found["zero"].startswith("a device")
    assert "a device" in found["link"]


def test_folders_that_cannot_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "closed").mkdir()
    real = os.scandir

    def refuse(path: Any) -> Any:  # root may read everything
        if str(path).endswith("/closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    tree = walk(model)
    assert [(it.name, it.reason) for it in tree.left_out] == [
        ("closed", "the folder cannot be read: Permission denied")
    ]
    assert "closed" not in tree.folders


def test_names_that_are_not_utf8(model: Path) -> None:
    try:
        (Path(os.fsdecode(os.fsencode(model) + b"/\xff.txt"))).touch()
    except OSError:
        pytest.skip("the file system takes none")
    (found,) = left_out(model).items()
    assert found == (r"\udcff.txt", "its name is not UTF-8")
    packed = model.with_name("packed")
    pack(model, packed, force=True)
    (problem,) = verify(packed, against=model)
    assert problem.file == str(model / r"\udcff.txt")
    assert problem.message.endswith(r"\udcff.txt` was not packed: its name is not UTF-8")
    assert verify(packed, against=model, exclude=["?.txt"]) == [], "as was asked for"


def test_exclude(model: Path) -> None:
    for name in ("onnx/model.onnx", "deep/onnx/x", "a.msgpack", "sub/a.msgpack", "sub/keep"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).touch()
    packed = model.with_name("packed")
    patterns = ["onnx/", "*.msgpack"]
    found = left_out(model, exclude=patterns)
    assert set(found) == {"onnx", "deep/onnx", "a.msgpack", "sub/a.msgpack"}
    assert verify(packed, against=model, exclude=patterns) == []
    assert verify(packed, against=model, exclude=["onnx"]) != []
    pack(model, packed, exclude=["sub/*", "deep"], force=True)
    assert not (packed / "deep").exists()
    assert list((packed / "sub").iterdir()) == []
    assert invoke("pack", model, packed, "--force", "--exclude", "deep", "--exclude", "sub").exit_code == 0
    assert sorted(it.name for it in packed.iterdir() if it.is_dir()) == ["onnx"]


@pytest.mark.parametrize("exclude", ["notes.txt", None, [5], b"x"])
def test_what_is_no_list_of_patterns_is_refused(exclude: Any, model: Path) -> None:
    pack(model, packed := model.with_name("packed"))
    says = f"`exclude` is {exclude!r}, which is no list of patterns; pass a list of texts"
    for path in (model, model / "model.safetensors"):
        with pytest.raises(InvalidArgument, match=re.escape(says)):
            pack(path, model.with_name("new"), exclude=exclude)
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        verify(packed, against=model, exclude=exclude)
    assert not model.with_name("new").exists()


def test_a_shard_that_is_excluded_is_missing(model: Path) -> None:
    index = {"metadata": {}, "weight_map": {"w": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "other.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(MissingShard, match=r"names the shard `model\.safetensors`"):
        pack(model, model.with_name("packed"), exclude=["model.safetensors"])


def test_against_finds_what_was_left_out(model: Path) -> None:
    packed = model.with_name("packed")
    pack(model, packed)
    (model / "new").write_text("x")
    (model / "link").symlink_to("new")
    os.mkfifo(model / "pipe")
    (model / "empty").mkdir()
    for at in ("logs/more/log.txt", "logs/another"):  # nothing of a new folder is told but the folder
        (model / at).parent.mkdir(parents=True, exist_ok=True)
        (model / at).write_text("x")
    found = [it.message for it in verify(packed, against=model)]
    assert [it.split("`")[1].rpartition("/")[2] for it in found] == ["empty", "link", "logs", "new", "pipe"]
    assert all("was not packed" in it for it in found)


@pytest.mark.parametrize(
    ("name", "target", "inside"),
    [
        ("a", "b", True),
        ("a/b", "../c", True),
        ("a/b", "..", True),
        ("a", "..", False),
        ("a/b", "../../c", False),
        ("a/b", "../c/../d", False),
        ("a", "c/..", False),
        ("a", "/etc/passwd", False),
        ("a", "", False),
    ],
)
def test_links_inside(name: str, target: str, inside: bool) -> None:
    assert stays_inside(name, target) is inside


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../b", "", "x\0y", "\ud800"])
def test_a_manifest_links_nowhere_else(model: Path, target: str) -> None:
    packed = model.with_name("packed")
    (model / "link").symlink_to("config.json")
    pack(model, packed)
    value = json.loads((packed / MANIFEST).read_text())
    value["files"]["link"] = {"link": target}
    (packed / MANIFEST).write_text(json.dumps(value))
    for action in (verify, lambda it: unpack(it, model.with_name("back"))):
        with pytest.raises(Corrupt, match="the entry of `link` is damaged"):
            action(packed)


def test_nothing_is_written_through_links_of_a_manifest(model: Path) -> None:
    packed = model.with_name("packed")
    pack(model, packed)
    value = json.loads((packed / MANIFEST).read_text())
    value["files"] |= {"d": {"link": "e"}, "d/x": value["files"]["config.json"]}
    value["entries"] += 2
    (packed / MANIFEST).write_text(json.dumps(value))
    with pytest.raises(Corrupt, match="names 'd/x'"):
        unpack(packed, model.with_name("back"))


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no folder"):
        walk(tmp_path / "gone")
