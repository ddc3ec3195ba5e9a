"""Small model directories, packed and unpacked: what each part of them becomes."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support import spoilt
from support.changes import content, make_source
from support.packed_folders import INDEX, ONE, TWO, manifest_of, pack_beside, problems

import tpde
from tpde.errors import AlreadyPacked, Corrupt, InvalidDestination, InvalidInput, Truncated
from tpde.files.manifest import Manifest
from tpde.format.constants import MANIFEST


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Give a model with something of everything."""
    return make_source(tmp_path / "source")


@pytest.fixture
def packed(source: Path) -> Path:
    """Give the same packed."""
    return pack_beside(source)


# ---- packing


def test_the_manifest_names_files_in_the_order_of_their_parts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "z").mkdir()
    for name in ("a/x", "a-b", "a.b", "b"):
        (source / name).touch()
    (source / "a.safetensors").write_bytes(spoilt.PLAIN)
    (source / "c").symlink_to("b")
    tpde.pack(source, tmp_path / "packed")
    found = manifest_of(tmp_path / "packed")
    assert list(found["files"]) == ["a/x", "a-b", "a.b", "a.safetensors", "b", "c"]
    assert found["folders"] == ["z"]
    assert found["entries"] == 7


@pytest.mark.parametrize("limit", ["BYTES", "VALUES"])
def test_a_manifest_that_no_reader_would_take_is_not_written(
    limit: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (pack_beside(source) / MANIFEST).read_text()
    most = len(text.encode()) if limit == "BYTES" else sum(map(text.count, ",:[{")) + 1
    monkeypatch.setattr(f"tpde.files.documents.MAX_JSON_{limit}", most)
    tpde.pack(source, tmp_path / "largest")
    tpde.unpack(tmp_path / "largest", tmp_path / "again")
    monkeypatch.setattr(f"tpde.files.documents.MAX_JSON_{limit}", most - 1)
    found = most - (limit == "VALUES")
    with pytest.raises(InvalidInput, match=f"`{MANIFEST}` would have {found} .* leave files out"):
        tpde.pack(source, tmp_path / "larger")
    assert not (tmp_path / "larger").exists()


def test_indexes_that_no_manifest_can_hold_are_refused_before_weights_are_packed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpde.files.pack_directory.pack_opened", pytest.fail)
    monkeypatch.setattr("tpde.files.documents.MAX_JSON_BYTES", len((source / INDEX).read_bytes()) + 50)
    with pytest.raises(InvalidInput, match=f"which packing changes, `{INDEX}` is the longest"):
        tpde.pack(source, tmp_path / "packed")


def test_an_index_that_is_too_long_when_it_is_packed_is_not_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manifest, "text", lambda self: "{}")
    monkeypatch.setattr("tpde.files.documents.MAX_JSON_BYTES", len((source / INDEX).read_bytes()))
    with pytest.raises(InvalidInput, match=f"`{INDEX}` would have"):
        tpde.pack(source, tmp_path / "packed")


@pytest.mark.parametrize(
    ("mode", "manifest"),
    [(0o700, 0o600), (0o755, 0o644), (0o750, 0o640), (0o770, 0o640), (0o711, 0o600), (0o744, 0o644)],
)
def test_who_may_read_a_folder_may_read_its_manifest(
    mode: int, manifest: int, source: Path, tmp_path: Path
) -> None:
    """And nobody else: it holds the texts of some of its files."""
    source.chmod(mode)
    tpde.pack(source, tmp_path / "packed")
    assert stat.S_IMODE((tmp_path / "packed" / MANIFEST).stat().st_mode) == manifest


def test_permissions_of_what_packing_changes_are_kept_both_ways(source: Path, tmp_path: Path) -> None:
    for i, name in enumerate((INDEX, "config.json", ONE, "sub/notes.txt", "sub", "sub/empty")):
        (source / name).chmod(0o740 + i)
    tpde.pack(source, tmp_path / "packed")
    tpde.unpack(tmp_path / "packed", tmp_path / "back")
    (tmp_path / "packed" / MANIFEST).unlink()
    tpde.unpack(tmp_path / "packed", tmp_path / "again")
    for folder in ("packed", "back", "again"):
        for i, name in enumerate((INDEX, "config.json", ONE, "sub/notes.txt", "sub", "sub/empty")):
            assert stat.S_IMODE((tmp_path / folder / name).stat().st_mode) == 0o740 + i, (folder, name)


