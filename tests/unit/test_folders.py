"""Small model directories, packed, verified and unpacked: what each part of them becomes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import files, spoilt
from support.changes import content, make_source

import tpde
from tpde.errors import AlreadyPacked, Corrupt, InvalidDestination, InvalidInput, NotPacked, Truncated
from tpde.files.resaved import is_resaved
from tpde.format.constants import MANIFEST

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Give a model with something of everything."""
    return make_source(tmp_path / "source")


@pytest.fixture
def packed(source: Path) -> Path:
    """Give the same packed."""
    tpde.pack(source, source.with_name("packed"))
    return source.with_name("packed")


@pytest.fixture
def saved_again(packed: Path) -> Path:
    """Give the same as if a library had saved it again."""
    (packed / MANIFEST).unlink()
    return packed


def manifest_of(packed: Path) -> dict[str, Any]:
    return dict(json.loads((packed / MANIFEST).read_text("utf-8")))


def problems(packed: Path, source: Path | None = None) -> set[tuple[str, str]]:
    """Where verify finds something, and what in a few words."""
    root = packed.parent
    return {
        (Path(it.file).relative_to(root).as_posix(), it.message.replace(f"{root}/", ""))
        for it in tpde.verify(packed, against=source)
    }


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


# ---- verifying


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


# ---- without a manifest


def test_a_directory_is_saved_again_if_weights_or_a_configuration_say_so(packed: Path, source: Path) -> None:
    assert not is_resaved(packed)
    assert not is_resaved(source)
    (packed / MANIFEST).unlink()
    assert is_resaved(packed)
    shutil.copy(source / "config.json", packed)
    assert is_resaved(packed)  # by its weights
    for name in (ONE, TWO):
        shutil.copy(source / name, packed)
    assert not is_resaved(packed)
    (packed / "config.json").write_text('{"quantization_config": {"quant_method": "tpde"}}')
    assert is_resaved(packed)  # by its configuration
    (packed / "config.json").unlink()
    (packed / ONE).write_bytes(b"no weights")  # which reading says
    assert not is_resaved(packed)
    with pytest.raises(NotPacked):
        tpde.verify(packed)


def test_a_model_that_was_saved_again_becomes_plain(saved_again: Path, source: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    summary = tpde.unpack(saved_again, back)
    assert summary.left_out == ()
    assert content(back).keys() == content(source).keys()
    for name in (ONE, TWO, "sub/notes.txt", "link", "sub/empty"):
        assert content(back)[name] == content(source)[name]
    for name in (INDEX, "config.json"):
        assert json.loads((back / name).read_text("utf-8")) == json.loads((source / name).read_text("utf-8"))


def test_what_a_library_saved_again_lacks_no_manifest(saved_again: Path) -> None:
    """It has no source to restore; what packing wrote has, and only that."""
    assert [Path(it.file).name for it in tpde.verify(saved_again)] == [MANIFEST]
    for name in (ONE, TWO):
        (saved_again / name).write_bytes(files.saved_again((saved_again / name).read_bytes()))
    assert tpde.verify(saved_again) == []


def test_a_packed_model_within_one_that_was_saved_again_becomes_plain_too(
    saved_again: Path, source: Path, tmp_path: Path
) -> None:
    tpde.pack(source, tmp_path / "other")
    shutil.move(tmp_path / "other", saved_again / "part")
    tpde.unpack(saved_again, tmp_path / "back")
    assert not (tmp_path / "back" / "part" / MANIFEST).exists()
    assert (tmp_path / "back" / "part" / ONE).read_bytes() == (source / ONE).read_bytes()
    # What is missing is the manifest at the top, and none is at the part.
    assert ["which restores the source, is missing" in it.message for it in tpde.verify(saved_again)] == [
        True
    ]
    shutil.copy(source / "config.json", saved_again)
    assert tpde.verify(saved_again) == []


def test_damage_of_a_model_that_was_saved_again_is_named(saved_again: Path, source: Path) -> None:
    shutil.copy(source / "config.json", saved_again)
    assert tpde.verify(saved_again) == []
    data = bytearray((saved_again / ONE).read_bytes())
    data[-1500] ^= 1
    (saved_again / ONE).write_bytes(data)
    (problem,) = tpde.verify(saved_again)
    assert problem.file == str(saved_again / ONE)
    with pytest.raises(Corrupt, match="model-00001"):
        tpde.unpack(saved_again, saved_again.with_name("back"))


def test_a_plain_file_of_a_model_that_was_saved_again_is_copied(
    saved_again: Path, source: Path, tmp_path: Path
) -> None:
    shutil.copy(source / TWO, saved_again)
    found = tpde.unpack(saved_again, tmp_path / "back")
    assert [Path(it.destination).name for it in found.files] == [ONE]
    assert [Path(it.file).name for it in tpde.verify(saved_again)] == [MANIFEST]
    assert (tmp_path / "back" / TWO).read_bytes() == (source / TWO).read_bytes()
    assert tpde.unpack(saved_again, tmp_path / "back", force=True)
    with pytest.raises(InvalidDestination, match="lies inside"):
        tpde.unpack(saved_again, saved_again / "back")


def test_an_index_of_a_missing_shard_is_told_where_there_is_no_manifest(saved_again: Path) -> None:
    (saved_again / ONE).unlink()
    for call in (tpde.verify, lambda it: tpde.unpack(it, saved_again.with_name("back"))):
        with pytest.raises(InvalidInput, match="which is missing"):
            call(saved_again)
