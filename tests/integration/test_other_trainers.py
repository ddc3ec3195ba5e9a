"""Checkpoints of Lightning's Trainer and of accelerate in a store, and of a plain loop."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.training import equal, held_back, no_thread_writes

from tpde import CheckpointStore
from tpde.errors import InvalidDestination, InvalidInput
from tpde.store.linked import STORE
from tpde.store.step_links import LINK

torch = pytest.importorskip("torch", reason="trainers need PyTorch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))


def test_the_examples_loop_resumes_bit_for_bit(tmp_path: Path) -> None:
    train = runpy.run_path(str(EXAMPLES / "resume.py"))["train"]
    whole = train(tmp_path / "whole", 12)
    first = train(tmp_path / "run", 7)
    second = train(tmp_path / "run", 12)
    assert sorted(second) == list(range(7, 13))
    assert first | second == whole


# ---- accelerate


def _accelerated(folder: Path) -> tuple[Any, Any, Any, Any]:
    accelerate = pytest.importorskip("accelerate", reason="these are its hooks")
    from tpde.integrations.accelerate import store_checkpoints

    accelerator = accelerate.Accelerator(cpu=True)
    model = _network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer, store_checkpoints(accelerator, folder / STORE, keyframe_every=3)


def _steps_of(accelerator: Any, model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
    found = []
    for step in range(begin, end):
        draw = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 16, generator=draw)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_accelerate_saves_and_loads_models_through_a_store(tmp_path: Path) -> None:
    accelerator, model, optimizer, steps = _accelerated(tmp_path)
    losses = _steps_of(accelerator, model, optimizer, 0, 4)
    accelerator.save_state(str(tmp_path / "four"))
    saved = {name: it.clone() for name, it in model.state_dict().items()}
    losses += _steps_of(accelerator, model, optimizer, 4, 6)
    accelerator.save_state(str(tmp_path / "six"))
    losses += _steps_of(accelerator, model, optimizer, 6, 8)
    steps.store.close()
    assert not list(tmp_path.rglob("model*.safetensors"))
    assert equal(CheckpointStore(tmp_path / STORE).load(0)["0"], saved)

    again, model, optimizer, _ = _accelerated(tmp_path)
    again.load_state(str(tmp_path / "four"))
    assert equal(dict(model.state_dict()), saved)
    assert _steps_of(again, model, optimizer, 4, 8) == losses[4:]


def test_accelerate_forgets_what_nobody_links_to(tmp_path: Path) -> None:
    import shutil

    accelerator, _, _, steps = _accelerated(tmp_path)
    for name in "abcde":
        accelerator.save_state(str(tmp_path / name))
    for name in "abc":
        shutil.rmtree(tmp_path / name)
    steps.forget()
    assert steps.store.steps == (3, 4)  # each third is whole
    (tmp_path / "d" / LINK).write_text("{}")
    shutil.rmtree(tmp_path / "e")
    with pytest.raises(InvalidInput, match="does not name a step"):
        steps.forget()
    assert steps.store.steps == (3, 4)
    steps.store.close()


@pytest.mark.parametrize("how", ["outside", "symbolic link", "another current folder"])
def test_accelerate_keeps_what_its_folders_name_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    import shutil

    (run := tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    accelerator, model, optimizer, steps = _accelerated(Path("run"))
    saved = {name: it.clone() for name, it in model.state_dict().items()}
    places = {"outside": tmp_path / "other" / "first", "another current folder": run / "first"}
    place = places.get(how, run / "linked" / "first")
    (run / "linked").symlink_to(tmp_path / "other", target_is_directory=True)
    accelerator.save_state(str(place))
    if how == "another current folder":
        monkeypatch.chdir(tmp_path / "other")
    _steps_of(accelerator, model, optimizer, 0, 3)
    for _ in range(3):  # each third is whole
        accelerator.save_state(str(run / "second"))
    steps.forget()
    assert steps.store.steps == (0, 3)
    accelerator.load_state(str(place))
    assert equal(dict(model.state_dict()), saved)
    shutil.rmtree(place)
    shutil.rmtree(run / "second")
    steps.forget()
    assert steps.store.steps == ()
    steps.store.close()


def test_accelerate_loads_its_own_folders_too(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="these are its hooks")
    plain = accelerate.Accelerator(cpu=True)
    model = plain.prepare(_network())
    saved = {name: it.clone() for name, it in model.state_dict().items()}
    plain.save_state(str(tmp_path / "plain"))
    accelerator, model, _, _ = _accelerated(tmp_path)
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator._optimizers.clear()
    accelerator.load_state(str(tmp_path / "plain"))
    assert equal(dict(model.state_dict()), saved)


def test_accelerate_refuses_a_folder_that_was_saved_again_without_the_store(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="these are its hooks")
    accelerator, model, _, steps = _accelerated(tmp_path)
    saved = {name: it.clone() for name, it in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.save_model(model, str(tmp_path / "one"))  # an export beside it is no state
    accelerator.load_state(str(tmp_path / "one"))
    plain = accelerate.Accelerator(cpu=True)
    plain.prepare(torch.nn.Linear(3, 3))
    plain.save_state(str(tmp_path / "one"))
    with pytest.raises(InvalidInput, match=r"model\.safetensors` is newer than `tpde\.json` beside it"):
        accelerator.load_state(str(tmp_path / "one"))
    (tmp_path / "one" / LINK).unlink()
    plain.load_state(str(tmp_path / "one"))
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.load_state(str(tmp_path / "one"))
    assert equal(dict(model.state_dict()), saved)
    steps.store.close()


def test_accelerate_names_models_that_were_not_saved(tmp_path: Path) -> None:
    accelerator, _, _, steps = _accelerated(tmp_path)
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.prepare(_network())
    with pytest.raises(InvalidInput, match="has 1 models, 2 are prepared"):
        accelerator.load_state(str(tmp_path / "one"))
    steps.store.close()


def test_accelerate_with_models_in_pieces_is_refused(tmp_path: Path) -> None:
    import types

    from tpde.integrations.accelerate import store_checkpoints

    fake: Any = types.SimpleNamespace(distributed_type=types.SimpleNamespace(value="FSDP"))
    with pytest.raises(InvalidInput, match="FSDP"):
        store_checkpoints(fake, tmp_path / STORE)


# ---- Lightning


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")


def _fit(lightning: Any, folder: Path, steps: int, *, stored: Any = None, resume: Any = None) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.losses = _network(), {}

        def training_step(self, batch: Any, at: int) -> Any:
            # Lightning begins an epoch's batches anew when it resumes within one.
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(self.global_step))
            loss = self.network(batch).square().mean()
            self.losses[self.global_step] = loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["random"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.random = checkpoint["random"]

        def on_train_start(self) -> None:
            if hasattr(self, "random"):
                torch.set_rng_state(self.random)

    keep = lightning.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[keep], plugins=[stored] if stored else None,
    )  # fmt: skip
    module = Module()
    draw = torch.Generator().manual_seed(7)
    data = torch.utils.data.DataLoader(torch.randn(200, 16, generator=draw), batch_size=4)
    trainer.fit(module, data, ckpt_path=resume)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("background", [False, True])
def test_lightning_resumes_from_a_store(lightning: Any, tmp_path: Path, background: bool) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    whole = _fit(lightning, tmp_path / "plain", 10)
    folder = tmp_path / "run"
    stored = StoredCheckpointIO(keyframe_every=2, background=background)
    first = _fit(lightning, folder, 6, stored=stored)
    stored.teardown()
    assert first.losses == {step: loss for step, loss in whole.losses.items() if step < 6}
    assert {it.name for it in folder.iterdir()} == {"step=4.ckpt", "step=6.ckpt", "last.ckpt", STORE}
    assert set(json.loads((folder / "step=6.ckpt").read_text())) == {"tpde_step", "tpde_id"}
    assert 2 not in CheckpointStore(folder / STORE).steps
    second = _fit(lightning, folder, 10, stored=StoredCheckpointIO(), resume=str(folder / "step=6.ckpt"))
    assert second.losses == {step: loss for step, loss in whole.losses.items() if step >= 6}
    state = StoredCheckpointIO().load_checkpoint(folder / "last.ckpt")["state_dict"]
    assert equal(dict(state), dict(second.state_dict()))
    assert CheckpointStore(folder / STORE).verify() == []


def test_lightning_loads_what_is_still_being_written(
    lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from tpde.integrations.lightning import StoredCheckpointIO

    loading = threading.Event()
    held_back(monkeypatch, loading)
    made = StoredCheckpointIO(background=True)
    made.save_checkpoint({"state_dict": {"x": torch.ones(3)}, "global_step": 1}, tmp_path / "a.ckpt")
    assert not list(tmp_path.rglob("step-*"))
    threading.Timer(0.2, loading.set).start()
    assert torch.equal(made.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["x"], torch.ones(3))
    made.teardown()


def test_lightning_takes_relative_paths_from_the_current_folder(
    lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    made = StoredCheckpointIO(keyframe_every=1)
    for x, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made.save_checkpoint({"x": x, "global_step": 1}, "it.ckpt")
    made.remove_checkpoint("none.ckpt")
    made.teardown()
    for x, name in enumerate("ab"):
        assert made.load_checkpoint(tmp_path / name / "it.ckpt")["x"] == x


def test_lightning_tells_of_a_checkpoint_that_was_not_saved(lightning: Any, tmp_path: Path) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    made = StoredCheckpointIO(background=True)
    with pytest.MonkeyPatch.context() as patch:
        no_thread_writes(patch)
        made.save_checkpoint({"x": 1, "global_step": 1}, tmp_path / "a.ckpt")
        with pytest.raises(InvalidDestination, match="No space"):
            made.teardown()
    made.save_checkpoint({"x": 2, "global_step": 1}, tmp_path / "b.ckpt")
    with pytest.raises(InvalidInput, match=r"a\.ckpt` names step 1 of .*another state"):
        made.load_checkpoint(tmp_path / "a.ckpt")
    assert made.load_checkpoint(tmp_path / "b.ckpt")["x"] == 2
    made.teardown()


def test_lightning_shares_its_folder_with_small_files_of_others(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    from tpde.integrations.lightning import StoredCheckpointIO

    others = {"writer.lock": b"", "notes.txt": b"by hand\n", "list.json": b"[1]", "odd.bin": b"\xff\xfe"}
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    stored = StoredCheckpointIO()
    for step in (1, 2):
        stored.save_checkpoint({"global_step": step, "w": torch.zeros(8)}, tmp_path / f"{step}.ckpt")
    stored.remove_checkpoint(tmp_path / "1.ckpt")
    assert stored.load_checkpoint(tmp_path / "2.ckpt")["global_step"] == 2
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    (tmp_path / "2.ckpt").write_text('{"tpde_step": "two"}')  # a link, and damaged
    with pytest.raises(InvalidInput, match="does not name a step"):
        stored.remove_checkpoint(tmp_path / "1.ckpt")
    stored.teardown()


@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_from_an_ordinary_checkpoint(lightning: Any, tmp_path: Path) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    whole = _fit(lightning, tmp_path / "plain", 10)
    ordinary = tmp_path / "plain" / "step=8.ckpt"
    second = _fit(lightning, tmp_path / "run", 10, stored=StoredCheckpointIO(), resume=str(ordinary))
    assert second.losses == {step: loss for step, loss in whole.losses.items() if step >= 8}


@pytest.mark.parametrize("zipped", [True, False])
def test_ordinary_checkpoints_are_loaded_as_lightning_loads_them(
    lightning: Any, zipped: bool, tmp_path: Path
) -> None:
    """Code in them runs only if that is asked for."""
    import pickle

    from tpde.integrations.lightning import StoredCheckpointIO

    torch.save({"path": tmp_path}, tmp_path / "x.ckpt", _use_new_zipfile_serialization=zipped)
    made = StoredCheckpointIO()
    assert made.load_checkpoint(tmp_path / "x.ckpt", weights_only=False) == {"path": tmp_path}
    for options in ({}, {"weights_only": True}, {"map_location": "cpu"}):
        with pytest.raises(pickle.UnpicklingError):
            made.load_checkpoint(tmp_path / "x.ckpt", **options)


def test_lightning_writes_no_folders_that_are_called_as_a_url(
    lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    monkeypatch.chdir(tmp_path)
    made = StoredCheckpointIO()
    for call in (lambda it: made.save_checkpoint({"x": 1}, it), made.remove_checkpoint):
        for url in ("s3://bucket/run/a.ckpt", "file:///run/a.ckpt"):
            with pytest.raises(InvalidInput, match="is a URL, and a path is needed"):
                call(url)
    assert not list(tmp_path.iterdir())
    torch.save({"x": 1}, tmp_path / "a.ckpt")  # an ordinary one, which Lightning reads from anywhere
    assert made.load_checkpoint(f"file://{tmp_path}/a.ckpt") == {"x": 1}


def test_lightning_takes_no_storage_options(lightning: Any, tmp_path: Path) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    with pytest.raises(InvalidInput, match="storage_options"):
        StoredCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    assert list(tmp_path.iterdir()) == []


def test_lightning_without_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    from tpde.errors import MissingDependency

    monkeypatch.setitem(sys.modules, "lightning.fabric.plugins.io.checkpoint_io", None)
    monkeypatch.setitem(sys.modules, "lightning_fabric.plugins.io.checkpoint_io", None)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    monkeypatch.delitem(sys.modules, "tpde.integrations.lightning", raising=False)
    with pytest.raises(MissingDependency, match="pip install lightning"):
        importlib.import_module("tpde.integrations.lightning")
