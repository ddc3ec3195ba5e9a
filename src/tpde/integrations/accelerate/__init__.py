"""Models that `Accelerator.save_state` saves, in a store (docs/guides/trainers.md).

>>> from accelerate import Accelerator  # doctest: +SKIP
>>> from tpde.integrations.accelerate import store_checkpoints  # doctest: +SKIP
>>> accelerator = Accelerator()  # doctest: +SKIP
>>> steps = store_checkpoints(accelerator, "run/tpde-store")  # doctest: +SKIP
>>> accelerator.save_state("run/step_10")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpde.errors import InvalidInput
from tpde.io.paths import anchored, given_path
from tpde.store.linked import LinkedSteps, links_below, load_linked
from tpde.store.step_links import LINK, refuse_overwritten

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["store_checkpoints"]


def store_checkpoints(
    accelerator: Accelerator, store: str | os.PathLike[str], *, keyframe_every: int = 16
) -> LinkedSteps:
    """Let `save_state` put models into a store, and `load_state` take them from it.

    accelerate goes on writing optimizers, schedulers, samplers and random numbers into its folders, beside a
    small file that names the models' step. Folders without one are loaded as always.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        Whose hooks are registered. Not with FSDP, DeepSpeed or Megatron-LM.
    store : path-like
        The store's folder: not inside accelerate's `checkpoints`, of which it removes folders.
    keyframe_every : int
        Of so many steps one is stored as a whole.

    Returns
    -------
    LinkedSteps
        `forget` removes steps whose folders are gone, `store.prune` any, `store.close` lets other processes
        write.

    Raises
    ------
    InvalidInput
        If the models are in pieces.
    """
    if accelerator.distributed_type.value in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise InvalidInput(
            f"a store does not take the models of {accelerator.distributed_type.value}, which are in pieces",
            hint="save without it",
        )
    place = anchored(given_path(store))
    steps = LinkedSteps(place, lambda: links_below(place.parent), keyframe_every=keyframe_every)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            there = steps.store.steps
            state = {str(at): it for at, it in enumerate(weights)}
            steps.save(Path(output_dir) / LINK, state, there[-1] + 1 if there else 0)
        weights.clear()

    def load(models: list[Any], input_dir: str) -> None:
        link = Path(input_dir) / LINK
        if not link.is_file():
            return
        refuse_overwritten(link, _saved_weights(link.parent))
        for at, model in enumerate(models):
            state = load_linked(place, link, part=str(at))
            if state is None:
                raise InvalidInput(
                    f"`{link}` has {at} models, {len(models)} are prepared",
                    hint="prepare what was prepared when it was saved",
                    where=str(link),
                )
            model.load_state_dict(state)
        models.clear()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return steps


def _saved_weights(folder: Path) -> list[Path]:
    """The weight files that `save_state` wrote into a folder: it writes random numbers after them.

    Newer ones are `save_model`'s, and say nothing: they may be of the state that is stored.
    """
    names = "model*.safetensors", "pytorch_model*.bin"
    ends = [it.stat().st_mtime_ns for it in folder.glob("random_states_*.pkl")]
    found = [it for name in names for it in sorted(folder.glob(name))]
    return [it for it in found if ends and it.stat().st_mtime_ns <= max(ends)]
