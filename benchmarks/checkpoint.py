"""Checkpoints of a training run: stall, time and bytes on disk, beside the ways in which others save.

A small GPT is trained here on Python's own sources by AdamW; after each step all ways save its model and
optimizer, in turn. The stall is how long training waits: of a way that writes in the background, which is
waited for before the next step, only its call. Times are medians of all saves but the first two.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.data.training import Training
from benchmarks.harness.report import Page, ms, note
from benchmarks.harness.timing import Laps
from tpde import CheckpointStore

TITLE = "Checkpoints of a training run"
STALL_BAR = 1.2  # times a copy of the state in memory, where that is large
LARGE_TENSORS = 8
COPY = "a copy in memory"
UNCOUNTED = 2  # saves

State = dict[str, Any]
Wait = Callable[[], object]


class Way(NamedTuple):
    """A way to save: the call, which gives what waits for the rest."""

    name: str
    save: Callable[[int, State, Path], Wait | None]
    load: Callable[[int, State, Path], State] | None = None


def _torch(step: int, state: State, folder: Path) -> None:
    torch.save(state, folder / f"{step}.pt")


def _flat(state: State) -> dict[str, torch.Tensor]:
    """The tensors of a state, which is all that safetensors takes."""
    found = {f"model.{name}": it for name, it in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"optimizer.{number}.{name}": it for name, it in moments.items()}
    return found


def _safetensors(step: int, state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(_flat(state), folder / f"{step}.safetensors")


def _dcp(*, compressed: bool, background: bool = False) -> Callable[[int, State, Path], Wait | None]:
    """PyTorch's distributed checkpoints, in one process."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def save(step: int, state: State, folder: Path) -> Wait | None:
        extensions = [ZStandard()] if compressed else None
        writer = FileSystemWriter(folder / str(step), _extensions=extensions)
        if background:
            saved = state_dict_saver.async_save(state, storage_writer=writer, no_dist=True)
            assert isinstance(saved, Future)
            return saved.result
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)
        return None

    return save


class _Store:
    """Ours."""

    def __init__(self, *, fast: bool = False, background: bool = False, retain: bool = False) -> None:
        self._fast, self._background, self._retain = fast, background, retain
        self._store: CheckpointStore | None = None

    def save(self, step: int, state: State, folder: Path) -> Wait:
        if self._store is None:
            self._store = CheckpointStore(folder, keyframe_every=16, fast=self._fast, retain=self._retain)
        self._store.save(step, state, background=self._background)
        return self._store.wait

    def load(self, step: int, state: State, folder: Path) -> State:
        found: State = CheckpointStore(folder).load(step)
        return found


def ways() -> list[Way]:
    """All ways that are installed."""
    plain, fast, retained = _Store(), _Store(fast=True), _Store(fast=True, retain=True)
    background = _Store(background=True)
    return [
        Way("tpde", plain.save, plain.load),
        Way("tpde, fast", fast.save, fast.load),
        Way("tpde, fast, retained", retained.save, retained.load),
        Way("tpde, background", background.save, background.load),
        Way("torch.save", _torch),
        Way("safetensors", _safetensors),
        Way("DCP", _dcp(compressed=False)),
        Way("DCP, zstd", _dcp(compressed=True)),
        Way("DCP, async", _dcp(compressed=False, background=True)),
    ]


def _bytes(folder: Path) -> int:
    return sum(it.stat().st_size for it in folder.rglob("*") if it.is_file())


def _state(training: Training) -> State:
    return {"model": dict(training.model.state_dict()), "optimizer": training.optimizer.state_dict()}


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [it for inner in value for it in _tensors(inner)] if isinstance(value, list) else []


def _same(one: State, other: State) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)) for a, b in pairs)


