"""The checkpoint store: every step loads, whatever happens."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training import equal, held_back, write_step

import tpde
from tpde import CheckpointStore
from tpde.errors import Corrupt, DestinationExists, InvalidInput, TpdeError, Truncated
from tpde.io.sinks import FileSink
from tpde.store.chain import STEP, TREE, name_of, open_links, open_step, state_of, step_of
from tpde.store.delta_file import DeltaFile
from tpde.store.delta_report import inspect_delta
from tpde.store.delta_state import DeltaState
from tpde.store.state_tree import StateTree, leaf_bytes
from tpde.store.states import MemoryState, State, nothing

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


def training(steps: int, size: int = 64) -> Iterator[tuple[int, dict[str, Any]]]:
    """The states of a small run; its model has tied weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(3))).to(torch.bfloat16)
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    for step in range(1, steps + 1):
        model(torch.randn(4, size, dtype=torch.bfloat16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "numpy": np.random.default_rng(step).bytes(8)},
            "step": step,
        }
        yield step, state


@pytest.fixture(scope="module")
def run() -> dict[int, dict[str, Any]]:
    return {step: copy.deepcopy(state) for step, state in training(9)}


def filled(folder: Path, run: dict[int, dict[str, Any]], **options: Any) -> CheckpointStore:
    """A store of a run."""
    with CheckpointStore(folder, **options) as store:
        for step, state in run.items():
            store.save(step, state)
    return store


def check(folder: Path, run: dict[int, dict[str, Any]], steps: Any) -> None:
    """That a store has these steps, that they load, and that nothing is wrong with it."""
    store = CheckpointStore(folder)
    assert store.steps == tuple(steps)
    for step in steps:
        assert equal(store.load(step), run[step])
    assert store.verify() == []


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


def test_a_background_save_has_the_state_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    held_back(monkeypatch, begin)
    tensor, array, other = torch.arange(1000), np.arange(10), np.arange(10, dtype=">i4")
    with CheckpointStore(tmp_path) as store:
        store.save(1, [tensor, tensor.view(10, 100).t(), array, other], background=True)
        tensor.zero_()
        array[:] = 0
        other[:] = 0
        begin.set()
    whole = torch.arange(1000)
    found = store.load(1)
    assert torch.equal(found[0], whole)
    assert torch.equal(found[1], whole.view(10, 100).t())
    assert np.array_equal(found[2], np.arange(10))
    assert np.array_equal(found[3], np.arange(10))


def test_memory_of_background_saves_is_used_again(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        places = []
        for step, size in enumerate((1000, 1000, 10, 2000)):
            store.save(step, {"weight": torch.full((size,), float(step))}, background=True)
            store.wait()
            places.append(store._staging._buffer.data_ptr())
        assert places[0] == places[1] == places[2]
    for step in range(4):
        assert CheckpointStore(tmp_path).load(step)["weight"][0] == step
    assert store._staging._buffer.size == 0


@pytest.mark.parametrize("call", ["save", "load", "steps", "wait", "close", "verify", "prune", "export"])
def test_what_fails_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    store = CheckpointStore(tmp_path / "store")
    store.save(1, {"x": 1})
    write = os.pwritev

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: store.save(3, {"x": 3}),
        "load": store.load,
        "steps": lambda: store.steps,
        "wait": store.wait,
        "close": store.close,
        "verify": store.verify,
        "prune": lambda: store.prune(1),
        "export": lambda: store.export(1, tmp_path / "out"),
    }
    monkeypatch.setattr(os, "pwritev", full)
    store.save(2, {"x": 2}, background=True)
    with pytest.raises(OSError, match="No space left"):
        calls[call]()
    assert "step 2 was not saved" in caplog.text
    monkeypatch.setattr(os, "pwritev", write)
    assert store.steps == (1,)  # once alone
    store.save(2, {"x": 2})
    assert store.load() == {"x": 2}
    store.close()


def test_an_error_of_ours_in_the_background_names_the_step(tmp_path: Path, run: dict[int, Any]) -> None:
    filled(tmp_path, {1: run[1]})
    path = tmp_path / name_of(1)
    path.write_bytes(path.read_bytes()[:-1])
    store = CheckpointStore(tmp_path)
    store.save(2, run[2], background=True)
    with pytest.raises(Truncated, match=r"step 2 was not saved.*step-00000001\.tpde"):
        store.wait()
    store.close()


