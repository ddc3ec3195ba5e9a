"""Where deltas and what they make may be written: nothing is lost, with `force` neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.delta_files import file_delta, makers
from support.states import content, folders

from tpde.errors import DestinationExists, InvalidDestination
from tpde.store.diffing import diff
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


@makers
def test_destinations_are_guarded(make, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "delta")
    with pytest.raises(DestinationExists):
        diff(base, target, tmp_path / "delta")
    with pytest.raises(DestinationExists):
        patch(base, tmp_path / "delta", target)
    before = content(base)
    for destination in (base, tmp_path / "delta"):
        with pytest.raises(InvalidDestination):
            patch(base, tmp_path / "delta", destination, force=True)
    if base.is_file():
        with pytest.raises(InvalidDestination):
            diff(base, target, base, force=True)
    assert content(base) == before
    assert verify_delta(tmp_path / "delta") == []


def test_places_where_no_file_can_be_are_refused(tmp_path: Path) -> None:
    base, target = file_delta(tmp_path)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "none/out", "base/out"):
        with pytest.raises(InvalidDestination):
            diff(base, target, tmp_path / name, force=True)
        with pytest.raises(InvalidDestination):
            patch(base, tmp_path / "delta", tmp_path / name, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_delta_goes_to_no_place_inside_what_it_is_made_from(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    diff(base, target, tmp_path / "delta")
    (tmp_path / "box").mkdir()
    (tmp_path / "delta").rename(tmp_path / "box" / "delta")
    before = content(tmp_path)
    for out in (base / "out", tmp_path / "box"):
        with pytest.raises((InvalidDestination, DestinationExists)):
            patch(base, tmp_path / "box" / "delta", out, force=True)
    assert content(tmp_path) == before


def test_a_delta_is_not_replaced_by_a_file_of_its_own_name(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    (tmp_path / "box").mkdir()
    diff(base, target, tmp_path / "box" / "notes.txt")  # as a file of the target is called
    before = content(tmp_path)
    with pytest.raises(InvalidDestination):
        patch(base, tmp_path / "box" / "notes.txt", tmp_path / "box", force=True)
    assert content(tmp_path) == before


def test_force_replaces_what_was_patched_before_and_nothing_else(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    diff(base, target, tmp_path / "delta")
    for _ in range(2):
        patch(base, tmp_path / "delta", tmp_path / "out", force=True)
    assert content(tmp_path / "out") == content(target)
    (tmp_path / "out" / "deep" / "mine.txt").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(InvalidDestination, match=r"mine\.txt"):
        patch(base, tmp_path / "delta", tmp_path / "out", force=True)
    assert content(tmp_path) == before
