"""Any single change to a packed directory is found, or makes no difference to what is unpacked.

`python tests/malformed/test_changes.py 10000` tries as many.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
from support.changes import campaign, make_source

from tpde.errors import Corrupt, InvalidInput, UnsupportedVersion
from tpde.files.operations import pack, unpack, verify
from tpde.format.constants import MANIFEST

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_any_single_change_is_found_or_harmless(tmp_path: Path) -> None:
    tally = campaign(tmp_path, seed=22, count=150)
    assert tally["found"] > 100


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Give a packed directory of two shards."""
    make_source(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed")
    return tmp_path / "packed"


def _wrong(packed: Path) -> list[str]:
    """Names of files in which verify finds something, which unpack then refuses."""
    found = [Path(it.file).name for it in verify(packed)]
    with pytest.raises(Corrupt):
        unpack(packed, packed.with_name("back"))
    assert not packed.with_name("back").exists()
    return found


def test_verify_finds_exchanged_shards(packed: Path) -> None:
    (packed / ONE).rename(packed / "x")
    (packed / TWO).rename(packed / ONE)
    (packed / "x").rename(packed / TWO)
    assert {ONE, TWO} <= set(_wrong(packed))


def test_verify_finds_a_manifest_of_another_shard(packed: Path) -> None:
    value = json.loads((packed / MANIFEST).read_text())
    value["files"][ONE]["sha256"] = hashlib.sha256(b"").hexdigest()
    (packed / MANIFEST).write_text(json.dumps(value))
    assert _wrong(packed) == [ONE]
    (found,) = verify(packed)
    assert "restores a file with SHA-256" in found.message


def test_a_manifest_gives_no_weight_files_text(packed: Path) -> None:
    value = json.loads((packed / MANIFEST).read_text())
    for name in (ONE, "sub/notes.txt"):
        digits = hashlib.sha256(b"evil").hexdigest()
        (packed / MANIFEST).write_text(
            json.dumps(value | {"files": value["files"] | {name: {"sha256": digits, "original": "evil"}}})
        )
        for action in (verify, lambda it: unpack(it, packed.with_name("back"))):
            with pytest.raises(Corrupt, match=f"the entry of `{name}` is damaged"):
                action(packed)


def test_a_manifest_that_is_gone(packed: Path) -> None:
    (packed / MANIFEST).unlink()
    (found,) = verify(packed)
    assert "which restores the source, is missing" in found.message


def test_a_manifest_that_calls_a_file_a_link(packed: Path) -> None:
    """What is said of a link and of the file that it leads to is exchanged: the file would be lost."""
    value = json.loads((packed / MANIFEST).read_text())
    files = value["files"]
    files["link"], files["sub/notes.txt"] = files["sub/notes.txt"], files["link"]
    (packed / MANIFEST).write_text(json.dumps(value))
    assert set(_wrong(packed)) == {"link", "notes.txt"}


def test_a_copy_stands_for_a_link(packed: Path) -> None:
    """Stores without links have a copy of what one leads to, and nothing else in its place."""
    (packed / "link").unlink()
    (packed / "link").write_bytes((packed / "sub/notes.txt").read_bytes())
    assert verify(packed) == []
    unpack(packed, packed.with_name("back"))
    assert os.readlink(packed.with_name("back") / "link") == "sub/notes.txt"
    shutil.rmtree(packed.with_name("back"))
    (packed / "link").write_bytes(b"something else")
    assert _wrong(packed) == ["link"]


def test_a_manifest_without_one_of_its_entries(packed: Path) -> None:
    value = json.loads((packed / MANIFEST).read_text())
    del value["files"]["sub/notes.txt"]
    (packed / MANIFEST).write_text(json.dumps(value))
    with pytest.raises(Corrupt, match=r"has 7 files and folders, and says 8"):
        verify(packed)


def test_a_link_where_the_manifest_has_a_file_of_the_same_content(packed: Path) -> None:
    value = json.loads((packed / MANIFEST).read_text())
    value["files"]["link"] = {"sha256": value["files"]["sub/notes.txt"]["sha256"]}
    (packed / MANIFEST).write_text(json.dumps(value))
    assert _wrong(packed) == ["link"]


@pytest.mark.parametrize("version", [True, 1.0, "1", None, [1], 2])
def test_manifest_versions_that_are_none(version: object, packed: Path) -> None:
    value = json.loads((packed / MANIFEST).read_text())
    (packed / MANIFEST).write_text(json.dumps(value | {"version": version}))
    with pytest.raises(UnsupportedVersion, match="has version"):
        verify(packed)


@pytest.mark.parametrize("told", [True, False])
def test_a_shard_that_changes_between_hashing_and_packing(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time of change tells, where that is not set back."""
    source, real = make_source(tmp_path / "source"), os.preadv
    before = (source / ONE).stat()
    read = 0  # up to where; -1 once it has changed

    def changing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        if read >= 0 and os.path.samestat(os.fstat(descriptor), before):
            if read == before.st_size:  # all of it, for its hash
                data = bytearray((source / ONE).read_bytes())
                data[-1] ^= 1
                (source / ONE).write_bytes(data)
                if not told:
                    os.utime(source / ONE, ns=(before.st_atime_ns, before.st_mtime_ns))
                read = -1
            else:
                read = offset + sum(map(len, buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", changing)
    if told:
        with pytest.raises(InvalidInput, match=r"00001-of-00002.safetensors` changed while it was read"):
            pack(source, tmp_path / "packed")
        assert not (tmp_path / "packed").exists()
    else:
        pack(source, tmp_path / "packed")
        assert _wrong(tmp_path / "packed") == [ONE]


def test_a_manifest_with_a_name_twice(packed: Path) -> None:
    text = (packed / MANIFEST).read_text()
    (packed / MANIFEST).write_text(text.replace('"sub/none"', '"config.json"'))
    with pytest.raises(Corrupt, match="occurs twice"):
        verify(packed)


if __name__ == "__main__":
    began = time.time()
    with tempfile.TemporaryDirectory() as place:
        print(campaign(Path(place), seed=int(began), count=int(sys.argv[1])))
    print(f"{time.time() - began:.0f} s")
