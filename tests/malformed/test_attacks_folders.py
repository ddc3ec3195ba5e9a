"""Attacks on what is in directories, and on where they go (docs/reference/attacks.md, A55 to A64)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import Corrupt, InvalidDestination, InvalidInput, TpdeError, UnsafePickle, UnsupportedVersion
from tpde.files.operations import pack, unpack, verify
from tpde.format.constants import MANIFEST

ONE, TWO = "a.safetensors", "b.safetensors"
SECRET = "the content of a file elsewhere"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Give a model of two shards; elsewhere is a secret."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in ((ONE, "normal"), (TWO, "exponents")):
        spec = spec_of("BF16", 2000)
        (folder / name).write_bytes(safetensors_bytes({name: (spec, fill(content, spec))}))
    (folder / "config.json").write_text("{}")
    (folder / "notes.txt").write_text("notes")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text(SECRET)
    return folder


@pytest.fixture
def packed(source: Path) -> Path:
    """Give the model packed."""
    pack(source, source.with_name("packed"))
    return source.with_name("packed")


def _manifest(packed: Path) -> dict[str, Any]:
    return dict(json.loads((packed / MANIFEST).read_text()))


def _set(packed: Path, **files: Any) -> None:
    """Change entries of the manifest, and make their number right."""
    value = _manifest(packed)
    value["files"] |= files
    value["entries"] = len(value["files"])
    (packed / MANIFEST).write_text(json.dumps(value))


def _refused(packed: Path, error: type[TpdeError] = Corrupt) -> None:
    """Expect that nothing is restored, that verify says so, and that nothing changes anywhere else."""
    root = packed.parent
    before = {it: it.lstat().st_mtime_ns for it in root.rglob("*")}
    with pytest.raises(error):
        unpack(packed, root / "out")
    with contextlib.suppress(error):
        assert verify(packed), "verify found nothing"
    assert {it: it.lstat().st_mtime_ns for it in root.rglob("*")} == before


def test_a55_names_that_lead_elsewhere_on_other_systems(source: Path) -> None:
    for name in ("C:\\a.safetensors", "..\\a.safetensors", "a:b", "\\\\host\\a"):
        index = {"metadata": {}, "weight_map": {"w": name}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(InvalidInput, match="no file below it"):
            pack(source, source.with_name("out"))
    assert not source.with_name("out").exists()


def test_a56_a_manifest_that_gives_a_weight_files_text(packed: Path) -> None:
    evil = {"sha256": hashlib.sha256(b"evil").hexdigest(), "original": "evil"}
    sound = _manifest(packed)["files"]
    for name in (ONE, "notes.txt"):
        _set(packed, **(sound | {name: evil}))
        _refused(packed)
    _set(packed, **(sound | {"config.json": evil}))  # may have one, of which the packed one is not made
    assert [Path(it.file).name for it in verify(packed)] == ["config.json"]


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../secret/key", "..", "x/../../secret", ".", "", "x\0", "\ud800", "../" * 99]
)
def test_a57_links_of_a_manifest_that_lead_out(target: str, packed: Path) -> None:
    if target != ".":  # which is the directory itself
        _set(packed, link={"link": target})
        _refused(packed)
    _set(packed, link={"link": "notes.txt", "sha256": "0" * 64})
    _refused(packed)
    _set(packed, link={"link": "sub"}, **{"link/notes.txt": _manifest(packed)["files"]["notes.txt"]})
    _refused(packed)


def test_a58_shards_that_are_exchanged(packed: Path) -> None:
    for one, other in ((ONE, TWO), (TWO, ONE)):
        data = (packed / one).read_bytes()
        (packed / one).write_bytes((packed / other).read_bytes())
        _refused(packed)
        (packed / one).write_bytes(data)
    assert verify(packed) == []
    files = _manifest(packed)["files"]
    _set(packed, **{ONE: files[TWO], TWO: files[ONE]})
    _refused(packed)


def test_a59_entries_that_are_missing_or_there_twice(packed: Path) -> None:
    value = _manifest(packed)
    text = json.dumps(value)
    less = {name: it for name, it in value["files"].items() if name != "notes.txt"}
    for changed in (
        json.dumps(value | {"files": less}),
        json.dumps({key: it for key, it in value.items() if key != "entries"}),
        json.dumps(value | {"files": {}, "entries": 0}),
        text.replace('"notes.txt"', '"config.json"'),
        json.dumps(value | {"folders": ["notes.txt"], "entries": value["entries"] + 1}),
        json.dumps(value | {"folders": ["notes.txt/below"], "entries": value["entries"] + 1}),
        json.dumps(value | {"folders": ["../out"], "entries": value["entries"] + 1}),
        json.dumps(value | {"folders": "ab"}),
    ):
        (packed / MANIFEST).write_text(changed)
        _refused(packed)
    for version in (True, 1.0, "1", None, [], 2, 10**400):
        (packed / MANIFEST).write_text(json.dumps(value | {"version": version}))
        _refused(packed, UnsupportedVersion)


def test_a60_links_out_of_a_directory_that_was_saved_again(packed: Path) -> None:
    (packed / MANIFEST).unlink()
    (packed / "key").symlink_to("../secret/key")
    (packed / "absolute").symlink_to(packed.parent / "secret" / "key")
    (packed / "folder").symlink_to("../secret")
    (packed / "blobs").symlink_to("/dev/zero")
    left = unpack(packed, packed.with_name("out")).left_out
    assert sorted(it.name for it in left) == ["absolute", "blobs", "folder", "key"]
    out = packed.with_name("out")
    assert all(SECRET not in it.read_text("latin-1") for it in out.rglob("*") if it.is_file())
    (packed / ONE).unlink()
    (packed / ONE).symlink_to("../source/" + ONE)  # a weight file
    index = {"metadata": {}, "weight_map": {"w": ONE}}
    (packed / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="which is missing"):
        unpack(packed, packed.with_name("again"))


def test_a61_pipes_sockets_and_devices_in_a_directory(
    source: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source)  # names of sockets are short
    os.mkfifo("pipe.safetensors")
    os.mkfifo("tokenizer.json")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        left = pack(source, source.with_name("again")).left_out
        assert sorted(it.name for it in left) == ["pipe.safetensors", "sock", "tokenizer.json"]
        assert len(verify(packed, against=source)) == 3
    for name in (ONE, "config.json", "notes.txt"):
        kept = (packed / name).read_bytes()
        (packed / name).unlink()
        os.mkfifo(packed / name)
        _refused(packed, TpdeError)
        (packed / name).unlink()
        (packed / name).symlink_to("/dev/zero")
        _refused(packed, TpdeError)
        (packed / name).unlink()
        (packed / name).write_bytes(kept)
    (packed / MANIFEST).unlink()
    os.mkfifo(packed / MANIFEST)
    unpack(packed, packed.with_name("out"))  # as one that was saved again


def test_a62_pipes_and_devices_as_destinations(source: Path, packed: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null")):
        for action, path in (
            (pack, source),
            (pack, source / ONE),
            (unpack, packed),
            (unpack, packed / ONE),
        ):
            for force in (False, True):
                with pytest.raises(InvalidDestination, match="which is never replaced"):
                    action(path, target, force=force)
        mode = target.lstat().st_mode
        assert stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def test_a63_names_like_those_of_temporary_files(source: Path, tmp_path: Path) -> None:
    """Removed is what is this user's file or folder, is named exactly so, and is locked by nobody."""
    out = tmp_path / "out"
    out.mkdir()
    name = ".x.01234567.tpde-tmp"
    (out / name).symlink_to(tmp_path / "secret")
    os.mkfifo(out / name.replace("x", "y"))
    inside = out / name.replace("x", "z")
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "journal").write_text("{")
    for action in (lambda: pack(source, out / "p"), lambda: pack(source / ONE, out / "q")):
        action()
        assert (tmp_path / "secret" / "key").read_text() == SECRET
        assert (out / name).is_symlink()
        assert stat.S_ISFIFO((out / name.replace("x", "y")).lstat().st_mode)
    assert inside.exists()  # a journal that cannot be read: nothing is known of what is there


class _Evil:
    """An object whose pickle runs code."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("evil"),)


def test_a64_pickles_that_run_code_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    torch.save({"w": torch.zeros(3), "x": _Evil()}, "model/pytorch_model.bin")
    with pytest.raises(UnsafePickle, match="never run"):
        pack("model", "out")
    assert [it.name for it in tmp_path.iterdir()] == ["model"]
