"""Links to steps of a store: each stands for one state, whoever has its number later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.training import no_thread_writes

from tpde import CheckpointStore
from tpde.errors import InvalidDestination, InvalidInput
from tpde.store.linked import LinkedSteps, load_linked
from tpde.store.step_links import read_link

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")

ID = "0123456789abcdef" * 2


def _steps(folder: Path, *, background: bool = False) -> LinkedSteps:
    return LinkedSteps(folder / "store", lambda: folder.glob("*"), background=background)


def test_a_link_of_a_save_that_failed_stands_for_no_other_state(tmp_path: Path) -> None:
    steps, one, two = _steps(tmp_path, background=True), tmp_path / "one", tmp_path / "two"
    with pytest.MonkeyPatch.context() as patch:
        no_thread_writes(patch)
        steps.save(one, {"w": torch.ones(3)}, 7)
        with pytest.raises(InvalidDestination, match="No space"):
            steps.store.wait()
    with pytest.raises(InvalidInput, match="has no step 7"):
        load_linked(tmp_path / "store", one)
    steps.save(two, {"w": torch.zeros(3)}, 7)
    steps.store.close()
    with pytest.raises(InvalidInput, match=r"one` names step 7 of `.*store`, which is another state") as told:
        load_linked(tmp_path / "store", one)
    assert told.value.hint == "take another checkpoint"
    assert (told.value.found, told.value.needed) == (read_link(two).state_id, read_link(one).state_id)
    assert load_linked(tmp_path / "store", two)["w"].tolist() == [0, 0, 0]


def test_a_link_is_replaced_when_the_state_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, link = _steps(tmp_path, background=True), tmp_path / "last"
    steps.save(link, {"x": 1}, 1)
    steps.store.wait()

    def killed(*_: object, **__: object) -> None:
        raise OSError("the process is gone")

    with monkeypatch.context() as patch:
        patch.setattr("tpde.store.checkpoints.write_delta_file", killed)
        with pytest.raises(OSError, match="is gone"):
            steps.save(link, {"x": 2}, 2)
    steps.store.close()
    assert load_linked(tmp_path / "store", link)["x"] == 1


def test_a_number_given_anew_is_another_state(tmp_path: Path) -> None:
    steps = _steps(tmp_path)
    steps.save(tmp_path / "one", {"x": 1}, 7)
    steps.store.prune(drop=[7])
    steps.store.save(7, {"x": 2})
    steps.store.close()
    with pytest.raises(InvalidInput, match=r"the step 'none'\)"):
        load_linked(tmp_path / "store", tmp_path / "one", part="x")


def test_links_without_an_id_take_any_state_of_their_number(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "store") as store:
        store.save(7, {"x": 1})
        store.save(8, {"x": 2}, state_id=ID)
    for step, x in ((7, 1), (8, 2)):
        (tmp_path / "old").write_text(f'{{"tpde_step": {step}}}\n')
        assert load_linked(tmp_path / "store", tmp_path / "old")["x"] == x


@pytest.mark.parametrize("state_id", ["", "0" * 31, "0" * 33, "G" * 32, 7, ["0" * 32]])
def test_ids_that_are_none(tmp_path: Path, state_id: object) -> None:
    store = CheckpointStore(tmp_path / "store")
    with pytest.raises(InvalidInput, match="state_id"):
        store.save(7, {"x": 1}, state_id=state_id)  # type: ignore[arg-type]
    assert store.steps == ()
    (tmp_path / "link").write_text(json.dumps({"tpde_step": 7, "tpde_id": state_id}))
    with pytest.raises(InvalidInput, match="does not name a step"):
        read_link(tmp_path / "link")


def test_steps_that_are_rewritten_keep_their_id(tmp_path: Path) -> None:
    steps = _steps(tmp_path)
    for step in (1, 2):
        steps.save(tmp_path / str(step), {"w": torch.full((8,), float(step))}, step)
    before = (tmp_path / "store" / "step-00000002.tpde").read_bytes()
    steps.store.prune(keep=1)
    steps.store.close()
    assert (tmp_path / "store" / "step-00000002.tpde").read_bytes() != before
    assert load_linked(tmp_path / "store", tmp_path / "2")["w"].tolist() == [2.0] * 8


def test_what_carries_no_id_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in "ab":
        with CheckpointStore(tmp_path / name) as store:
            store.save(7, {"w": torch.ones(8)})
    files = [(tmp_path / name / "step-00000007.tpde").read_bytes() for name in "ab"]
    assert files[0] == files[1]
