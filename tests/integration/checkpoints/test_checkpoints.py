"""The checkpoint store: every step loads, whatever happens."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.training import check, equal, filled, training, write_step

import tpde
from tpde import CheckpointStore
from tpde.errors import Corrupt, InvalidInput, TpdeError, UnsupportedDevice
from tpde.io.sinks import FileSink
from tpde.store.chain import STEP, TREE, name_of, open_step
from tpde.store.delta_file import DeltaFile
from tpde.store.delta_report import inspect_delta
from tpde.store.delta_state import DeltaState
from tpde.store.state_tree import StateTree, leaf_bytes
from tpde.store.states import MemoryState, State, nothing

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_every_step_loads_with_its_bits(
    run: dict[int, Any], tmp_path: Path, background: bool, fast: bool
) -> None:
    with CheckpointStore(tmp_path / "store", keyframe_every=4, fast=fast) as store:
        for step, state in training(9):
            store.save(step, state, background=background)
    check(tmp_path / "store", run, run)
    assert equal(store.load(), run[9])
    assert [it.base for it in store.describe()] == [None, 1, 2, 3, None, 5, 6, 7, None]
    found = store.load(9)["model"]
    assert found["0.weight"] is found["2.weight"]


@pytest.mark.parametrize("background", [False, True])
def test_retained_states_give_the_same_files(
    run: dict[int, Any], tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "read", run, keyframe_every=4)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaFile, "payload", None)  # no file is read
        with CheckpointStore(tmp_path / "retained", keyframe_every=4, retain=True) as store:
            for step, state in training(9):
                store.save(step, state, background=background)
    check(tmp_path / "retained", run, run)
    for step in run:
        one, other = (tmp_path / name / name_of(step) for name in ("read", "retained"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_is_not_what_is_retained(
    run: dict[int, Any], tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore(tmp_path, retain=True) as store:
        store.save(1, run[1])
        store.save(2, run[2])
        with monkeypatch.context() as patch:
            patch.setattr(FileSink, "commit", None)

            def save() -> None:
                store.save(3, run[3], background=background)
                store.wait()

            with pytest.raises(TypeError):
                save()
        store.save(4, run[4])
        store.save(5, run[5])
    check(tmp_path, run, (1, 2, 4, 5))


@pytest.mark.parametrize("large", [bytes(4_000_000), "0.0," * 1_200_000], ids=["bytes", "text"])
def test_what_can_be_compressed_well_is_saved_and_loaded(large: Any, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"weight": torch.ones(4), "large": large})
        assert store.load(1)["large"] == store.load(2)["large"] == large
        assert store.verify() == []


def test_a_state_that_could_not_be_loaded_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpde.store.tree_text.MAX_TREE_VALUES", 100)
    with CheckpointStore(tmp_path / "store") as store:
        with pytest.raises(InvalidInput, match=r"`state\['large'\]` makes the state too large"):
            store.save(1, {"weight": torch.ones(4), "large": [0.0] * 100})
        assert not store.directory.exists()


def test_what_is_retained_is_used_on_its_step_alone(run: dict[int, Any], tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, retain=True)
    for step in (1, 2, 3):
        store.save(step, run[step])
    store.prune(drop=[3])
    store.save(4, run[4])
    store.close()
    filled(tmp_path, {5: run[5]})  # another writer
    store.save(6, run[6])
    store.prune(drop=[6])
    store.close()
    with CheckpointStore(tmp_path) as other:
        other.save(6, run[7])  # of the same number
    store.save(8, run[8])
    store.close()
    check(tmp_path, run | {6: run[7]}, (1, 2, 4, 5, 6, 8))


def test_a_step_takes_what_changed(tmp_path: Path) -> None:
    state = {"weight": torch.randn(512, 512)}
    with CheckpointStore(tmp_path) as store:
        store.save(1, state)
        state["weight"][0] *= 1.5
        store.save(2, state)
        store.save(3, state)
    first, second, third = store.describe()
    assert second.file_bytes < first.file_bytes / 50
    assert third.file_bytes < 1000
    assert (third.tensors, third.changed, third.state_bytes) == (1, 0, 1 << 20)


def test_a_chain_of_200_steps(tmp_path: Path) -> None:
    weight, wanted = torch.zeros(300), {}
    state: State = nothing()
    for step in range(200):
        weight[step] += 1
        tree = StateTree({"weight": weight})
        target = MemoryState(tree.specs, lambda name: leaf_bytes(weight), {STEP: str(step), TREE: tree.text})
        write_step(tmp_path, step, state, target, name_of(step - 1) if step else None)
        state = DeltaState(open_step(tmp_path, step).file, state)
        wanted[step] = weight.clone()
    state.close()
    store = CheckpointStore(tmp_path)
    assert store.describe()[-1].base == 198
    for step in (0, 1, 100, 199):
        assert torch.equal(store.load(step)["weight"], wanted[step])
    assert store.verify() == []
    with CheckpointStore(tmp_path, keyframe_every=240) as store:
        store.save(200, {"weight": weight})
    assert store.describe()[-1].base == 199


def test_a_run_goes_on_in_another_process(run: dict[int, Any], tmp_path: Path) -> None:
    filled(tmp_path, {step: run[step] for step in (1, 2)})
    filled(tmp_path, {step: run[step] for step in (3, 4)})
    check(tmp_path, run, (1, 2, 3, 4))
    assert [it.base for it in CheckpointStore(tmp_path).describe()] == [None, 1, 2, 3]


def test_other_deltas_are_no_steps(tmp_path: Path) -> None:
    from support.files import safetensors_bytes

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(safetensors_bytes({}))
    tpde.diff(tmp_path / "a", tmp_path / "a", tmp_path / name_of(1))
    with pytest.raises(Corrupt, match="it is no step of a store"):
        CheckpointStore(tmp_path).load()
    (tmp_path / name_of(2)).write_bytes(b"nothing")
    with pytest.raises(TpdeError, match=name_of(2)):
        CheckpointStore(tmp_path).load()
    assert len(CheckpointStore(tmp_path).verify()) == 2


def test_a_step_on_a_disk_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    """A link to it is still there: it was not pruned."""
    with CheckpointStore(tmp_path, keyframe_every=1) as store:
        for step in (1, 2):
            store.save(step, {"w": torch.full((3,), float(step))})
    path = tmp_path / "step-00000002.tpde"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert CheckpointStore(tmp_path).verify() == []
    (tmp_path / "elsewhere").unlink()
    (found,) = CheckpointStore(tmp_path).verify()
    assert found.file == str(path)


@pytest.mark.parametrize(
    "name", ["step-1.tpde", "step-000000001.tpde", "step-00000001.tpde~", "notes", "step--0000001.tpde"]
)
def test_other_files_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with CheckpointStore(tmp_path, keep=1) as store:
        for step in (3, 4):
            store.save(step, {"x": step})
        store.prune(drop=[4])
        assert store.steps == (3,)
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.save(2, {}), "step 2 is not larger than step 3"),
        (lambda store: store.save(3, {}), "step 3 is not larger than step 3"),
        (lambda store: store.save(-1, {}), "step is -1"),
        (lambda store: store.save(1.5, {}), r"step is 1\.5"),
        (lambda store: store.save(True, {}), "step is True"),
        (lambda store: store.save(10**18, {}), "step is"),
        (lambda store: store.save(4, object()), "not stored"),
        (lambda store: store.load(2), "no step 2"),
        (lambda store: store.export(9, "/nowhere/out"), "no step 9"),
        (lambda store: store.prune(0), "keep is 0"),
        (lambda store: store.prune(drop=[2]), "no step 2"),
        (lambda store: store.prune(drop=3), "drop is 3; name steps in a list"),
        (lambda store: CheckpointStore(store.directory, keyframe_every=0), "keyframe_every is 0"),
        (lambda store: CheckpointStore(store.directory, keyframe_every=241), "keyframe_every is 241"),
        (lambda store: CheckpointStore(store.directory, keep=0), "keep is 0"),
        (lambda store: CheckpointStore(store.directory / "none").load(), "no steps"),
        (lambda store: CheckpointStore(store.directory / name_of(3)).load(), "cannot be listed"),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(
    tmp_path: Path, call: Callable[[CheckpointStore], Any], message: str
) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(3, {"x": 3})
        before = {it.name: it.read_bytes() for it in tmp_path.iterdir()}
        with pytest.raises(InvalidInput, match=message):
            call(store)
        assert {it.name: it.read_bytes() for it in tmp_path.iterdir()} == before
        store.save(np.int64(4), {"x": 4})
        assert store.load() == {"x": 4}


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(errno.EACCES, "denied")))
    with pytest.raises(InvalidInput, match="cannot be listed: denied") as caught:
        CheckpointStore(tmp_path).load()
    assert caught.value.hint == "change its permissions"


def test_a_folder_of_a_steps_name_is_no_step(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (3, 4):
            store.save(step, {"x": step})
        (tmp_path / name_of(100)).mkdir()
        assert store.steps == (3, 4)
        with pytest.raises(InvalidInput, match="no step 100; nothing was removed"):
            store.prune(drop=[3, 100])
        assert store.prune(1) == (3,)
        assert store.load() == {"x": 4}


@pytest.mark.parametrize("device", ["nowhere", "hip", 1000, 5.5])
def test_devices_that_are_not_there_are_refused(tmp_path: Path, device: Any) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(3, {"x": torch.ones(3)})
        with pytest.raises(UnsupportedDevice) as caught:
            store.load(3, map_location=device)
        assert caught.value.where == "map_location"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TpdeError, match="file"):
        CheckpointStore(tmp_path / "file").save(1, {})


def test_the_current_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointStore("store") as store:
        store.save(1, {"x": 1})
        monkeypatch.chdir("/")
        store.save(2, {"x": 2})
        assert store.steps == (1, 2)
        assert store.load() == {"x": 2}
    assert CheckpointStore(tmp_path / "store").steps == (1, 2)


def test_loading_puts_tensors_where_they_are_wanted(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"x": torch.ones(2)})
        assert store.load(map_location="meta")["x"].device.type == "meta"
        assert store.load(map_location=torch.device("cpu"))["x"].device.type == "cpu"


def test_steps_are_deltas_like_others(run: dict[int, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    filled(tmp_path / "store", {step: run[step] for step in (1, 2)})
    report = inspect_delta(tmp_path / "store" / name_of(2))
    assert report.base == name_of(1)
    assert report.ratio > 1
    tpde.patch(tmp_path / "store" / name_of(1), tmp_path / "store" / name_of(2), tmp_path / "out")
    assert equal(load_file(tmp_path / "out")["model/0.weight"], run[2]["model"]["0.weight"])


def test_a_store_writes_nothing_after_its_with(tmp_path: Path, run: dict[int, Any]) -> None:
    """It would keep the lock, which nobody gives back."""
    with CheckpointStore(tmp_path) as store:
        store.save(1, run[1])
    for write in (lambda: store.save(2, run[2]), lambda: store.prune(1)):
        with pytest.raises(InvalidInput, match=r"`with` of this store of .* has ended"):
            write()
    assert equal(store.load(), run[1])
    with CheckpointStore(tmp_path) as other:
        other.save(2, run[2])
    with store:
        store.save(3, run[3])
    check(tmp_path, run, (1, 2, 3))


def test_older_steps_are_dropped_as_the_hint_says(tmp_path: Path, run: dict[int, Any]) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (20, 40, 60):
            store.save(step, run[1])
        with pytest.raises(InvalidInput) as told:
            store.save(30, run[2])
        call = re.search("`(.*)`", str(told.value.hint))
        assert call is not None
        eval(f"store.{call[1]}", {"store": store})
        store.save(30, run[2])
        assert store.steps == (20, 30)
