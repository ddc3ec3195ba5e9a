"""Checkpoints of strangers, and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.training import equal, write_step

from tpde import CheckpointStore
from tpde.errors import Corrupt, MissingBase, TpdeError
from tpde.store import chain
from tpde.store.chain import name_of
from tpde.store.states import MemoryState, nothing

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a store of four steps."""
    folder = tmp_path_factory.mktemp("small")
    state = {"a": torch.arange(40.0), "b": [torch.ones(3, dtype=torch.int64), "text"], "n": 0}
    with CheckpointStore(folder, keyframe_every=3) as store:
        for step in range(4):
            state["a"][step] += 1
            state["n"] = step
            store.save(step, state)
    return {it.name: it.read_bytes() for it in folder.iterdir() if it.name != "writer.lock"}


def put(folder: Path, files: dict[str, bytes]) -> CheckpointStore:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return CheckpointStore(folder)


def loads(store: CheckpointStore, step: int) -> Any:
    """A state, or what refused it."""
    try:
        return store.load(step)
    except TpdeError as error:
        return error


def test_a71_flipped_bytes_of_checkpoints(small: dict[str, bytes], tmp_path: Path) -> None:
    store = put(tmp_path, small)
    assert store.verify() == []
    good = {step: store.load(step) for step in store.steps}
    for name in (name_of(0), name_of(2)):
        data = bytearray(small[name])
        for at in range(len(data)):
            data[at] ^= 1 << at % 8
            (tmp_path / name).write_bytes(data)
            found = store.verify()
            assert found, at
            assert any(name in it.file for it in found)
            if at % 16 == 0:
                for step in store.steps:
                    state = loads(store, step)
                    assert isinstance(state, TpdeError) or equal(state, good[step])
            data[at] ^= 1 << at % 8
        (tmp_path / name).write_bytes(data)


def test_a72_checkpoints_cut_anywhere(small: dict[str, bytes], tmp_path: Path) -> None:
    store = put(tmp_path, small)
    name = name_of(3)
    for size in range(len(small[name])):
        (tmp_path / name).write_bytes(small[name][:size])
        assert [it.file for it in store.verify()] == [str(tmp_path / name)]
        with pytest.raises(TpdeError, match="step-00000003"):
            store.load(3)


def test_a73_checkpoints_that_are_exchanged(small: dict[str, bytes], tmp_path: Path) -> None:
    names = sorted(small)
    files = dict(small)
    files[names[1]], files[names[2]] = files[names[2]], files[names[1]]
    store = put(tmp_path, files)
    assert {it.file for it in store.verify()} == {str(tmp_path / name) for name in names[1:3]}
    with pytest.raises(Corrupt, match=r"step-00000001\.tpde.*of step '2', not of 1"):
        store.load(1)
    with pytest.raises(Corrupt, match=r"step-00000002"):
        store.load(2)
    assert store.load(0)["n"] == 0
    assert store.load(3)["n"] == 3


def test_a74_a_checkpoint_of_another_run(small: dict[str, bytes], tmp_path: Path) -> None:
    store = put(tmp_path, small)
    other = tmp_path / "other"
    with CheckpointStore(other) as away:
        away.save(1, {"a": torch.zeros(40), "b": [torch.ones(3, dtype=torch.int64), "text"], "n": 1})
    (tmp_path / name_of(1)).write_bytes((other / name_of(1)).read_bytes())
    with pytest.raises(MissingBase, match="tensor `a`") as caught:
        store.load(2)
    assert "step-00000001.tpde" in str(caught.value)
    assert "step-00000002.tpde" in str(caught.value)
    problems = store.verify()
    assert [(it.file, it.tensor) for it in problems] == [(str(tmp_path / name_of(2)), "a")]


def test_a75_a_checkpoint_that_is_gone(small: dict[str, bytes], tmp_path: Path) -> None:
    store = put(tmp_path, small)
    (tmp_path / name_of(1)).unlink()
    with pytest.raises(MissingBase, match=r"step-00000002\.tpde.* stands on step 1, which is not there"):
        store.load(2)
    assert store.load(0)["n"] == 0
    assert [it.message for it in store.verify()] == ["it stands on step 1, which cannot be read"]


def test_a76_chains_of_too_many_checkpoints(tmp_path: Path) -> None:
    for step in range(241):
        target = MemoryState({}, lambda name: b"", {chain.STEP: f"{step}", chain.TREE: "1"})  # type: ignore[arg-type,return-value]
        write_step(tmp_path, step, nothing(), target, name_of(step - 1) if step else None)
    store = CheckpointStore(tmp_path)
    assert store.load(239) == 1
    with pytest.raises(Corrupt, match="stands on more than 240 steps"):
        store.load(240)


@pytest.mark.parametrize("base", ["step-00000002.tpde", "step-00000003.tpde", "../x", "step-1.tpde", ""])
def test_a77_bases_that_are_no_earlier_step(tmp_path: Path, base: str) -> None:
    target = MemoryState({}, lambda name: b"", {chain.STEP: "2", chain.TREE: "1"})  # type: ignore[arg-type,return-value]
    write_step(tmp_path, 2, nothing(), target, base)
    with pytest.raises(Corrupt, match="no earlier step"):
        CheckpointStore(tmp_path).load(2)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no step of a store"),
        ({"a": "b"}, "no tree"),
        ({chain.TREE: "1"}, "of step"),
        ({chain.STEP: "02", chain.TREE: "1"}, "of step"),
        ({chain.STEP: "2"}, "no tree"),
        ({chain.STEP: "2", chain.TREE: '["tensor","x"]'}, "no tensor"),
        ({chain.STEP: "2", chain.TREE: "{"}, "tree of its state is damaged"),
    ],
)
def test_a78_deltas_that_are_no_checkpoints(tmp_path: Path, metadata: Any, message: str) -> None:
    target = MemoryState({}, lambda name: b"", metadata)  # type: ignore[arg-type,return-value]
    write_step(tmp_path, 2, nothing(), target, None)
    store = CheckpointStore(tmp_path)
    for call in (store.load, lambda: store.export(2, tmp_path / "out")):
        with pytest.raises(Corrupt, match=message):
            call()
    assert not (tmp_path / "out").exists()
    assert message in store.verify()[0].message
