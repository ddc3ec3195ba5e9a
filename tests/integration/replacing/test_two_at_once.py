"""Two that write one folder at once: one of them is refused, and nothing of the two is mixed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

import pytest
from support import spoilt
from support.folders import names, visible

from tpde.errors import InvalidDestination
from tpde.files.operations import pack, unpack

MODEL = {"model.safetensors", "config.json", "tpde_manifest.json"}
OTHER = {"model.safetensors", "other.safetensors", "tpde_manifest.json"}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Give another model, with a shard of the same name, and one more."""
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("model.safetensors", "other.safetensors"):
        (folder / name).write_bytes(spoilt.PLAIN)
    return folder


def test_a_second_run_into_a_folder_is_refused_while_the_first_one_lives(
    model: Path, other: Path, tmp_path: Path, way: str
) -> None:
    place, packed = tmp_path / "place", tmp_path / "packed"
    for it in (place, packed):
        pack(other, it)
    seen = []

    def again(_: int) -> None:
        if not seen:
            seen.append(visible(tmp_path))
            for call, source in ((pack, other), (unpack, packed)):
                with pytest.raises(InvalidDestination, match=r"place` is being written by another process"):
                    call(source, place, force=True)
            seen.append(visible(tmp_path))
            pack(other, tmp_path / "place.2")  # whose temporary name begins alike

    pack(model, place, force=True, progress=again)
    assert names(place) == MODEL
    assert seen[0] == seen[1]
    assert visible(tmp_path) == ["model", "other", "packed", "place", "place.2"]
    pack(other, place, force=True)  # which is free again
    assert names(place) == OTHER


@pytest.mark.parametrize("turn", range(8))
def test_threads_that_begin_at_once_make_one_model_or_none(
    turn: int, model: Path, other: Path, tmp_path: Path, way: str
) -> None:
    place, start = tmp_path / "place", threading.Barrier(2)
    done = []

    def run(source: Path) -> None:
        start.wait(60)
        with contextlib.suppress(InvalidDestination):
            pack(source, place, force=True, threads=1)
            done.append(source)

    threads = [threading.Thread(target=run, args=(source,)) for source in (model, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = names(place) if place.exists() else None
    assert found in ([MODEL, OTHER] if done else [None])
    assert not [name for name in visible(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("there", [False, True])
def test_where_nothing_can_be_locked_a_folder_that_another_run_put_there_stays(
    there: bool, model: Path, other: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the shards of the one would be carried over into the other."""
    place = tmp_path / "place"
    if there:
        pack(model, place)

    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(95, os.strerror(95))

    def again(_: int) -> None:
        if not (place / "other.safetensors").exists():
            pack(other, place, force=True)

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(InvalidDestination, match=r"put in the place of .*place` while this was made"):
        pack(model, place, force=True, progress=again)
    assert names(place) == OTHER
    assert visible(tmp_path) == ["model", "other", "place"]
