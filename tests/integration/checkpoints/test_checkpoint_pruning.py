"""Steps of checkpoint stores are pruned: what stays keeps its bits, and readers go on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training import check, equal, filled

from tpde import CheckpointStore
from tpde.errors import Truncated
from tpde.io.sinks import FileSink
from tpde.store.chain import open_links, state_of, step_of

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


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


def test_pruning_on_a_full_disk_makes_room_before_it_rewrites(
    run: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, run, keyframe_every=3)

    def full(sink: FileSink) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, CheckpointStore(tmp_path, keyframe_every=3) as store:
        patch.setattr(FileSink, "commit", full)
        with pytest.raises(OSError, match="No space"):
            store.prune(1)
    check(tmp_path, run, (7, 8, 9))  # the last one stands on the others
    with CheckpointStore(tmp_path, keyframe_every=3) as store:
        assert store.prune(1) == (7, 8)
    check(tmp_path, run, (9,))


def test_pruning_that_cannot_read_what_stays_removes_nothing(run: dict[int, Any], tmp_path: Path) -> None:
    filled(tmp_path, run, keyframe_every=3)
    (tmp_path / "step-00000009.tpde").write_bytes(b"")
    with CheckpointStore(tmp_path) as store, pytest.raises(Truncated):
        store.prune(drop=[1, 2])
    assert CheckpointStore(tmp_path).steps == tuple(run)


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


@pytest.mark.parametrize("call", ["load", "parts"])
def test_the_newest_step_is_another_one_when_it_is_pruned_meanwhile(
    run: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with CheckpointStore(tmp_path, keyframe_every=1, keep=1) as store:
        store.save(1, run[1])
        real = os.open

        def saved(path: Any, *args: Any, **options: Any) -> int:
            step = step_of(Path(path).name)
            if step is not None and store.steps == (step,) and step < 5:
                monkeypatch.undo()
                store.save(step + 1, run[step + 1])
                monkeypatch.setattr(os, "open", saved)
            return real(path, *args, **options)

        monkeypatch.setattr(os, "open", saved)
        found = getattr(CheckpointStore(tmp_path), call)()
    assert CheckpointStore(tmp_path).steps == (5,)
    assert found == tuple(run[5]) if call == "parts" else equal(found, run[5])


@pytest.mark.parametrize("again", [(2, 3), (4, 5)])
def test_steps_that_are_saved_anew_while_others_are_checked_are_not_damaged(
    run: dict[int, Any], tmp_path: Path, again: tuple[int, int]
) -> None:
    """The run goes back: a number that was checked is another state's, on which the next one stands."""
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, again[1]):
            store.save(step, run[step])
        done: list[int] = []

        def go_back(size: int) -> None:
            done.append(size)
            if len(done) == 2:
                store.prune(drop=[2, again[1]])
                store.save(again[0], run[8])
                store.save(again[1], run[9])

        assert CheckpointStore(tmp_path).verify(progress=go_back) == []
    assert len(done) == 3


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


@pytest.mark.parametrize("background", [False, True])
def test_a_step_that_cannot_be_read_does_not_undo_a_save(
    background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointStore(tmp_path, keyframe_every=1) as store:
        for step in (1, 2, 3):
            store.save(step, {"w": torch.full((1000,), float(step))})
    damaged = tmp_path / "step-00000001.tpde"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with CheckpointStore(tmp_path, keyframe_every=1, keep=4) as store:
        store.save(4, {"w": torch.full((1000,), 4.0)}, background=background)
        store.wait()
        assert store.steps == (1, 2, 3, 4)
        assert equal(store.load(4), {"w": torch.full((1000,), 4.0)})
    assert "step 4 is saved, but not all older ones" in caplog.text
    assert damaged.name in caplog.text
