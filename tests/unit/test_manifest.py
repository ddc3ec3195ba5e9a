"""What a manifest may say, and what is refused before anything is done with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tpde.errors import Corrupt, NotPacked, UnsupportedVersion
from tpde.files.manifest import Manifest, is_packed_directory, read_manifest
from tpde.format.constants import MANIFEST, VERSION

SHA = "0123456789abcdef" * 4
FILE = {"sha256": SHA}
LONG = "x" * 255


def write(folder: Path, files: Any, folders: Any = None, **more: Any) -> Path:
    """Write a manifest whose number of entries is right, unless `more` has another."""
    value = {"version": VERSION, "files": files}
    if folders is not None:
        value["folders"] = folders
    if isinstance(files, dict) and not isinstance(folders, (str, int)):
        value["entries"] = len(files) + len(folders or [])
    (folder / MANIFEST).write_text(json.dumps(value | more))
    return folder


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        ({"a": FILE}, None),
        ({"a": FILE}, []),
        ({"a/b": FILE, "a/c": FILE, "ab": FILE}, ["d", "e/f"]),
        ({"a": FILE, LONG: FILE, "é": FILE}, [LONG[1:]]),
        ({"config.json": FILE | {"original": ""}, "sub/config.json": FILE | {"original": "é"}}, None),
        ({"model.safetensors.index.json": FILE | {"original": "{}"}}, None),
        ({"model.safetensors": FILE | {"from": "pytorch_model.bin"}}, None),
        ({"x/model.safetensors": FILE | {"from": "x/pytorch_model.bin"}}, None),
        ({"link": {"link": "a"}}, None),
        ({"a/b/link": {"link": "../../c"}, "a/up": {"link": ".."}, "here": {"link": "."}}, None),
    ],
)
def test_what_a_manifest_may_say(files: dict[str, Any], folders: list[str] | None, tmp_path: Path) -> None:
    found = read_manifest(write(tmp_path, files, folders))
    assert (found.files, found.folders) == (files, folders or [])
    assert found.links() == {name: it["link"] for name, it in files.items() if "link" in it}
    (tmp_path / MANIFEST).write_text(Manifest(files, folders or []).text())
    assert read_manifest(tmp_path) == found


@pytest.mark.parametrize(
    "info",
    [
        None,
        [],
        "x",
        {},
        {"sha256": SHA[:-1]},
        {"sha256": SHA + "0"},
        {"sha256": SHA[:-1] + "g"},
        {"sha256": SHA.upper()},
        {"sha256": ""},
        {"sha256": None},
        {"sha256": 5},
        {"sha256": [SHA]},
        {"from": "a"},
        {"original": ""},
        FILE | {"more": 5},
        FILE | {"more": "\ud800"},
        FILE | {"original": ""},  # of a file that packing does not change
        FILE | {"from": ""},
        FILE | {"from": "../a"},
        FILE | {"from": "/a"},
        FILE | {"from": "a/../b"},
        FILE | {"from": "."},
        FILE | {"from": "a\0"},
        FILE | {"link": "a"},
        {"link": "a", "from": "b"},
        {"link": "a", "original": "b"},
        {"link": ""},
        {"link": ".."},
        {"link": "/a"},
        {"link": "a/../b"},
        {"link": "a\0"},
        {"link": 5},
    ],
    ids=str,
)
def test_entries_that_are_damaged(info: Any, tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, {"good": FILE, "notes.txt": FILE}))
    write(tmp_path, {"good": FILE, "notes.txt": info})
    with pytest.raises(Corrupt, match=r"the entry of `notes\.txt` is damaged; fetch it again"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("files", "folders", "says"),
    [
        (None, None, "has no `files`"),
        ([], None, "has no `files`"),
        ({}, None, "has no `files`"),
        ({}, ["a"], "has no `files`"),
        (["a"], None, "has no `files`"),
        ({"a": FILE}, "b", "no list of folders"),
        ({"a": FILE}, {"b": "c"}, "no list of folders"),
        ({"a": FILE}, [5], "no list of folders"),
        ({"a": FILE}, ["../b"], "no list of folders"),
        ({"a": FILE}, [""], "no list of folders"),
        ({"a": FILE}, ["a"], "a file is a folder"),
        ({"a": FILE}, ["b", "b"], "a file is a folder"),
        ({"a": FILE, "a/b": FILE}, None, "names 'a/b', which is no file"),
        ({"a/b/c": FILE, "a": FILE}, None, "names 'a/b/c', which is no file"),
        ({"a": FILE}, ["a/b"], "names 'a/b', which is no file"),
        ({"a/b": FILE}, ["a"], "names 'a/b', which is no file"),
        ({"b": FILE}, ["a", "a/c"], "names 'a/c', which is no file"),
        ({"../a": FILE}, None, r"names '\.\./a', which is no file"),
        ({"": FILE}, None, "names '', which is no file"),
        ({".": FILE}, None, r"names '\.', which is no file"),
        ({"/a": FILE}, None, "names '/a', which is no file"),
    ],
)
def test_names_that_are_damaged(files: Any, folders: Any, says: str, tmp_path: Path) -> None:
    write(tmp_path, files, folders)
    with pytest.raises(Corrupt, match=says):
        read_manifest(tmp_path)


@pytest.mark.parametrize("entries", [0, 1, 3, -2, 2.0, "2", True, None, [2]])
def test_a_manifest_says_how_many_entries_it_has(entries: Any, tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, {"a": FILE}, ["b"], entries=2))
    write(tmp_path, {"a": FILE}, ["b"], entries=entries)
    with pytest.raises(Corrupt, match="has 2 files and folders, and says "):
        read_manifest(tmp_path)


def test_one_entry_is_not_the_value_true(tmp_path: Path) -> None:
    write(tmp_path, {"a": FILE}, entries=True)
    with pytest.raises(Corrupt, match="has 1 files and folders, and says True"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("version", [0, 2, -1, True, 1.0, "1", None, [1]])
def test_other_versions_are_not_read(version: Any, tmp_path: Path) -> None:
    write(tmp_path, {"a": FILE}, version=version)
    with pytest.raises(UnsupportedVersion, match="upgrade tpde") as caught:
        read_manifest(tmp_path)
    assert (caught.value.found, caught.value.needed) == (version, VERSION)


@pytest.mark.parametrize("value", ["[]", "null", '"a"', "1"])
def test_what_is_no_object_has_no_version(value: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(value)
    with pytest.raises(UnsupportedVersion):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"version": 1, "version": 1}'])
def test_what_is_no_json_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(Corrupt, match="is not JSON") as caught:
        read_manifest(tmp_path)
    assert caught.value.where == str(tmp_path / MANIFEST)


@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe", "link to nothing", "device"])
def test_a_directory_without_a_manifest_is_not_packed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to("/dev/zero" if kind == "device" else "nothing")
    assert not is_packed_directory(tmp_path)
    with pytest.raises(NotPacked, match="is not a packed model directory, it has no"):
        read_manifest(tmp_path)


def test_a_link_to_another_of_the_files_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "elsewhere").touch()
    for name, target in {"a": "b", "sub/c": "../b", "sub/d": "../elsewhere", "e": "./sub/../b"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "b").touch()
    manifest = Manifest(dict.fromkeys(("a", "b", "sub/c", "sub/d", "e"), FILE), [])
    for name in ("b", "sub/d", "gone"):
        manifest.refuse_link(tmp_path, name)
    for name in ("a", "sub/c", "e"):
        with pytest.raises(Corrupt, match="is a link to `b`, where a file was packed"):
            manifest.refuse_link(tmp_path, name)
