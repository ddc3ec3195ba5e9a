"""Attacks on directories, destinations and pickles (docs/reference/attacks.md, A39 to A46)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import (
    Corrupt,
    DestinationExists,
    InvalidDestination,
    TpdeError,
    UnsafePickle,
    UnsupportedVersion,
)
from tpde.files.operations import pack, unpack, verify

MANIFEST = "tpde_manifest.json"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Give a packed directory; nothing else is below `tmp_path`."""
    source = tmp_path / "source"
    source.mkdir()
    spec = spec_of("BF16", 2000)
    tensors = {"w": (spec, fill("normal", spec))}
    (source / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (source / "notes.txt").write_text("notes")
    pack(source, tmp_path / "packed")
    return tmp_path / "packed"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _set_files(packed: Path, files: Any, version: Any = 1) -> None:
    (packed / MANIFEST).write_text(json.dumps({"version": version, "files": files}))


def _refused(packed: Path, error: type[TpdeError] = Corrupt) -> None:
    """Expect that nothing is written, inside the destination or outside."""
    root = packed.parent
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    with pytest.raises(error):
        unpack(packed, root / "out")
    with contextlib.suppress(error):
        assert verify(packed), "verify found nothing"
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before
    assert not (root / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "a/../../evil",
        "/tmp/tpde-evil",
        "..",
        ".",
        "",
        "..\\evil",
        "C:\\evil",
        "\\\\host\\evil",
        "a\\b",
    ],
)
def test_a39_manifest_paths_that_leave_the_directory(name: str, packed: Path) -> None:
    _set_files(packed, {name: {"sha256": _sha(b"evil"), "original": "evil"}})
    _refused(packed)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a" * 256, "\u00e9" * 128, "a/" * 100_000 + "b"])
def test_a40_manifest_paths_that_are_no_file_names(name: str, packed: Path) -> None:
    _set_files(packed, {name: {"sha256": _sha(b"evil"), "original": "evil"}})
    _refused(packed)
    _set_files(packed, {name: {"sha256": _sha(b"evil")}})
    _refused(packed, TpdeError)


TEXT = json.dumps({"sha256": _sha(b"x"), "original": "x"})


@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        ("[]", TpdeError),
        ("null", TpdeError),
        ('{"version": 1}', Corrupt),
        ('{"version": 1, "entries": 0, "files": []}', Corrupt),
        ('{"version": 1, "entries": 1, "files": {"a": []}}', Corrupt),
        ('{"version": 1, "entries": 1, "files": {"a": {"sha256": 1}}}', Corrupt),
        ('{"version": 1, "entries": 1, "files": {"notes.txt": {}}}', Corrupt),
        ('{"version": 1, "entries": 1, "files": {"a": {"sha256": "", "original": "\\ud800"}}}', Corrupt),
        (f'{{"version": 1, "entries": 2, "files": {{"a": {TEXT}, "a/b": {TEXT}}}}}', Corrupt),
        (f'{{"version": 1, "entries": 2, "files": {{"a/b": {TEXT}, "a": {TEXT}}}}}', Corrupt),
        ('{"version": 2, "files": {}}', UnsupportedVersion),
        ("", Corrupt),
        ("{", Corrupt),
        ("[" * 200_000, Corrupt),
        ('{"version": 1' + "9" * 5000 + "}", Corrupt),
    ],
    ids=range(15),
)
def test_a41_manifests_that_are_damaged(manifest: str, error: type[TpdeError], packed: Path) -> None:
    (packed / MANIFEST).write_text(manifest)
    _refused(packed, error)
    (packed / MANIFEST).write_bytes(b"\xff\xfe\x00")
    _refused(packed)


def test_a42_files_that_are_not_those_that_were_packed(packed: Path) -> None:
    (packed / "notes.txt").write_text("other")
    assert ["notes.txt" in p.file for p in verify(packed)] == [True]
    _refused(packed)
    (packed / "notes.txt").unlink()
    assert ["notes.txt" in p.file for p in verify(packed)] == [True]
    _refused(packed, TpdeError)


def test_a43_a_weight_file_exchanged_for_another(packed: Path, tmp_path: Path) -> None:
    spec = spec_of("BF16", 2000)
    other = tmp_path / "other.safetensors"
    other.write_bytes(safetensors_bytes({"w": (spec, fill("specials", spec))}))
    pack(other, tmp_path / "exchanged")
    (tmp_path / "exchanged").rename(packed / "model.safetensors")
    with pytest.raises(Corrupt, match="SHA-256"):
        unpack(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a44_links_as_destinations(packed: Path, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    for target in (victim, folder, tmp_path / "dangling"):
        link = tmp_path / "link"
        link.symlink_to(target)
        for action, source in ((pack, tmp_path / "source/model.safetensors"), (unpack, packed)):
            with pytest.raises(DestinationExists):
                action(source, link)
        with pytest.raises(DestinationExists):
            unpack(packed / "model.safetensors", link)
        link.unlink()
    link.symlink_to(victim)  # replacing it is asked for: the link is replaced, what it names is not
    unpack(packed / "model.safetensors", link, force=True)
    assert not link.is_symlink()
    assert victim.read_text() == "precious"
    assert link.read_bytes() == (tmp_path / "source/model.safetensors").read_bytes()
    assert not list(folder.iterdir())
    assert not (tmp_path / "dangling").exists()


def test_a45_the_source_as_its_own_destination(packed: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    before = (source / "model.safetensors").read_bytes()
    for action, path in ((pack, source / "model.safetensors"), (unpack, packed / "model.safetensors")):
        with pytest.raises(InvalidDestination):
            action(path, path, force=True)
        link = tmp_path / "same"
        link.symlink_to(path)
        with pytest.raises(InvalidDestination):
            action(path, link, force=True)
        link.unlink()
    for action, path in ((pack, source), (unpack, packed)):
        for target in (path, path / "inside", path / "a" / ".." / "inside"):
            with pytest.raises(InvalidDestination):
                action(path, target, force=True)
    assert (source / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["packed", "source"]


class _Evil:
    """An object whose pickle runs code."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("evil"),)


def test_a46_pickles_that_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(3), "x": _Evil()}, "zip.pt")
    torch.save({"w": _Evil()}, "legacy.bin", _use_new_zipfile_serialization=False)
    Path("raw.pt").write_bytes(pickle.dumps(_Evil(), protocol=2))
    for name in ("zip.pt", "legacy.bin", "raw.pt"):
        with pytest.raises(UnsafePickle, match="never run"):
            pack(name, "out.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["legacy.bin", "raw.pt", "zip.pt"]
