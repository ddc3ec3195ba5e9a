"""Places where nothing is written, and what is there is not replaced."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support import renames
from support.folders import names, visible

from tpde.errors import DestinationExists, InvalidDestination
from tpde.files.operations import pack, unpack
from tpde.store.diffing import diff
from tpde.store.patching import patch


@pytest.mark.parametrize("kind", ["pipe", "file of others", "file beside the cache"])
def test_what_would_be_lost_is_named_and_nothing_is_done(kind: str, model: Path, old: Path) -> None:
    if kind == "pipe":
        (old / "config.json").unlink()
        os.mkfifo(old / "config.json")
        says = "holds `config.json`, which is a pipe and would be lost"
    elif kind == "file of others":
        (old / "logs" / "notes").touch()
        says = "holds `logs/notes`, which is no file of this model and would be lost"
    else:
        (old / ".cached").mkdir()
        (old / ".cached" / "notes").touch()
        says = r"holds `\.cached/notes`, which is no file of this model"
    before = names(old)
    for force in (True, False):
        with pytest.raises(InvalidDestination, match=says):
            pack(model, old, force=force)
    assert names(old) == before
    assert visible(old.parent) == ["model", "there"]


@pytest.mark.parametrize("name", ["none/x", "file/x", "link/x"])
def test_places_where_no_folder_can_be_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for force in (False, True):
        with pytest.raises(InvalidDestination):
            pack(model, tmp_path / name, force=force)
    assert visible(tmp_path) == ["file", "link", "model"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("place", [".", "..", "../deep/.."])
def test_places_without_a_name_are_refused(
    place: str, force: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    name = "deep" if place == "." else "here"
    with pytest.raises(InvalidDestination, match=f"has no name, .* from the folder above: `{name}`"):
        pack(model, place, force=force)
    assert visible(tmp_path) == ["here", "model"]


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_put_inside_a_packed_model(force: bool, model: Path, tmp_path: Path) -> None:
    packed, file, delta = tmp_path / "packed", tmp_path / "alone.safetensors", tmp_path / "delta"
    pack(model, packed)
    pack(model, tmp_path / "other")
    pack(model / "model.safetensors", file)
    (packed / "sub").mkdir()
    (tmp_path / "link").symlink_to(packed / "sub")
    diff(model, model, delta)
    diff(model / "model.safetensors", model / "model.safetensors", tmp_path / "of_file")
    before = names(packed)
    for call in (
        lambda place: pack(model, place, force=force),
        lambda place: pack(model / "model.safetensors", place, force=force),
        lambda place: unpack(tmp_path / "other", place, force=force),
        lambda place: unpack(file, place, force=force),
        lambda place: patch(model, delta, place, force=force),
        lambda place: patch(model / "model.safetensors", tmp_path / "of_file", place, force=force),
    ):
        for place in (
            packed / "new",
            packed / "sub" / "deep",
            packed / "config.json",
            tmp_path / "link" / "x",
        ):
            with pytest.raises(InvalidDestination, match=f"inside the packed model `{packed}`.* outside it"):
                call(place)
    assert names(packed) == before
    (packed / "sub").rmdir()
    pack(model, packed, force=True)  # the model itself is replaced
    (tmp_path / "link2").symlink_to(packed)
    pack(model, tmp_path / "link2", force=True)  # and a link that leads there, by a folder of its own
    assert names(packed) == before - {"sub"}
    assert not (tmp_path / "link2").is_symlink()


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_pack_never_replaces_what_appears_at_the_last_moment(
    what: str, fallback: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes it after the pack has looked for the last time: of a file, another pack."""
    source = model if what == "folder" else model / "model.safetensors"
    target, before = tmp_path / "out", []

    def second_first(old: Path, new: Path, swap: bool) -> None:
        if new == target and not before:
            before.append(0)
            (pack if what == "file" else shutil.copytree)(source, target)
            before[0] = target.stat().st_ino

    if fallback:
        renames.missing(monkeypatch)
    renames.watched(monkeypatch, second_first)
    with pytest.raises(DestinationExists):
        pack(source, target)
    assert target.stat().st_ino == before[0]
    assert visible(tmp_path) == ["model", "out"]
