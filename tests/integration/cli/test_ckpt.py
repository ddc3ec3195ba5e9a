"""`tpde ckpt`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.cli import Run

from tpde import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of three steps."""
    folder = tmp_path / "store"
    weight = np.arange(1000, dtype=np.float32)
    with CheckpointStore(folder) as made:
        for step in (10, 20, 30):
            weight[step] += 1
            made.save(step, {"model": {"weight": weight}, "lr": 0.1})
    return folder


def test_list(run: Run, store: Path) -> None:
    done = run("ckpt", "list", store)
    assert done.code == 0, done.err
    lines = [it.split() for it in done.out.splitlines()]
    assert lines[0] == ["step", "on", "tensors", "changed", "bytes", "stored", "ratio"]
    size = (store / "step-00000010.tpde").stat().st_size
    assert lines[1] == ["10", "nothing", "1", "1", "4000", str(size), f"{4000 / size:.2f}"]
    assert lines[3][:4] == ["30", "20", "1", "1"]
    assert done.out.splitlines()[-1].startswith("3 steps: 11.7 KiB stored in ")
    seen = json.loads(run("ckpt", "list", store, "--json").out)
    assert [(it["step"], it["base"]) for it in seen["steps"]] == [(10, None), (20, 10), (30, 20)]


def test_verify(run: Run, store: Path) -> None:
    done = run("ckpt", "verify", store)
    assert (done.code, done.out.partition(",")[0]) == (0, "3 steps intact")
    assert json.loads(run("ckpt", "verify", store, "--json").out)["ok"] is True
    path = store / "step-00000010.tpde"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    done = run("ckpt", "verify", store)
    assert done.code == 1
    assert "step-00000010.tpde" in done.out
    assert "tensor `model/weight`" in done.out
    assert done.out.endswith("1 problem found\n")
    found = json.loads(run("ckpt", "verify", store, "--json").out)
    assert found["ok"] is False
    assert found["problems"][0]["tensor"] == "model/weight"


def test_prune(run: Run, store: Path) -> None:
    done = run("ckpt", "prune", store, "--drop", 10)
    assert (done.code, done.out) == (0, "1 step removed, 2 steps left\n"), done.err
    assert CheckpointStore(store).load(20)["model"]["weight"][20] == 21
    done = run("ckpt", "prune", store, "--keep", 1, "--json")
    assert json.loads(done.out) == {"path": str(store), "removed": [20], "steps": [30]}
    done = run("ckpt", "prune", store)
    assert done.code == 2
    assert "--keep" in done.err
    with CheckpointStore(store) as writer:
        writer.save(40, {})
        done = run("ckpt", "prune", store, "--keep", 1)
    assert done.code == 2
    assert "being written" in done.err


def test_export(run: Run, store: Path, tmp_path: Path) -> None:
    done = run("ckpt", "export", store, tmp_path / "out")
    assert done.code == 0, done.err
    assert done.out == f"step 30 as 2 files in `{tmp_path / 'out'}`\n"
    assert sorted(it.name for it in (tmp_path / "out").iterdir()) == ["model.safetensors", "state.json"]
    done = run("ckpt", "export", store, tmp_path / "out", "--step", 10)
    assert done.code == 2
    done = run("ckpt", "export", store, tmp_path / "out", "--step", 10, "--force", "--json")
    assert json.loads(done.out)["step"] == 10
    assert json.loads((tmp_path / "out" / "state.json").read_text())["step"] == 10


@pytest.mark.parametrize("command", ["list", "verify", "prune", "export"])
def test_folders_without_steps_are_refused(run: Run, tmp_path: Path, command: str) -> None:
    more = {"prune": ["--keep", 1], "export": [tmp_path / "out"]}.get(command, [])
    run("ckpt", command, tmp_path / "none", *more).failed(2, "none` does not exist", "check the path")
    run("ckpt", command, tmp_path, *more).failed(2, "has no steps", "`tpde.CheckpointStore` wrote")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_step_is_an_error_with_its_file(run: Run, store: Path, tmp_path: Path) -> None:
    path = store / "step-00000020.tpde"
    path.write_bytes(path.read_bytes()[:-1])
    for command in (("list", store), ("export", store, tmp_path / "out")):
        done = run("ckpt", *command)
        assert done.code == 3
        assert "step-00000020.tpde" in done.err


def test_step_0_is_a_step(run: Run, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "store") as made:
        for step in (0, 1):
            made.save(step, {"step": step})
    done = run("ckpt", "export", tmp_path / "store", tmp_path / "out", "--step", 0, "--json")
    assert json.loads(done.out)["step"] == 0
    assert json.loads((tmp_path / "out" / "state.json").read_text())["state"] == {"step": 0}
