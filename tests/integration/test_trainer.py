"""Checkpoints of transformers' Trainer in a store: runs that resume lose as runs that never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.training import equal

import tpde
from tpde import CheckpointStore
from tpde.errors import InvalidInput, TpdeError
from tpde.store.linked import STORE
from tpde.store.step_links import LINK

torch = pytest.importorskip("torch", reason="trainers need PyTorch")
transformers = pytest.importorskip("transformers", reason="it is transformers' Trainer")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from tpde.integrations.transformers.trainer import StoredCheckpoints  # noqa: E402


class Stored(StoredCheckpoints, Trainer):
    """A Trainer with a store."""

    checkpoint_keyframe_every = 3


class Background(Stored):
    """That writes in the background."""

    checkpoint_background = True


def _model() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _data() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 64, (12,), generator=draw) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(folder: Path, steps: int = 12, kind: Any = Stored, model: Any = None, **options: Any) -> Any:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-3,
        save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=5, lr_scheduler_type="cosine",
        **options,
    )  # fmt: skip
    made = kind(model=model or _model(), args=arguments, train_dataset=_data(), eval_dataset=_data()[:4])
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made: Any) -> dict[int, float]:
    return {it["step"]: it["loss"] for it in made.state.log_history if "loss" in it}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[str, Any]]:
    """The losses, and the weights, of a run with transformers' own checkpoints that was never stopped."""
    made = trainer(tmp_path_factory.mktemp("plain"), kind=Trainer)
    made.train()
    return losses(made), dict(made.model.state_dict())


@pytest.mark.parametrize("kind", [Stored, Background])
def test_a_run_that_resumes_has_the_losses_of_one_that_never_stopped(
    plain: Any, tmp_path: Path, kind: Any
) -> None:
    first = trainer(tmp_path, kind=kind)
    first.add_callback(_StopAt(7))
    first.train()
    assert losses(first) == {step: loss for step, loss in plain[0].items() if step <= 7}
    second = trainer(tmp_path, kind=kind)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == plain[0]
    assert equal(dict(second.model.state_dict()), plain[1])
    files = sorted(it.name for it in (tmp_path / "checkpoint-12").iterdir())
    assert files == [LINK, "trainer_state.json"]
    assert CheckpointStore(tmp_path / STORE).verify() == []


class _StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._step
        control.should_save = control.should_save and state.global_step < self._step


def test_any_checkpoint_resumes_and_the_run_goes_on_from_there(plain: Any, tmp_path: Path) -> None:
    trainer(tmp_path).train()
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(again) == plain[0]
    third = trainer(tmp_path)
    third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert losses(third) == plain[0]


