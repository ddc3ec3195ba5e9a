"""Checkpoints of transformers' Trainer, written in the background: the last whole one stays until then."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.training import held_back, no_thread_writes, small_network

from tpde import CheckpointStore
from tpde.store.linked import STORE

torch = pytest.importorskip("torch", reason="trainers need PyTorch")
transformers = pytest.importorskip("transformers", reason="it is transformers' Trainer")

from transformers import Trainer, TrainingArguments  # noqa: E402

from tpde.integrations.transformers.trainer import StoredCheckpoints  # noqa: E402


class Background(StoredCheckpoints, Trainer):
    """A Trainer whose checkpoints stand on no other."""

    checkpoint_background = True
    checkpoint_keyframe_every = 1


class _Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = small_network()

    def forward(self, x: Any) -> dict[str, Any]:
        return {"loss": self.network(x).square().mean()}


def trainer(folder: Path, steps: int, **options: Any) -> Any:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    return Background(model=_Model(), args=arguments, train_dataset=[{"x": torch.ones(16)}] * 8)


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what rotation removes goes at the next save, or at the end."""
    ended = threading.Event()
    held_back(monkeypatch, ended)

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                assert not list(tmp_path.rglob("step-*"))
                ended.set()

    made = trainer(tmp_path, steps=10, save_total_limit=2)
    made.add_callback(Ends())
    made.train()
    assert CheckpointStore(tmp_path / STORE).steps == (8, 10)


def test_the_last_checkpoint_is_not_removed_before_the_next_is_written(tmp_path: Path) -> None:
    made = trainer(tmp_path, steps=2, save_total_limit=1)
    made.train()
    with pytest.MonkeyPatch.context() as patch:
        no_thread_writes(patch)
        again = trainer(tmp_path, steps=4, save_total_limit=1)
        again.train(resume_from_checkpoint=True)
    made = trainer(tmp_path, steps=6, save_total_limit=1)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6


def test_all_processes_load_the_best_model_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, written = trainer(tmp_path, steps=2, save_only_model=True), threading.Event()
    held_back(monkeypatch, written)
    made._save_checkpoint(made.model, None)
    made.state.best_model_checkpoint = str(tmp_path / "checkpoint-0")
    threading.Timer(0.2, written.set).start()
    seen: list[list[Path]] = []
    monkeypatch.setattr(type(made.args), "world_size", 2)
    monkeypatch.setattr(
        made.accelerator, "wait_for_everyone", lambda: seen.append(list(tmp_path.rglob("step-*")))
    )
    made._load_best_model()
    assert [len(it) for it in seen] == [1]
    made._tpde_steps.store.close()
