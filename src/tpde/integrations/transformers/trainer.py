"""Checkpoints of transformers' `Trainer` in a store (docs/guides/trainers.md)."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpde.errors import InvalidInput
from tpde.io.paths import anchored
from tpde.store.linked import STORE, LinkedSteps, load_linked
from tpde.store.step_links import LINK, refuse_overwritten

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

_MODEL, _OPTIMIZER, _SCHEDULER, _SCALER, _RANDOM = "model", "optimizer", "scheduler", "scaler", "random"
_ORDINARY = "optimizer.pt"  # of a checkpoint that is files; callbacks may write a model's into any


class StoredCheckpoints(_Base):
    """Puts a `Trainer`'s checkpoints into a store: `class MyTrainer(StoredCheckpoints, Trainer)`.

    Each `checkpoint-N` keeps `trainer_state.json`, and a small file that names a step of `tpde-store` beside
    it, in which model, optimizer, scheduler, gradient scaler and random numbers are what changed since the
    checkpoint before. `resume_from_checkpoint`, `save_total_limit` and `load_best_model_at_end` work as
    always; checkpoints that are files are loaded as such. `save_model` called by a user writes files.

    Attributes
    ----------
    checkpoint_keyframe_every : int
        Of so many checkpoints one is stored as a whole.
    checkpoint_background : bool
        Write while training goes on. The newest checkpoint may then be without its step if the process is
        killed: resuming says so, and one resumes from that before. With `save_total_limit=1` that one would
        be gone, and nothing is written in the background.

    Raises
    ------
    InvalidInput
        When a checkpoint is written or loaded with FSDP, DeepSpeed, XLA or SageMaker's model parallelism:
        their states are in pieces. If checkpoints are pushed to the hub, which would get no weights.

    Examples
    --------
    >>> from transformers import Trainer
    >>> from tpde.integrations.transformers.trainer import StoredCheckpoints
    >>> class MyTrainer(StoredCheckpoints, Trainer):
    ...     checkpoint_keyframe_every = 32
    """

    checkpoint_keyframe_every = 16
    checkpoint_background = False

    _tpde_steps: LinkedSteps | None = None
    _tpde_state: dict[str, Any] | None = None  # of the checkpoint that is being written

    def _tpde_refuse(self) -> None:
        """Refuse what keeps states in pieces, or takes checkpoints for files."""
        from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

        kinds = {
            "FSDP": self.is_fsdp_enabled,
            "DeepSpeed": self.is_deepspeed_enabled,
            "XLA": is_torch_xla_available(),
            "SageMaker's model parallelism": is_sagemaker_mp_enabled(),
        }
        if found := [kind for kind, is_on in kinds.items() if is_on]:
            raise InvalidInput(
                f"`StoredCheckpoints` does not store the checkpoints of {found[0]}, which are in pieces",
                hint="use the Trainer without it",
            )
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise InvalidInput(
                "the Trainer pushes each checkpoint's files to the hub, and a store's has no weights in it",
                hint='pass `hub_strategy="end"`, and call `model.push_to_hub` when training has ended',
            )

    def _tpde_run(self, folder: Path) -> LinkedSteps:
        """The store of a run's folder, which may be a relative path, of the folder that is current now."""
        folder, steps = anchored(folder), self._tpde_steps
        if steps is None or steps.store.directory != folder / STORE:
            if steps is not None:
                steps.store.close()
            folder.mkdir(parents=True, exist_ok=True)
            steps = self._tpde_steps = LinkedSteps(
                folder / STORE,
                lambda: folder.glob(f"*/{LINK}"),
                keyframe_every=self.checkpoint_keyframe_every,
                background=self._tpde_background,
            )
        return steps

    @property
    def _tpde_background(self) -> bool:
        """Whether checkpoints are written while training goes on, when the one before is not removed yet."""
        return self.checkpoint_background and self.args.save_total_limit != 1

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._tpde_refuse()
        self._tpde_state = {}
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._tpde_state = None
        if self.args.should_save and not self._tpde_background:  # and what was rotated away is not wanted
            self._tpde_run(Path(self._get_output_dir(trial=trial))).forget()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and then wait for checkpoints that are being written."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._tpde_steps is not None:
                with contextlib.closing(self._tpde_steps.store):
                    self._tpde_steps.forget()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model's files, or, inside a checkpoint, its state."""
        if self._tpde_state is None or output_dir is None:
            super().save_model(output_dir, _internal_call)
            return
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            self._tpde_state[_MODEL] = _model_state(self.accelerator.unwrap_model(self.model))
            if self.args.save_only_model:
                self._tpde_write(output_dir)

    def _tpde_optimizers(self) -> tuple[tuple[str, Any], ...]:
        return (_OPTIMIZER, self.optimizer), (_SCHEDULER, self.lr_scheduler)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._tpde_state is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            for part, it in self._tpde_optimizers():
                self._tpde_state[part] = it.state_dict()

    def _save_scaler(self, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if self._tpde_state is None:
            super()._save_scaler(output_dir)
        elif self.args.should_save and scaler is not None:
            self._tpde_state[_SCALER] = scaler.state_dict()

    def _save_rng_state(self, output_dir: str) -> None:
        if self._tpde_state is None:
            super()._save_rng_state(output_dir)
            return
        if self.args.world_size > 1:  # each process its own
            super()._save_rng_state(output_dir)
        else:
            self._tpde_state[_RANDOM] = _random_state()
        if self.args.should_save:
            self._tpde_write(output_dir)

    def _tpde_write(self, output_dir: str) -> None:
        """Save what was collected. `trainer_state.json`, which completes a checkpoint, comes after it."""
        folder = Path(output_dir)
        self._tpde_run(folder.parent).save(
            folder / LINK, self._tpde_state, self.state.global_step, forget=self._tpde_background
        )

    def _tpde_part(self, checkpoint: str | None, part: str) -> Any:
        """A part of a checkpoint, or None if it has none, or is not in a store."""
        folder = anchored(Path(checkpoint)) if checkpoint is not None else None
        if folder is None or not (folder / LINK).is_file():
            return None
        refuse_overwritten(folder / LINK, [folder / _ORDINARY])
        if self._tpde_steps is not None:
            self._tpde_steps.store.wait()
        return load_linked(folder.parent / STORE, folder / LINK, part=part)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        state = self._tpde_part(resume_from_checkpoint, _MODEL)
        if state is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._tpde_refuse()
        _load_model(self.model if model is None else model, state)

    def _load_best_model(self) -> None:
        if self.args.world_size > 1:  # one writes, and all read
            if self._tpde_steps is not None:
                self._tpde_steps.store.wait()
            self.accelerator.wait_for_everyone()
        state = self._tpde_part(self.state.best_model_checkpoint, _MODEL)
        if state is None:
            super()._load_best_model()
        else:
            _load_model(self.model, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        for part, it in self._tpde_optimizers():
            state = self._tpde_part(checkpoint, part)
            if state is None:
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            it.load_state_dict(state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        state = self._tpde_part(checkpoint, _SCALER)
        if state is None or getattr(self.accelerator, "scaler", None) is None:
            super()._load_scaler(checkpoint)
        else:
            self.accelerator.scaler.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.args.world_size > 1:
            super()._load_rng_state(checkpoint)
            return
        state = self._tpde_part(checkpoint, _RANDOM)
        if state is None:
            super()._load_rng_state(checkpoint)
        else:
            _set_random_state(state)


def _model_state(model: Any) -> Any:
    """A model's state; of one with PEFT's adapters theirs alone, by adapter."""
    if not hasattr(model, "peft_config"):
        return {"state": model.state_dict()}
    from peft import get_peft_model_state_dict

    return {
        "adapters": {name: get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config}
    }


def _load_model(model: Any, state: Any) -> None:
    if "state" in state:
        model.load_state_dict(state["state"])
        return
    from peft import set_peft_model_state_dict

    for name, weights in state["adapters"].items():
        set_peft_model_state_dict(model, weights, adapter_name=name)


def _random_state() -> dict[str, Any]:
    """The states of all generators of random numbers that a trainer uses."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