def test_one_writer_at_a_time(tmp_path: Path, run: dict[int, Any]) -> None:
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.save(1, run[1])
    with pytest.raises(InvalidInput, match="being written"):
        second.save(2, run[2])
    with pytest.raises(InvalidInput, match="being written"):
        second.prune(1)
    assert equal(second.load(), run[1])  # reading is free
    first.close()
    second.save(2, run[2])
    with pytest.raises(InvalidInput, match="being written"):
        first.save(3, run[3])
    del second  # without `close`
    first.save(3, run[3])
    first.close()
    check(tmp_path, run, (1, 2, 3))


_FORKS = """
import os, sys, torch
from tpde import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"x": torch.ones(10)})
closed, close = os.pipe()
told, tell = os.pipe()
child = os.fork()
if not child:
    os.close(close)
    try:
        store.save(2, {"x": torch.ones(10)})
        os.write(tell, b"wrote")
    except Exception as error:
        os.write(tell, str(error).encode())
    os.read(closed, 1)  # until the parent is done
    os._exit(0)
print(os.read(told, 10000).decode())
store.close()
with CheckpointStore(sys.argv[1]) as other:  # the child, which lives, holds no lock
    other.save(3, {"x": torch.ones(10)})
os.close(close)
os.waitpid(child, 0)
print(CheckpointStore(sys.argv[1]).steps)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_neither_writes_nor_holds_the_lock(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said, steps = done.stdout.splitlines()
    assert "is being written by another process" in said
    assert steps == "(1, 3)"


def test_a_killed_writer_holds_nothing(tmp_path: Path) -> None:
    script = """
import os, signal, sys, torch
from tpde import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, {"x": torch.ones(10)})
os.pwritev = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
store.save(2, {"x": torch.ones(10)})
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    left = {it.name for it in tmp_path.iterdir()}
    assert len(left) == 3  # the step, the lock, and what was being written
    with CheckpointStore(tmp_path) as store:
        assert store.steps == (1,)
        store.save(2, {"x": 2})
    assert {it.name for it in tmp_path.iterdir()} == {name_of(1), name_of(2), "writer.lock"}


@pytest.mark.parametrize(
    ("keep", "every", "steps"),
    [(1, 1, (9,)), (3, 1, (7, 8, 9)), (2, 4, (5, 6, 7, 8, 9)), (1, 4, (9,)), (20, 4, range(1, 10))],
)
def test_keep_removes_what_nothing_stands_on(
    run: dict[int, Any], tmp_path: Path, keep: int, every: int, steps: Any
) -> None:
    filled(tmp_path, run, keep=keep, keyframe_every=every)
    check(tmp_path, run, steps)


@pytest.mark.parametrize(
    ("keep", "drop", "left"),
    [
        (None, [2, 5, 6], (1, 3, 4, 7, 8, 9)),
        (3, [], (7, 8, 9)),
        (1, [9], (8,)),
        (2, [1, 8], (7, 9)),
        (None, [1], range(2, 10)),
        (None, range(1, 10), ()),
        (99, [], range(1, 10)),
    ],
)
@pytest.mark.parametrize("every", [4, 16])
def test_pruning_keeps_the_bits_of_what_stays(
    run: dict[int, Any], tmp_path: Path, every: int, keep: int | None, drop: Any, left: Any
) -> None:
    filled(tmp_path, run, keyframe_every=every)
    with CheckpointStore(tmp_path, keyframe_every=every) as store:
        gone = store.prune(keep, drop=drop)
    assert set(gone) == set(run).difference(left)
    check(tmp_path, run, left)
    links = {it.step: it.base for it in store.describe()}
    depth = {None: 0}
    for step, base in links.items():
        depth[step] = depth[base] + 1
    assert max(depth.values()) <= every


@pytest.mark.parametrize("at", range(8))
def test_pruning_that_fails_anywhere_loses_nothing(
    run: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """After each renaming and each removal."""
    filled(tmp_path, run)
    count = 0

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if str(args[-1]).endswith(".tpde"):
                count += 1
                if count > at:
                    raise OSError(5, "no more")
            return call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "replace", failing(os.replace))
    monkeypatch.setattr(Path, "unlink", lambda it, **_: failing(os.unlink)(it))
    with CheckpointStore(tmp_path) as store, pytest.raises(OSError, match="no more"):
        store.prune(3, drop=[4, 6, 8])
    monkeypatch.undo()
    there = CheckpointStore(tmp_path).steps
    assert {5, 7, 9} <= set(there)
    check(tmp_path, run, there)
    with CheckpointStore(tmp_path) as store:
        store.prune(3, drop=set(there).intersection({4, 6, 8}))
    check(tmp_path, run, (5, 7, 9))


