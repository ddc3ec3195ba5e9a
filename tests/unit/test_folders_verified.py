"""Small model directories, verified: what is found of each part, alone and against the source."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from support import spoilt
from support.changes import make_source
from support.packed_folders import INDEX, ONE, TWO, manifest_of, pack_beside, problems

import tpde
from tpde.errors import Corrupt
from tpde.files import verify_directory
from tpde.format.constants import MANIFEST


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


@pytest.fixture
def packed(source: Path) -> Path:
    return pack_beside(source)


def test_what_only_the_source_lacks_or_has_otherwise_is_told_of_it(packed: Path, source: Path) -> None:
    assert problems(packed, source) == set()
    (source / "sub" / "notes.txt").write_text("other notes")
    (source / "sub" / "none").unlink()
    (source / "sub" / "empty").rmdir()
    (source / "config.json").write_text("{}")
    (source / "link").unlink()
    (source / "link").write_text("other notes")  # a copy of what it leads to will do in the packed one only
    (source / "new\n").touch()
    assert problems(packed) == set()
    assert problems(packed, source) == {
        ("source/sub/notes.txt", "`source/sub/notes.txt` differs from what was packed"),
        ("packed/sub/none", "`source/sub/none` is missing from the source, or is no file"),
        ("source/sub/empty", "the folder `source/sub/empty` is missing"),
        ("source/config.json", "`source/config.json` differs from what was packed"),
        ("source/link", "`source/link` is not the link that was packed"),
        ("source/new\\n", "`source/new\\n` was not packed: it is not in the packed directory"),
    }


@pytest.mark.parametrize("damaged", [False, True])
def test_a_folder_that_is_replaced_meanwhile_is_verified_as_it_is_then(
    damaged: bool, packed: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are not those of the manifest that was read."""
    shutil.copytree(source, tmp_path / "other", symlinks=True)
    (tmp_path / "other" / "sub" / "notes.txt").write_text("other notes")
    made: list[str] = []

    def verify(folder: Path, manifest: Any, name: str, *args: Any) -> Any:
        if not made:
            tpde.pack(tmp_path / "other", packed, force=True)
            if damaged:
                (packed / "sub" / "notes.txt").write_text("damaged")
        made.append(name)
        return check(folder, manifest, name, *args)

    check = verify_directory._verify
    monkeypatch.setattr(verify_directory, "_verify", verify)
    says = "`packed/sub/notes.txt` differs from what was packed"
    assert problems(packed) == ({("packed/sub/notes.txt", says)} if damaged else set())
    assert len(made) == 2 * len(set(made))


def test_a_folder_that_is_gone_meanwhile_lacks_all(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = verify_directory.read_manifest

    def last(folder: Path) -> Any:
        manifest = read(folder)
        shutil.rmtree(folder)
        return manifest

    monkeypatch.setattr(verify_directory, "read_manifest", last)
    assert ("packed/config.json", "`packed/config.json` is missing, or is no file") in problems(packed)


def test_only_what_differs_in_being_executable_is_told(packed: Path, source: Path) -> None:
    for name in ("sub/notes.txt", ONE):
        (source / name).chmod(0o666)
        assert problems(packed, source) == set()
        for path in (packed / name, source / name):
            before = stat.S_IMODE(path.stat().st_mode)
            path.chmod(before | 0o011)  # of others: nothing that is kept
            assert problems(packed, source) == set()
            path.chmod(before | 0o100)
            says = f"only one of `packed/{name}` and `source/{name}` may be executed"
            assert problems(packed, source) == {(f"packed/{name}", says)}
            path.chmod(before)


@pytest.mark.parametrize("way", ["missing", "text", "empty", "damaged"])
def test_a_bad_shard_does_not_make_its_index_one(way: str, packed: Path, source: Path) -> None:
    data = (packed / TWO).read_bytes()
    (packed / TWO).unlink()
    spoilt.write(packed / TWO, way, data)
    assert {name for name, _ in problems(packed)} == {f"packed/{TWO}"}
    assert {name for name, _ in problems(packed, source)} == {f"packed/{TWO}"}


def test_an_index_names_packed_tensors_through_links(source: Path, tmp_path: Path) -> None:
    (source / ONE).rename(source / "first.safetensors")
    (source / ONE).symlink_to("first.safetensors")
    packed = tmp_path / "packed"
    tpde.pack(source, packed)
    assert problems(packed, source) == set()
    text = (packed / INDEX).read_text()
    assert json.loads(text)["weight_map"]["0.a_tpde"] == ONE
    (packed / INDEX).write_text(text.replace("0.a_tpde", "0.a"))
    assert {name for name, _ in problems(packed)} == {f"packed/{INDEX}"}


def test_what_is_no_weights_but_for_its_name_is_a_file_like_others(source: Path, tmp_path: Path) -> None:
    """Such as what git has in the place of a large file."""
    packed, name = tmp_path / "packed", "adapter_model.safetensors"
    for data in (b"version https://example.org/spec\noid sha256:0\n", spoilt.PLAIN):
        (source / name).write_bytes(data)
        tpde.pack(source, packed, force=True)
        assert problems(packed) == problems(packed, source) == set()
        tpde.unpack(packed, tmp_path / "back", force=True)
        assert (tmp_path / "back" / name).read_bytes() == data
        (packed / name).write_bytes(data[:-1] + b"x")
        says = f"`packed/{name}` differs from what was packed"
        assert problems(packed) == problems(packed, source) == {(f"packed/{name}", says)}
        (packed / name).write_bytes(data)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_text_that_was_changed_with_what_is_made_of_it_is_found(
    name: str, packed: Path, source: Path, tmp_path: Path
) -> None:
    """Its hash tells: the other file is what packing would make of the other text."""
    before = manifest_of(packed)
    (source / name).write_text((source / name).read_text("utf-8") + " ", "utf-8")
    if name == "config.json":
        (source / name).write_text("{}")
    tpde.pack(source, tmp_path / "other")
    shutil.copy(tmp_path / "other" / name, packed)
    before["files"][name]["original"] = manifest_of(tmp_path / "other")["files"][name]["original"]
    (packed / MANIFEST).write_text(json.dumps(before))
    assert problems(packed) == {(f"packed/{name}", f"`packed/{name}` differs from what was packed")}
    with pytest.raises(Corrupt, match="SHA-256"):
        tpde.unpack(packed, tmp_path / "back")


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_text_of_which_packing_makes_nothing_was_not_packed(name: str, text: str, packed: Path) -> None:
    """Even where its hash was made to fit."""
    value = manifest_of(packed)
    value["files"][name] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "original": text}
    (packed / MANIFEST).write_text(json.dumps(value))
    assert problems(packed) == {(f"packed/{name}", f"`packed/{name}` differs from what was packed")}


def test_a_disk_that_fails_at_one_file_hides_no_other(
    packed: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packed / "sub" / "none").write_text("not empty")
    real, notes = os.preadv, (packed / "sub" / "notes.txt").stat()

    def fail(descriptor: int, *given: Any) -> int:
        if os.path.samestat(os.fstat(descriptor), notes):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *given)

    monkeypatch.setattr(os, "preadv", fail)
    assert problems(packed) == {
        ("packed/sub/notes.txt", "`packed/sub/notes.txt`: Input/output error"),
        ("packed/sub/none", "`packed/sub/none` differs from what was packed"),
    }