def _copy(state: State, room: torch.Tensor) -> None:
    at = 0
    for tensor in _tensors(state):
        room[at : at + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
        at += tensor.nbytes


def train(options: argparse.Namespace, rate: float, page: Page, *, bf16: bool) -> None:
    """Train, and save by all ways."""
    steps, every = options.steps, ways()
    training = Training(options.width, bf16=bf16)
    for _ in range(options.warm):
        training.step()
    training.set_rate(rate)
    stalls, times, kept = Laps(), Laps(), dict[int, bytes]()
    total = sum(it.nbytes for it in _tensors(_state(training)))
    with tempfile.TemporaryDirectory() as name:
        folders = {it.name: Path(name) / str(at) for at, it in enumerate(every)}
        for folder in folders.values():
            folder.mkdir()
        copy = torch.empty(total, dtype=torch.uint8)
        for step in range(1, steps + 1):
            training.step()
            state = _state(training)
            times(COPY, partial(_copy, state, copy))
            if step in (2, steps // 2, steps):
                kept[step] = pickle.dumps(state)
            for way in every:

                def save(way: Way = way, step: int = step, state: State = state) -> None:
                    wait = stalls(way.name, lambda: way.save(step, state, folders[way.name]))
                    if wait is not None:
                        wait()

                times(way.name, save)
            if step % 10 == 0:
                note(f"learning rate {rate:g}: step {step} of {steps}")
        sizes = {it.name: _bytes(folders[it.name]) for it in every}
        for way in every:
            if way.load is not None:
                for step, data in kept.items():
                    again = way.load(step, {}, folders[way.name])
                    page.judge(_same(again, pickle.loads(data)), f"bits, {way.name}, step {step}")
        for folder in folders.values():
            shutil.rmtree(folder)
    rows, copied = [], times.median(COPY, UNCOUNTED)
    for name, size in sizes.items():
        stall = stalls.median(name, UNCOUNTED)
        cells = [ms(stall), f"{stall / copied:.1f}", ms(times.median(name, UNCOUNTED), 0)]
        rows.append([name, *cells, f"{size / 2**20:.1f}", f"{steps * total / size:.2f}"])
    rows.append([COPY, ms(copied), "1.0", "", "", ""])
    kind = "bf16" if bf16 else "fp32"
    page.section(f"{steps} steps at a learning rate of {rate:g}, weights and moments in {kind}")
    page.table(["", "stall, ms", "copies", "save, ms", "MiB on disk", "ratio"], rows)


def stall(gib: float, saves: int, page: Page) -> list[str]:
    """The stall of saves in the background of a large state, from the second on, and that of copying it."""
    words = int(gib * 2**30) // (2 * LARGE_TENSORS)
    weights = {f"w{i}": (0.02 * torch.randn(words)).bfloat16() for i in range(LARGE_TENSORS)}
    copies = [torch.empty_like(it) for it in weights.values()]
    stalls, copied = [], []
    with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder, keyframe_every=2) as store:
        for step in range(saves + 1):
            note(f"{gib:g} GiB: save {step} of {saves}")
            for it in weights.values():
                it.view(torch.int16)[step::5000] += 1
            for turn in range(2):  # in turn, and with what is there before both times
                begin = time.perf_counter()
                if turn == step % 2:
                    store.save(step, {"weights": weights, "step": step}, background=True)
                    stalls.append(time.perf_counter() - begin)
                    store.wait()
                else:
                    for copy, it in zip(copies, weights.values(), strict=True):
                        copy.copy_(it)
                    copied.append(time.perf_counter() - begin)
    waited, bare = statistics.median(stalls[1:]), statistics.median(copied[1:])
    judged = page.judge(waited <= STALL_BAR * bare, "stall of a save in the background")
    figures = [ms(waited, 0), ms(bare, 0), f"{waited / bare:.2f}", f"{STALL_BAR}", judged]
    return [f"{gib:g} GiB of bf16", *figures]


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--width", type=int, default=384, help="of the model that is trained")
    parser.add_argument("--warm", type=int, default=20, help="steps before the first save")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gib", type=float, default=2, help="of the large state whose stall has a bar")


def run(options: argparse.Namespace, page: Page) -> None:
    """Train twice, then save one large state."""
    for rate, bf16 in ((1e-5, True), (1e-3, False)):
        train(options, rate, page, bf16=bf16)
    page.section("Stall of a save in the background, from the second save on")
    columns = ["state", "stall, ms", "a copy in memory, ms", "copies", "bar", ""]
    page.table(columns, [stall(options.gib, 7, page)])