def test_a_reader_follows_a_chain_that_is_pruned_meanwhile(
    run: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, run)
    opened: list[int] = []
    real = os.open

    def pruned(path: Any, *args: Any, **options: Any) -> int:
        if (step := step_of(Path(path).name)) is not None:
            opened.append(step)
            if len(opened) == 3:
                monkeypatch.undo()
                with CheckpointStore(tmp_path) as store:
                    store.prune(2)
                monkeypatch.setattr(os, "open", pruned)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", pruned)
    assert equal(CheckpointStore(tmp_path).load(9), run[9])
    assert opened == [9, 8, 7, 9, 8]
    monkeypatch.undo()
    check(tmp_path, run, (8, 9))


@pytest.mark.parametrize("call", ["describe", "verify"])
def test_what_is_pruned_while_steps_are_looked_at_is_passed_over(
    run: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    filled(tmp_path, run)
    real = os.open

    def pruned(path: Any, *args: Any, **options: Any) -> int:
        if step_of(Path(path).name) is not None:
            monkeypatch.undo()
            with CheckpointStore(tmp_path) as store:
                store.prune(2)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", pruned)
    found = getattr(CheckpointStore(tmp_path), call)()
    assert [it.step for it in found] == [8, 9] if call == "describe" else found == []


def test_an_open_reader_outlives_pruning(
    run: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, run)
    state = state_of(open_links(tmp_path, 3))
    with CheckpointStore(tmp_path) as store:
        store.prune(1)
    name = "model/0.bias"
    assert (
        state.read(("", name), 1).tobytes() == run[3]["model"]["0.bias"].view(torch.uint8).numpy().tobytes()
    )
    state.close()


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


def test_an_export_is_what_others_read(run: dict[int, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = filled(tmp_path / "store", run)
    out = tmp_path / "out"
    store.export(4, out)
    assert sorted(it.name for it in out.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    model = load_file(out / "model.safetensors")
    assert equal({name: model[name] for name in run[4]["model"]}, dict(run[4]["model"]))
    exp_avg = load_file(out / "optimizer.safetensors")["state/0/exp_avg"]
    assert equal(exp_avg, run[4]["optimizer"]["state"][0]["exp_avg"])
    rest = json.loads((out / "state.json").read_text())
    assert rest["step"] == 4
    assert rest["state"]["rng"]["torch"] == ["tensor", ["rng.safetensors", "torch"]]
    with pytest.raises(DestinationExists):
        store.export(4, out)
    store.export(5, out, force=True)
    assert json.loads((out / "state.json").read_text())["step"] == 5
    (out / "mine").write_text("mine")
    with pytest.raises(TpdeError):
        store.export(6, out, force=True)
    assert json.loads((out / "state.json").read_text())["step"] == 5


@pytest.mark.parametrize(
    ("state", "files"),
    [
        ([torch.ones(2)], {"state.safetensors": ["0"]}),
        (torch.ones(2), {"state.safetensors": ["tensor"]}),
        (
            {"a/b": torch.ones(1), ".c": torch.ones(1)},
            {"part-0.safetensors": ["tensor"], "part-1.safetensors": ["tensor"]},
        ),
        ({1: torch.ones(1), "1": {"x": torch.ones(2)}}, {"1.safetensors": ["tensor", "x"]}),
        (
            {"part-1": torch.ones(1), "/": torch.ones(1), "part-0": torch.ones(1)},
            {f"part-{i}.safetensors": ["tensor"] for i in (0, 1, 2)},
        ),
        (
            {"/": torch.ones(1), "part-0": torch.ones(1)},
            {f"part-{i}.safetensors": ["tensor"] for i in (0, 1)},
        ),
        ({"a": {"__metadata__": torch.ones(1)}}, {"a.safetensors": ["__metadata__'0"]}),
        ({"a": 1}, {}),
    ],
)
def test_exports_of_odd_states(tmp_path: Path, state: Any, files: dict[str, list[str]]) -> None:
    from safetensors import safe_open

    with CheckpointStore(tmp_path / "store") as store:
        store.save(1, state)
        store.export(1, tmp_path / "out")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = sorted(file.keys())
    assert found == files


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
        (lambda store: store.load(3, map_location="nowhere"), "map_location"),
        (lambda store: store.export(9, "/nowhere/out"), "no step 9"),
        (lambda store: store.prune(0), "keep is 0"),
        (lambda store: store.prune(drop=[2]), "no step 2"),
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


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TpdeError, match="file"):
        CheckpointStore(tmp_path / "file").save(1, {})


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
