"""Where deltas and what they make may be written: nothing is lost, with `force` neither."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.delta_files import file_delta, makers
from support.states import content, files, folders

import tpde
from tpde.errors import DestinationExists, InvalidDestination, InvalidInput
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


# ---- with `force`, nothing of a source is lost


def test_no_delta_goes_into_its_sources_or_a_packed_model(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    tpde.pack(base, tmp_path / "packed")
    before, name = content(tmp_path), next(iter(base.glob("*.safetensors"))).name
    for out in (base / name, base / "new", target / name, target / "config.json"):
        with pytest.raises(InvalidDestination, match="lies inside the source"):
            diff(base, target, out, force=True)
    for out in (tmp_path / "packed" / "config.json", tmp_path / "packed" / "new"):
        with pytest.raises(InvalidDestination, match="inside the packed model"):
            diff(base, target, out, force=True)
        with pytest.raises(InvalidDestination, match="inside the packed model"):
            diff(base / name, target / name, out, force=True)
    assert content(tmp_path) == before


def test_a_link_in_a_source_is_part_of_it_wherever_it_leads(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    (tmp_path / "elsewhere").write_text("theirs")
    (base / "link").symlink_to("../elsewhere")
    with pytest.raises(InvalidDestination):
        diff(base, target, base / "link", force=True)
    assert (base / "link").is_symlink()


@pytest.mark.parametrize(
    ("command", "around"),
    [*((it, False) for it in ("pack", "diff from", "diff to", "patch")), ("pack", True), ("patch", True)],
)
def test_what_a_link_in_a_source_leads_to_is_kept(command: str, around: bool, tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    diff(base, target, tmp_path / "delta")
    snapshot = base if command != "diff to" else target
    weights = next(iter(snapshot.glob("*.safetensors")))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    shutil.move(weights, blobs / weights.name)
    weights.symlink_to(f"../blobs/{weights.name}")
    out = blobs if around else blobs / weights.name
    calls: dict[str, Callable[[], object]] = {
        "pack": lambda: tpde.pack(base, out, force=True),
        "diff from": lambda: diff(base, target, out, force=True),
        "diff to": lambda: diff(base, target, out, force=True),
        "patch": lambda: patch(base, tmp_path / "delta", out, force=True),
    }
    before = content(tmp_path)
    with pytest.raises(InvalidDestination, match="in the source leads to"):
        calls[command]()
    assert content(tmp_path) == before


@pytest.mark.parametrize("make", [files, folders], ids=["file", "folder"])
def test_what_a_delta_stands_on_is_kept(make: Callable[[Path], tuple[Path, Path]], tmp_path: Path) -> None:
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "first")
    diff(tmp_path / "first", base, tmp_path / "second")
    diff(tmp_path / "second", target, tmp_path / "third")
    before = content(tmp_path)
    outs = [tmp_path / "first", tmp_path / "second"]
    outs.append(base if base.is_file() else next(iter(base.glob("*.safetensors"))))
    for out in outs:
        with pytest.raises(InvalidDestination):
            diff(tmp_path / "second", target, out, force=True)
        with pytest.raises(InvalidDestination):
            diff(target, tmp_path / "second", out, force=True)
    for out in (*outs[:2], base):
        with pytest.raises(InvalidDestination):
            patch(tmp_path / "second", tmp_path / "third", out, force=True)
    assert content(tmp_path) == before
    assert verify_delta(tmp_path / "third") == []


def test_a_delta_in_the_place_of_a_link_says_where_its_base_is_from_there(tmp_path: Path) -> None:
    base, target = files(tmp_path)
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "far" / "away" / "delta").write_text("theirs")
    (tmp_path / "link").symlink_to("far/away/delta")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("link", "circle"):
        assert diff(base, target, tmp_path / name, force=True).base == base.name
        diff(tmp_path / name, base, tmp_path / f"on {name}")
    assert (tmp_path / "far" / "away" / "delta").read_text() == "theirs"


def test_a_base_that_is_a_circle_of_links_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InvalidInput, match="does not exist"):
        diff(tmp_path / "circle", files(tmp_path)[1], tmp_path / "delta")
