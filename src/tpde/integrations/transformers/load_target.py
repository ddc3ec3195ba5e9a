"""Where, and how, `tpde.from_pretrained` wants the model that transformers is told to load."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tpde.integrations.transformers.streamed import ModelStreaming
from tpde.integrations.transformers.warmup import Warmup
from tpde.nn.kernels import Kernels
from tpde.planning.budget import Budget
from tpde.weights.delta_sources import DeltaLike


@dataclass
class LoadTarget:
    """Where `tpde.from_pretrained` wants the model: `device_map` would need the package `accelerate`."""

    device: torch.device | None = None
    budget: Budget | None = None
    progress: Callable[[int], None] | None = None  # told what is read under it
    deltas: Mapping[str, DeltaLike] | None = None  # states beside the files' own
    kernels: Kernels = "exact"
    pack: bool = False  # plain files, too
    streaming: ModelStreaming | None = None  # what has been opened so far
    warmup: Warmup | None = None


_target: contextvars.ContextVar[LoadTarget | None] = contextvars.ContextVar("tpde_target", default=None)


@contextmanager
def loading_to(
    device: torch.device,
    budget: Budget | None = None,
    progress: Callable[[int], None] | None = None,
    deltas: Mapping[str, DeltaLike] | None = None,
    kernels: Kernels = "exact",
    pack: bool = False,
) -> Iterator[None]:
    """Load models to a device within this context, under a budget or with deltas if there are any."""
    target = LoadTarget(device, budget, progress, deltas, kernels, pack)
    token = _target.set(target)
    try:
        yield
    except BaseException:
        if target.streaming is not None:
            target.streaming.close()
        if target.warmup is not None:
            target.warmup.abandon()
        raise
    else:
        if target.warmup is not None:
            target.warmup.wait()
    finally:
        _target.reset(token)


def load_target() -> LoadTarget:
    """What the innermost `loading_to` says; without one, that nothing is wanted."""
    return _target.get() or LoadTarget()
