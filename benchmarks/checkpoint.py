"""Checkpoints of a training run: stall, time and bytes on disk, beside the ways in which others save.

    python benchmarks/checkpoint.py [--steps 50] [--out FILE.md]

A small GPT is trained here on Python's own sources by AdamW; after each step all ways save its model and
optimizer, in turn. The stall is how long training waits: of a way that writes in the background, which is
waited for before the next step, only its call. Times are medians of all saves but the first two.
"""

from __future__ import annotations

import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _machine import arguments, emit, header, note, table, verdict
from _training import Training

from tpde import CheckpointStore

STALL_BAR = 1.2  # times a copy of the state in memory, where that is large
LARGE_TENSORS = 8

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
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._extension import ZStandard

    def save(step: int, state: State, folder: Path) -> Wait | None:
        extensions = {"_extensions": [ZStandard()]} if compressed else {}
        writer = checkpoint.FileSystemWriter(folder / str(step), **extensions)
        if background:
            return checkpoint.async_save(state, storage_writer=writer, no_dist=True).result
        checkpoint.save(state, storage_writer=writer, no_dist=True)
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


def run(rate: float, width: int, warm: int, steps: int, *, bf16: bool) -> tuple[list[list[str]], bool]:
    """Train, save by all ways, and give their rows."""
    training = Training(width, bf16=bf16)
    for _ in range(warm):
        training.step()
    training.set_rate(rate)
    every, passed = ways(), True
    stalls: dict[str, list[float]] = {it.name: [] for it in every}
    times: dict[str, list[float]] = {it.name: [] for it in every}
    copies, kept = [], dict[int, bytes]()
    total = sum(it.nbytes for it in _tensors(_state(training)))
    with tempfile.TemporaryDirectory() as name:
        folders = {it.name: Path(name) / str(at) for at, it in enumerate(every)}
        for folder in folders.values():
            folder.mkdir()
        copy = torch.empty(total, dtype=torch.uint8)
        for step in range(1, steps + 1):
            training.step()
            state = _state(training)
            begin, at = time.perf_counter(), 0
            for tensor in _tensors(state):
                copy[at : at + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
                at += tensor.nbytes
            copies.append(time.perf_counter() - begin)
            if step in (2, steps // 2, steps):
                kept[step] = pickle.dumps(state)
            for way in every:
                begin = time.perf_counter()
                wait = way.save(step, state, folders[way.name])
                stalls[way.name].append(time.perf_counter() - begin)
                if wait is not None:
                    wait()
                times[way.name].append(time.perf_counter() - begin)
            if step % 10 == 0:
                note(f"learning rate {rate:g}: step {step} of {steps}")
        sizes = {it.name: _bytes(folders[it.name]) for it in every}
        for way in every:
            if way.load is not None:
                for step, data in kept.items():
                    passed &= _same(way.load(step, {}, folders[way.name]), pickle.loads(data))
        for folder in folders.values():
            shutil.rmtree(folder)
    rows = []
    copied = statistics.median(copies[2:])
    for way in every:
        stall = statistics.median(stalls[way.name][2:])
        took = statistics.median(times[way.name][2:])
        cells = [f"{1e3 * stall:.1f}", f"{stall / copied:.1f}", f"{1e3 * took:.0f}"]
        size = sizes[way.name]
        rows.append([way.name, *cells, f"{size / 2**20:.1f}", f"{steps * total / size:.2f}"])
    rows.append(["a copy in memory", f"{1e3 * copied:.1f}", "1.0", "", "", ""])
    return rows, passed


def stall(gib: float, saves: int) -> tuple[list[str], bool]:
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
    good = waited <= STALL_BAR * bare
    figures = [
        f"{1e3 * waited:.0f}",
        f"{1e3 * bare:.0f}",
        f"{waited / bare:.2f}",
        f"{STALL_BAR}",
        verdict(good),
    ]
    return [f"{gib:g} GiB of bf16", *figures], good


def main() -> int:
    """Run all; returns 1 if a bar is missed or a state came back with other bits."""
    parser = arguments(__doc__)
    parser.add_argument("--width", type=int, default=384, help="of the model that is trained")
    parser.add_argument("--warm", type=int, default=20, help="steps before the first save")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gib", type=float, default=2, help="of the large state whose stall has a bar")
    options = parser.parse_args()
    text, passed = header("Checkpoints of a training run"), True
    titles = ["", "stall, ms", "copies", "save, ms", "MiB on disk", "ratio"]
    for rate, bf16 in ((1e-5, True), (1e-3, False)):
        rows, good = run(rate, options.width, options.warm, options.steps, bf16=bf16)
        passed &= good
        kind = "bf16" if bf16 else "fp32"
        text += (
            f"\n## {options.steps} steps at a learning rate of {rate:g}, weights and moments in {kind}\n\n"
        )
        text += table(titles, rows)
    row, good = stall(options.gib, 7)
    passed &= good
    text += "\n## Stall of a save in the background, from the second save on\n\n"
    text += table(["state", "stall, ms", "a copy in memory, ms", "copies", "bar", ""], [row])
    emit(text, options.out)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
