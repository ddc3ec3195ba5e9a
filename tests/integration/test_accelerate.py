"""Checkpoints of accelerate in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.training import equal, small_network

from tpde import CheckpointStore
from tpde.errors import InvalidInput
from tpde.store.linked import STORE
from tpde.store.step_links import LINK

torch = pytest.importorskip("torch", reason="accelerate needs PyTorch")


def _accelerated(folder: Path) -> tuple[Any, Any, Any, Any]:
    accelerate = pytest.importorskip("accelerate", reason="these are its hooks")
    from tpde.integrations.accelerate import store_checkpoints

    accelerator = accelerate.Accelerator(cpu=True)
    model = small_network()
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
    model = plain.prepare(small_network())
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
    accelerator.prepare(small_network())
    with pytest.raises(InvalidInput, match="has 1 models, 2 are prepared"):
        accelerator.load_state(str(tmp_path / "one"))
    steps.store.close()


def test_accelerate_with_models_in_pieces_is_refused(tmp_path: Path) -> None:
    import types

    from tpde.integrations.accelerate import store_checkpoints

    fake: Any = types.SimpleNamespace(distributed_type=types.SimpleNamespace(value="FSDP"))
    with pytest.raises(InvalidInput, match="FSDP"):
        store_checkpoints(fake, tmp_path / STORE)
