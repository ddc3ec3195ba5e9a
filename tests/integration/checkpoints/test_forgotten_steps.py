"""Steps go when their links are known to be gone, and not before."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tpde import CheckpointStore
from tpde.store.linked import LinkedSteps, links_below, load_linked
from tpde.store.step_links import LINK

STORE = "run/store"


@pytest.fixture
def steps(tmp_path: Path) -> LinkedSteps:
    """Steps 0 to 3, each whole, whose links are in folders beside the store."""
    made = LinkedSteps(tmp_path / STORE, lambda: links_below(tmp_path / "run"), keyframe_every=1)
    for step in range(4):
        made.save(tmp_path / "run" / str(step) / LINK, {"x": step}, step)
    return made


def _loads(store: Path, folder: Path, x: int) -> None:
    assert load_linked(store, folder / LINK)["x"] == x


def test_what_was_removed_is_forgotten_with_its_record(steps: LinkedSteps, tmp_path: Path) -> None:
    for step in (0, 2):
        shutil.rmtree(tmp_path / "run" / str(step))
    assert len(list((tmp_path / STORE).glob("link-*"))) == 4
    steps.forget()
    assert steps.store.steps == (1, 3)
    assert len(list((tmp_path / STORE).glob("link-*"))) == 2
    steps.forget()
    assert steps.store.steps == (1, 3)


@pytest.mark.parametrize("place", ["run/best", "elsewhere/best", "run/1/inner"])
def test_what_was_moved_is_not_gone(steps: LinkedSteps, tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    os.rename(tmp_path / "run" / "2", tmp_path / place)
    steps.forget()
    assert steps.store.steps == (0, 1, 2, 3)
    _loads(tmp_path / STORE, tmp_path / place, 2)
    shutil.rmtree(tmp_path / place)
    steps.forget()
    assert steps.store.steps == (0, 1, 3)


@pytest.mark.parametrize("linked", [False, True])
def test_a_copy_in_the_stores_folder_counts(steps: LinkedSteps, tmp_path: Path, linked: bool) -> None:
    best = tmp_path / "run" / "deep" / "best"
    best.parent.mkdir()
    if linked:
        best.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
        (best.parent / "itself").symlink_to(best.parent, target_is_directory=True)
    shutil.copytree(tmp_path / "run" / "2", tmp_path / "elsewhere" if linked else best)
    shutil.rmtree(tmp_path / "run" / "2")
    steps.forget()
    assert steps.store.steps == (0, 1, 2, 3)
    _loads(tmp_path / STORE, best, 2)


def test_nothing_is_known_of_a_copy_of_a_run(steps: LinkedSteps, tmp_path: Path) -> None:
    """Its links may have been moved before: names in it are counted from the copy on."""
    steps.store.close()
    os.rename(tmp_path / "run" / "2", tmp_path / "two")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    again = LinkedSteps(tmp_path / "copy" / "store", tuple, keyframe_every=1)
    again.save(tmp_path / "copy" / "4" / LINK, {"x": 4}, 4)
    again.save(tmp_path / "copy" / "5" / LINK, {"x": 5}, 5)
    shutil.rmtree(tmp_path / "copy" / "4")
    again.forget()
    assert again.store.steps == (0, 1, 2, 3, 5)


def test_a_path_that_was_written_again_names_the_new_state(steps: LinkedSteps, tmp_path: Path) -> None:
    steps.save(tmp_path / "run" / "1" / LINK, {"x": 9}, 1)
    steps.forget()
    assert steps.store.steps == (0, 2, 3, 4)
    _loads(tmp_path / STORE, tmp_path / "run" / "1", 9)


def test_steps_of_others_stay(steps: LinkedSteps, tmp_path: Path) -> None:
    """So does one whose number was that of a state that is gone."""
    shutil.rmtree(tmp_path / "run" / "3")
    steps.store.prune(drop=[3])
    steps.store.save(3, {"x": "mine"})
    steps.store.save(7, {"x": "mine"})
    shutil.rmtree(tmp_path / "run" / "0")
    steps.forget()
    assert steps.store.steps == (1, 2, 3, 7)


def _no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize("link", [_no_links, shutil.copy])
def test_without_hard_links_steps_stay_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, link: Any
) -> None:
    steps = LinkedSteps(tmp_path / STORE, tuple)
    with caplog.at_level(logging.WARNING, "tpde"), monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        for step in range(2):
            steps.save(tmp_path / str(step) / LINK, {"x": step}, step)
    assert [it.levelname for it in caplog.records] == ["WARNING"]
    assert "until you call `prune`" in caplog.text
    shutil.rmtree(tmp_path / "0")
    steps.forget()
    assert steps.store.steps == (0, 1)
    assert not list((tmp_path / STORE).glob("link-*"))


def test_damaged_records_hinder_nothing(steps: LinkedSteps, tmp_path: Path) -> None:
    (tmp_path / "run" / "1" / LINK).write_text("{}")
    for step in (0, 1):
        shutil.rmtree(tmp_path / "run" / str(step))
    (tmp_path / STORE / "link-1.json").mkdir()
    (tmp_path / STORE / "link-x.json").write_text('{"tpde_step": 2}')
    steps.forget()
    assert steps.store.steps == (1, 2, 3)


def test_a_damaged_step_goes_as_others_do(steps: LinkedSteps, tmp_path: Path) -> None:
    for step in (0, 1):
        shutil.rmtree(tmp_path / "run" / str(step))
    (tmp_path / STORE / "step-00000001.tpde").write_text("damaged")
    steps.forget()
    assert CheckpointStore(tmp_path / STORE).steps == (2, 3)
