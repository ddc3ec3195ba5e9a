"""States and steps of checkpoint stores."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