def test_all_generators_of_random_numbers_are_set_again(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draws() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    made = trainer(tmp_path, steps=2)
    made.train()
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    made._save_checkpoint(made.model, None)
    wanted = draws()
    made._load_rng_state(str(tmp_path / "checkpoint-2"))
    assert draws() == wanted


def test_rotation_removes_steps_too(plain: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, save_total_limit=2)
    made.train()
    assert {it.name for it in tmp_path.iterdir()} >= {"checkpoint-10", "checkpoint-12", STORE}
    assert not (tmp_path / "checkpoint-8").exists()
    steps = CheckpointStore(tmp_path / STORE).steps
    assert {10, 12} <= set(steps)
    assert not {2, 4, 6} & set(steps)
    again = trainer(tmp_path, save_total_limit=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert losses(again) == plain[0]


class Whole(Stored):
    """Whose checkpoints stand on no other."""

    checkpoint_keyframe_every = 1


@pytest.mark.parametrize("place", ["run/best", "elsewhere/best"])
def test_a_checkpoint_that_was_renamed_keeps_its_step(plain: Any, tmp_path: Path, place: str) -> None:
    run, best = tmp_path / "run", tmp_path / place
    for stop, resume in ((5, None), (7, True)):
        made = trainer(run, kind=Whole)
        made.add_callback(_StopAt(stop))
        made.train(resume_from_checkpoint=resume)
        if resume is None:
            best.parent.mkdir(exist_ok=True)
            (run / "checkpoint-2").rename(best)
    assert CheckpointStore(run / STORE).steps == (2, 4, 6)
    if best.parent != run:
        best = best.rename(run / "best")
    again = trainer(run, kind=Whole)
    again.train(resume_from_checkpoint=str(best))
    assert losses(again) == plain[0]


def test_a_relative_folder_is_one_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    made = trainer(Path("run"), kind=Whole, steps=2)
    made.train()
    monkeypatch.chdir(tmp_path / "b")
    made._save_checkpoint(made.model, None)
    made._tpde_steps.store.close()
    for name in "ab":
        run = tmp_path / name / "run"
        assert CheckpointStore(run / STORE).steps == (2,)
        assert made._tpde_part(str(run / "checkpoint-2"), "model") is not None


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    worst = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # which is not the last
    found = []
    for kind, name in ((Stored, "stored"), (Trainer, "plain")):
        made = trainer(tmp_path / name, kind=kind, **options, **worst)
        made.train()
        found.append((Path(made.state.best_model_checkpoint).name, dict(made.model.state_dict())))
    assert found[0][0] == found[1][0] != "checkpoint-12"
    assert equal(found[0][1], found[1][1])


def test_checkpoints_of_models_alone(tmp_path: Path) -> None:
    trainer(tmp_path, steps=4, save_only_model=True).train()
    assert CheckpointStore(tmp_path / STORE).parts(4) == ("model",)
    again = trainer(tmp_path, steps=6, save_only_model=True)
    again.train(resume_from_checkpoint=True)
    assert max(losses(again)) == 6


def test_plain_checkpoints_are_resumed_too(plain: Any, tmp_path: Path) -> None:
    trainer(tmp_path, kind=Trainer).train()
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert losses(again) == plain[0]
    assert not (tmp_path / "checkpoint-6" / LINK).exists()
    assert (tmp_path / "checkpoint-12" / LINK).exists()


def test_a_checkpoint_that_was_saved_again_without_the_store_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).train()
    trainer(tmp_path, steps=2, kind=Trainer).train()
    again, place = trainer(tmp_path, steps=4), tmp_path / "checkpoint-2"
    with pytest.raises(InvalidInput, match=r"optimizer\.pt` is newer than `tpde\.json` beside it"):
        again.train(resume_from_checkpoint=str(place))
    (place / LINK).unlink()
    again.train(resume_from_checkpoint=str(place))
    assert sorted(losses(again)) == [1, 2, 3, 4]
    trainer(tmp_path, steps=2).train()  # over the files, which stay
    assert (place / "optimizer.pt").exists()
    trainer(tmp_path, steps=4).train(resume_from_checkpoint=str(place))


def test_a_checkpoint_is_resumed_from_within(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path).train()
    again = trainer(tmp_path)
    monkeypatch.chdir(tmp_path / "checkpoint-6")
    again.train(resume_from_checkpoint=".")
    assert losses(again) == plain[0]


def test_models_that_users_save_are_files(tmp_path: Path) -> None:
    made = trainer(tmp_path, steps=2)
    made.train()
    made.save_model(str(tmp_path / "mine"))
    found = LlamaForCausalLM.from_pretrained(tmp_path / "mine")
    assert equal(dict(found.state_dict()), dict(made.model.state_dict()))


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
def test_adapters_alone_are_stored(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")

    def adapted() -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(
            _model(), peft.LoraConfig(target_modules=["q_proj"], r=2, lora_dropout=0.1)
        )

    whole = trainer(tmp_path / "whole", model=adapted())
    whole.train()
    first = trainer(tmp_path / "run", model=adapted())
    first.add_callback(_StopAt(7))
    first.train()
    state = CheckpointStore(tmp_path / "run" / STORE).load(6)["model"]
    assert all("lora" in it for it in state["adapters"]["default"])
    assert len(state["adapters"]["default"]) == 2
    second = trainer(tmp_path / "run", model=adapted())
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)


def test_a_checkpoint_whose_step_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    trainer(tmp_path, steps=4).train()
    (tmp_path / STORE / "step-00000004.tpde").unlink()
    with pytest.raises(InvalidInput, match="has no step 4"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2" / LINK).write_text(json.dumps({"tpde_step": "2"}))
    with pytest.raises(InvalidInput, match="does not name a step"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_its_store_is_refused_by_name(tmp_path: Path) -> None:
    trainer(tmp_path / "run", steps=2).train()
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "copy" / "checkpoint-2")
    with pytest.raises(InvalidInput, match=r"no checkpoint store `.*copy.tpde-store`, of which step 2"):
        trainer(tmp_path / "copy").train(resume_from_checkpoint=True)


def test_states_in_pieces_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, steps=2)
    made.is_fsdp_enabled = True
    with pytest.raises(TpdeError, match="FSDP"):
        made._save_checkpoint(made.model, None)
    assert not (tmp_path / STORE).exists()


def test_checkpoints_are_not_pushed_without_their_weights(tmp_path: Path) -> None:
    made = trainer(tmp_path, steps=2)
    made.args.push_to_hub, pushed = True, []
    made._push_from_checkpoint = pushed.append
    with pytest.raises(InvalidInput, match="no weights in it") as told:
        made.train()
    assert 'hub_strategy="end"' in str(told.value.hint)
    assert not pushed
    made.args.hub_strategy = transformers.training_args.HubStrategy("end")
    made.train()
    assert CheckpointStore(tmp_path / STORE).steps == (2,)


def test_packed_weights_beside_trained_ones(tmp_path: Path) -> None:
    """A run that stops, and resumes into a packed model, is the plain model's."""

    def model(packed: bool) -> Any:
        made = _model().requires_grad_(False)
        made.model.layers[-1].mlp.requires_grad_(True)
        return tpde.pack_module(made, min_bytes=0) if packed else made

    runs = {}
    for packed in (False, True):
        trainer(tmp_path / str(packed), 4, model=model(packed)).train()
        runs[packed] = trainer(tmp_path / str(packed), 8, model=model(packed))
        runs[packed].train(resume_from_checkpoint=True)
    assert losses(runs[True]) == losses(runs[False])
    states = [
        CheckpointStore(tmp_path / str(it) / STORE).load(8, part="model")["state"] for it in (True, False)
    ]
    assert equal(*states)
