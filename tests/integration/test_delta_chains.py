"""Chains of deltas: every link is found where it lies, and is the right one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.contents import fill, rng, spec_of
from support.delta_files import file_delta
from support.files import safetensors_bytes

from tpde.errors import Corrupt, InvalidInput, MissingBase
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile
from tpde.store.diffing import diff
from tpde.store.open_state import base_path, open_state
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


def _chain(folder: Path, length: int) -> tuple[list[bytes], list[Path]]:
    """Give the states of a model that is trained, and the first as a file with a delta for each other."""
    words, draw, states = 3000, rng("chain"), []
    now = np.frombuffer(fill("normal", spec_of("BF16", words)), np.uint16)
    plain = folder / "plain"
    plain.mkdir()
    for step in range(length):
        states.append(safetensors_bytes({"w": (spec_of("BF16", words), now.tobytes())}, {"step": str(step)}))
        (plain / f"step{step}").write_bytes(states[step])
        now = np.where(draw.random(words) < 0.01, now + 1, now).astype(np.uint16)
    places = [folder / f"step{step}" for step in range(length)]
    places[0].write_bytes(states[0])
    for step in range(1, length):  # among the plain states: it names the base that it will lie beside
        diff(plain / f"step{step - 1}", plain / f"step{step}", plain / "delta", force=True)
        (plain / "delta").rename(places[step])
    return states, places


def test_chains_are_followed(tmp_path: Path) -> None:
    states, places = _chain(tmp_path, 6)
    (tmp_path / "other").write_bytes(states[0])
    diff(places[5], tmp_path / "other", tmp_path / "back")
    patch(places[5], tmp_path / "back", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == states[0]
    for step in (1, 5):
        patch(places[step - 1], places[step], tmp_path / "out", force=True)
        assert (tmp_path / "out").read_bytes() == states[step]
        assert verify_delta(places[step], base=places[step - 1]) == []


def test_a_chain_of_240_steps(tmp_path: Path) -> None:
    """And no more."""
    states, places = _chain(tmp_path, 242)
    (tmp_path / "other").write_bytes(states[0])
    diff(places[240], tmp_path / "other", tmp_path / "back")
    patch(places[239], places[240], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == states[240]
    with pytest.raises(InvalidInput, match="more than 240"):
        diff(places[241], tmp_path / "other", tmp_path / "back", force=True)


def test_a_missing_link_is_named(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 4)
    places[1].unlink()
    with pytest.raises(MissingBase, match=r"step2.*step1"):
        patch(places[2], places[3], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_is_found_beside_a_symlink_or_beside_what_it_leads_to(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 3)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to("../step2")
    with closing(DeltaFile(FileSource(link))) as file:
        assert base_path(file) == places[1]
        beside = tmp_path / "elsewhere" / "step1"
        beside.symlink_to("../step1")  # as in the hub's cache
        assert base_path(file) == beside
    (tmp_path / "other").write_bytes(places[0].read_bytes())
    diff(link, tmp_path / "other", tmp_path / "elsewhere" / "back")
    patch(link, tmp_path / "elsewhere" / "back", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == places[0].read_bytes()
    beside.unlink()
    patch(link, tmp_path / "elsewhere" / "back", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == places[0].read_bytes()
    places[1].unlink()
    with pytest.raises(MissingBase, match=r"link.*step1.*where nothing is"):
        open_state(link)


def test_exchanged_links_are_refused(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 4)
    shutil.copy(places[2], tmp_path / "kept")
    shutil.copy(places[1], places[2])  # is now its own base's twin: made from step 0, it has it for a base
    with pytest.raises(MissingBase, match="tensor `w`"):
        patch(places[2], places[3], tmp_path / "out")


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let few files be open at a time: whoever follows a cycle for ever ends soon."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_files")
def test_cycles_are_refused(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 3)
    (tmp_path / "kept").write_bytes(places[0].read_bytes())
    diff(places[2], tmp_path / "kept", tmp_path / "turn")
    shutil.copy(tmp_path / "turn", places[0])  # step0's base is step2, whose is step1, whose is step0
    with pytest.raises(Corrupt, match=r"step2.*step1.*step0.*step2"):
        patch(places[2], tmp_path / "turn", tmp_path / "out")


def test_a_delta_beside_a_link_finds_its_base(tmp_path: Path) -> None:
    """Its hint goes from where it lies to where the base lies, whatever links led there."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    base, target = file_delta(tmp_path)
    report = diff(base, target, tmp_path / "link" / "delta")
    assert report.base == "../../base"
    open_state(tmp_path / "real" / "deep" / "delta").close()


@pytest.mark.parametrize("hint", [None, "", "gone", "/", "ba\0se"])
def test_a_base_that_is_nowhere_is_missing(hint: str | None, tmp_path: Path) -> None:
    file_delta(tmp_path)
    file = DeltaFile(FileSource(tmp_path / "delta"))
    assert base_path(file) == tmp_path / "base"
    file.head.base = hint
    with pytest.raises(MissingBase, match=r"has its base at .*, where nothing is") as caught:
        base_path(file)
    assert ("an unknown place" in str(caught.value)) is not bool(hint)
    file.close()
