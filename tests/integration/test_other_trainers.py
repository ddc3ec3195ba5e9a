"""Checkpoints of Lightning's Trainer in a store, and of a plain loop."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.training import equal, held_back, no_thread_writes, small_network

from tpde import CheckpointStore
from tpde.errors import InvalidDestination, InvalidInput
from tpde.store.linked import STORE

torch = pytest.importorskip("torch", reason="trainers need PyTorch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_examples_loop_resumes_bit_for_bit(tmp_path: Path) -> None:
    train = runpy.run_path(str(EXAMPLES / "resume.py"))["train"]
    whole = train(tmp_path / "whole", 12)
    first = train(tmp_path / "run", 7)
    second = train(tmp_path / "run", 12)
    assert sorted(second) == list(range(7, 13))
    assert first | second == whole


# ---- Lightning


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")


def _fit(lightning: Any, folder: Path, steps: int, *, stored: Any = None, resume: Any = None) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.losses = small_network(), {}

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


def test_lightning_removes_no_checkpoint_before_the_next_is_written(lightning: Any, tmp_path: Path) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    made = StoredCheckpointIO(background=True)
    made.save_checkpoint({"x": 1, "global_step": 1}, tmp_path / "a.ckpt")
    assert made.load_checkpoint(tmp_path / "a.ckpt")["x"] == 1
    with pytest.MonkeyPatch.context() as patch:
        no_thread_writes(patch)
        made.save_checkpoint({"x": 2, "global_step": 2}, tmp_path / "b.ckpt")
        with pytest.raises(InvalidDestination, match="No space"):
            made.remove_checkpoint(tmp_path / "a.ckpt")
    made.teardown()
    assert made.load_checkpoint(tmp_path / "a.ckpt")["x"] == 1


def test_lightning_saves_though_the_save_before_failed(lightning: Any, tmp_path: Path) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    made = StoredCheckpointIO(background=True)
    with pytest.MonkeyPatch.context() as patch:
        no_thread_writes(patch)
        made.save_checkpoint({"x": 1, "global_step": 1}, tmp_path / "a.ckpt")
        assert made._folders[tmp_path].store._pending._result.exception(60)  # type: ignore[union-attr]
    with pytest.raises(InvalidDestination, match=r"step 1 was not saved: .*No space"):
        made.save_checkpoint({"x": 2, "global_step": 2}, tmp_path / "b.ckpt")
    made.teardown()
    assert made.load_checkpoint(tmp_path / "b.ckpt")["x"] == 2


@pytest.mark.parametrize("background", [False, True])
def test_lightning_forgets_what_was_written_again_or_removed_by_hand(
    lightning: Any, tmp_path: Path, background: bool
) -> None:
    from tpde.integrations.lightning import StoredCheckpointIO

    made = StoredCheckpointIO(keyframe_every=1, background=background)
    for step in (1, 2, 3):
        made.save_checkpoint({"x": step, "global_step": step}, tmp_path / "last.ckpt")
    made.save_checkpoint({"x": 4, "global_step": 4}, tmp_path / "other.ckpt")
    (tmp_path / "last.ckpt").unlink()
    made.save_checkpoint({"x": 5, "global_step": 5}, tmp_path / "new.ckpt")
    made.teardown()
    assert CheckpointStore(tmp_path / STORE).steps == (4, 5)


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