def test_no_bits_but_those_of_permissions_are_kept(source: Path, tmp_path: Path) -> None:
    """A program that runs as its owner would be a stranger's gift to whoever unpacks it."""
    names = (ONE, "config.json", "sub/notes.txt", "sub")
    for name in names:
        (source / name).chmod(0o7755)
    if stat.S_IMODE((source / ONE).stat().st_mode) != 0o7755:
        pytest.skip("the file system has no such bits")
    file, packed = tmp_path / "file", tmp_path / "packed"
    tpde.pack(source / ONE, file)
    tpde.pack(source, packed)
    assert tpde.verify(packed, against=source) == []
    for it in (file, *(packed / name for name in names)):
        assert stat.S_IMODE(it.stat().st_mode) == 0o755
        it.chmod(0o7755)
    tpde.unpack(file, tmp_path / "plain")
    tpde.unpack(packed, tmp_path / "back")
    tpde.pack(source / ONE, file, force=True)
    tpde.pack(source, packed, force=True)
    made = [file, tmp_path / "plain", *(at / name for at in (packed, tmp_path / "back") for name in names)]
    assert {stat.S_IMODE(it.stat().st_mode) for it in made} == {0o755}


def test_a_configuration_keeps_what_it_said_of_quantization(source: Path, tmp_path: Path) -> None:
    before = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "x": [1]}}
    (source / "config.json").write_text(json.dumps(before))
    (source / "sub" / "config.json").write_text(json.dumps(before))
    tpde.pack(source, tmp_path / "packed")
    text = (tmp_path / "packed" / "config.json").read_text()
    ours = {"quant_method": "tpde", "version": 1, "source": before["quantization_config"]}
    assert json.loads(text) == before | {"quantization_config": ours}
    # Beside no weights nothing says that any are packed.
    assert json.loads((tmp_path / "packed" / "sub" / "config.json").read_text()) == before
    assert tpde.verify(tmp_path / "packed", against=source) == []
    (tmp_path / "packed" / MANIFEST).unlink()
    tpde.unpack(tmp_path / "packed", tmp_path / "back")
    for name in ("config.json", "sub/config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == before


def test_the_configuration_at_the_top_speaks_for_weights_below(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    for name in ("config.json", "a/config.json", "a/b/config.json", "a/b/c/config.json", "d/config.json"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    (source / "a" / "b" / "x.safetensors").write_bytes(spoilt.PLAIN)
    (source / "d" / "x.safetensors").symlink_to("../a/b/x.safetensors")
    tpde.pack(source, packed)
    changed = {
        it.relative_to(packed).as_posix() for it in packed.rglob("config.json") if it.read_text() != "{}"
    }
    assert changed == {"config.json", "a/b/config.json", "d/config.json"}
    assert tpde.verify(packed, against=source) == []


def test_results_name_files_where_they_are_in_the_end(source: Path, tmp_path: Path) -> None:
    packed, back, again = tmp_path / "packed", tmp_path / "back", tmp_path / "again"
    for call, here, there in (
        (tpde.pack, source, packed),
        (tpde.unpack, packed, back),
        (tpde.unpack, packed, again),
    ):
        found = call(here, there)
        assert [it.destination for it in found.files] == [str(there / ONE), str(there / TWO)]
        assert [it.source for it in found.files] == [str(here / ONE), str(here / TWO)]
        assert [it.destination_bytes for it in found.files] == [
            (there / name).stat().st_size for name in (ONE, TWO)
        ]
        if there == back:
            (packed / MANIFEST).unlink()


def test_a_packed_file_among_plain_ones_is_told_of_the_directory(source: Path, tmp_path: Path) -> None:
    (source / "sub" / "x.safetensors").write_bytes(spoilt.PACKED)
    with pytest.raises(AlreadyPacked, match="packed already") as told:
        tpde.pack(source, tmp_path / "packed")
    assert told.value.where == str(source)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("name", ["config.json", "sub/config.json"])
def test_a_plain_model_that_says_it_is_packed_is_not_packed(name: str, source: Path, tmp_path: Path) -> None:
    (source / name).write_text('{"quantization_config": {"quant_method": "tpde"}}')
    with pytest.raises(InvalidInput, match="says that the weights are packed, but they are plain") as told:
        tpde.pack(source, tmp_path / "packed")
    assert told.value.where == str(source)
    assert not (tmp_path / "packed").exists()


def test_an_index_may_be_a_link_to_another(source: Path, tmp_path: Path) -> None:
    packed, back, other = tmp_path / "packed", tmp_path / "back", "other.safetensors.index.json"
    (source / other).symlink_to(INDEX)
    (source / "sub" / "config.json").symlink_to("../config.json")
    tpde.pack(source, packed)
    assert os.readlink(packed / other) == INDEX
    assert problems(packed, source) == set()
    tpde.unpack(packed, back)
    assert content(back) == content(source)


@pytest.mark.parametrize("action", [tpde.pack, tpde.unpack])
@pytest.mark.parametrize("how", ["inside", "the same", "around", "inside by a link", "around by a link"])
def test_a_destination_is_neither_in_the_source_nor_around_it(
    how: str, action: Callable[..., object], source: Path, tmp_path: Path
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    tpde.pack(source, outer / "packed")
    source.rename(outer / "source")
    here = outer / ("source" if action is tpde.pack else "packed")
    (tmp_path / "link").symlink_to(here if how == "inside by a link" else outer)
    there = {
        "inside": here / "x",
        "the same": here,
        "around": outer,
        "inside by a link": tmp_path / "link" / "x",
        "around by a link": tmp_path / "link",
    }[how]
    before = content(tmp_path)
    for force in (False, True):
        with pytest.raises(InvalidDestination, match="lies inside" if there != here else "is the source"):
            action(here, there, force=force)
    assert content(tmp_path) == before


def test_what_an_older_model_had_goes_with_it(source: Path, tmp_path: Path) -> None:
    (source / "old" / "deep").mkdir(parents=True)
    (source / "old" / "deep" / "file").touch()
    tpde.pack(source, tmp_path / "packed")
    (tmp_path / "packed" / "theirs").mkdir()
    shutil.rmtree(source / "old")
    shutil.rmtree(source / "sub" / "empty")
    (source / "sub" / "notes.txt").unlink()
    (source / "link").unlink()
    tpde.pack(source, tmp_path / "packed", force=True)
    made = {it for it in content(tmp_path / "packed") if it != MANIFEST}
    assert made == {*content(source), "theirs"}
    assert sorted(it.name for it in tmp_path.iterdir()) == ["packed", "source"]


def test_a_plain_model_is_replaced_by_the_same_one_packed(source: Path, tmp_path: Path) -> None:
    """Nothing of it is left: what it is, is known by the names of what is packed."""
    shutil.copytree(source, tmp_path / "there", symlinks=True)
    for _ in range(2):
        tpde.pack(source, tmp_path / "there", force=True)
        assert {it for it in content(tmp_path / "there") if it != MANIFEST} == {*content(source)}
        assert sorted(it.name for it in tmp_path.iterdir()) == ["source", "there"]
    tpde.pack(source, tmp_path / "packed")
    tpde.unpack(tmp_path / "packed", tmp_path / "there", force=True)
    assert content(tmp_path / "there") == content(source)
    (tmp_path / "packed" / MANIFEST).unlink()
    for _ in range(2):
        tpde.unpack(tmp_path / "packed", tmp_path / "there", force=True)
        assert {*content(tmp_path / "there")} == {*content(source)}
    assert sorted(it.name for it in tmp_path.iterdir()) == ["packed", "source", "there"]


@pytest.mark.parametrize("text", ["", "{", '{"version": 9}', '{"version": 1, "files": {}}'])
def test_a_model_whose_manifest_is_damaged_is_replaced_by_its_names(
    text: str, source: Path, tmp_path: Path
) -> None:
    tpde.pack(source, tmp_path / "packed")
    (tmp_path / "packed" / MANIFEST).write_text(text)
    tpde.pack(source, tmp_path / "packed", force=True)
    assert tpde.verify(tmp_path / "packed", against=source) == []
    (tmp_path / "packed" / MANIFEST).write_text(text)
    (source / "sub" / "notes.txt").unlink()
    with pytest.raises(InvalidDestination, match=r"sub/notes\.txt"):
        tpde.pack(source, tmp_path / "packed", force=True)


def test_unpacking_replaces_what_the_model_has_and_nothing_else(packed: Path, tmp_path: Path) -> None:
    tpde.unpack(packed, tmp_path / "back")
    tpde.unpack(packed, tmp_path / "back", force=True)
    assert content(tmp_path / "back") == content(tmp_path / "source")
    (tmp_path / "back" / "thesis").touch()
    with pytest.raises(InvalidDestination, match="thesis"):
        tpde.unpack(packed, tmp_path / "back", force=True)


# ---- unpacking


@pytest.mark.parametrize("name", [ONE, "config.json", "sub/notes.txt", "sub/none"])
def test_a_file_that_is_missing_is_named(name: str, packed: Path, source: Path) -> None:
    (packed / name).unlink()
    with pytest.raises(Truncated, match=f"lacks `{name}`, which its manifest names"):
        tpde.unpack(packed, packed.with_name("back"))
    missing = f"`packed/{name}` is missing, or is no file"
    assert problems(packed) == {(f"packed/{name}", missing)} == problems(packed, source)
    (packed / name).mkdir()
    assert problems(packed) == {(f"packed/{name}", missing)}


def test_a_link_need_not_be_there_to_be_restored(packed: Path, tmp_path: Path) -> None:
    (packed / "link").unlink()
    tpde.unpack(packed, tmp_path / "back")
    assert os.readlink(tmp_path / "back" / "link") == "sub/notes.txt"
    (packed / "link").symlink_to("config.json")
    with pytest.raises(Corrupt, match="is not the link that was packed, nor a copy"):
        tpde.unpack(packed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_folders_that_hold_nothing_are_restored(packed: Path, tmp_path: Path) -> None:
    (packed / "sub" / "empty").rmdir()
    tpde.unpack(packed, tmp_path / "back")
    assert (tmp_path / "back" / "sub" / "empty").is_dir()
