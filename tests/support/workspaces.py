"""A model whose blocks call what a test gives them while the workspace is theirs; threads beside it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from support.small import Block, Model, torch
from tpde.nn import pack_module

WITHIN = 50  # seconds; what hangs fails
CPU = torch.device("cpu")


class Calling(Block):
    """Calls what a test gives it, within its forward pass."""

    def forward(self, x: Any) -> Any:
        within = self.__dict__.get("within")
        if within is not None:
            within(x)
        return super().forward(x)


def made() -> tuple[Any, Any]:
    """Give a model, plain and packed."""
    torch.manual_seed(0)
    plain = Model(block=Calling).to(torch.bfloat16)
    return plain, pack_module(copy.deepcopy(plain), min_bytes=0)


def group_of(model: Any, block: int = 0) -> Any:
    """Give the weights of a block, which are decoded together."""
    return model.blocks[block].__dict__["tpde_forward"].group


def in_thread(work: Callable[[], Any]) -> Any:
    """What a thread returns; it may hang, and nobody waits for it then."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(WITHIN)
    return found[0]


def is_free(lock: Any) -> bool:
    """Whether another thread can take a lock."""

    def take() -> bool:
        taken = bool(lock.acquire(blocking=False))
        if taken:
            lock.release()
        return taken

    return bool(in_thread(take))
