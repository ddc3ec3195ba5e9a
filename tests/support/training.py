"""Training runs, their states, and checkpoint stores of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpde import CheckpointStore
from tpde.files.progress import no_progress
from tpde.io.sinks import FileSink
from tpde.store.chain import name_of
from tpde.store.comparer import HostComparer
from tpde.store.delta_writer import write_delta
from tpde.store.states import State


def equal(one: Any, other: Any) -> bool:
    """Whether two states have the same bits."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(one == other)


def small_network() -> torch.nn.Module:
    """One that draws random numbers as it runs."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))


def write_step(folder: Path, step: int, base: State, target: State, hint: str | None) -> None:
    """A file of a step."""
    sink = FileSink(folder / name_of(step))
    write_delta(
        base,
        target,
        sink,
        hint=hint,
        fast=False,
        comparer=HostComparer(base, target, 1),
        threads=1,
        progress=no_progress,
    )
    sink.commit()


def held_back(patch: pytest.MonkeyPatch, until: threading.Event) -> None:
    """Threads beside the main one create no file before an event."""
    real = os.open

    def late(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and threading.current_thread() is not threading.main_thread():
            assert until.wait(60)
        return real(path, flags, *args, **options)

    patch.setattr(os, "open", late)


def no_thread_writes(patch: pytest.MonkeyPatch) -> None:
    """Threads beside the main one find the disk full when they create a file."""
    real = os.open

    def full(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *args, **options)

    patch.setattr(os, "open", full)


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
