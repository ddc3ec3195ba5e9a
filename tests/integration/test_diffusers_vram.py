"""Models of diffusers under a budget of device memory. The device is simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.budgets import PIECE, SLOTS, Opened, simulated
from support.card import DEVICE, GIB, Card
from support.diffusion import diffusers, noise, packed_folder, same_bits, torch, transformer, unet

from tpde.errors import InvalidInput, OutOfMemory, PackedWeight, UnsupportedDevice
from tpde.integrations.diffusers import load
from tpde.loading.checkpoint_files import Checkpoint
from tpde.loading.footprint import plain_bytes
from tpde.loading.model_units import TABLES_BYTES
from tpde.loading.runs import Run
from tpde.planning.budget import Budget
from tpde.planning.units import Placement

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_a_streamed_component_is_not_saved(streamed: Callable[..., Opened], tmp_path: Path) -> None:
    streamed()
    folder = packed_folder(unet(), tmp_path)
    model = load(diffusers.UNet2DModel, folder, device="cpu", vram="1GiB", activations="64MiB")
    with pytest.raises(PackedWeight, match="streams its weights"):
        model.save_pretrained(tmp_path / "again")


def test_a_budget_is_of_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a budget of GPU memory"):
        load(diffusers.UNet2DModel, packed_folder(unet(), tmp_path), "cpu", vram="1GiB")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDevice, match="leave it out to run on the CPU"):
            load(diffusers.UNet2DModel, tmp_path, vram="1GiB")
    with pytest.raises(InvalidInput, match="`ram` is a part of a budget"):
        load(diffusers.UNet2DModel, tmp_path / "packed", ram="1GiB")
    with pytest.raises(InvalidInput, match="`activations` is a part of a budget"):
        load(diffusers.UNet2DModel, tmp_path / "packed", activations="1GiB")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Opened]]:
    """Let models stream to the CPU, which stands for a GPU, with fields of plans as a test wants them."""
    pytest.importorskip("transformers", reason="the simulation replaces the devices of both integrations")
    from tpde.integrations.diffusers import load_model
    from tpde.integrations.diffusers import streamed as module

    place_units = module.place_units
    monkeypatch.setattr(load_model, "check_gpu", lambda *_: None)
    with simulated(monkeypatch) as opened:

        def place(**fields: Any) -> Opened:
            def planned(*args: Any, **kwargs: Any) -> Any:
                made = place_units(*args, **kwargs)
                chosen = dict.fromkeys(made.placements, Placement.HOST)
                ring = {"slots": SLOTS, "piece": PIECE, "placements": chosen}
                return dataclasses.replace(made, **(ring | fields))

            monkeypatch.setattr(module, "place_units", planned)
            return opened

        yield place


def test_a_streamed_unet_has_the_plain_ones_bits(streamed: Callable[..., Opened], tmp_path: Path) -> None:
    opened, plain = streamed(), unet()
    model = load(
        diffusers.UNet2DModel, packed_folder(plain, tmp_path), device="cpu", vram="1GiB", activations="64MiB"
    )
    with torch.no_grad():
        found, expected = (it(noise(2, 3, 8, 8), 10).sample for it in (model, plain))
    assert same_bits(found, expected)
    (stats,) = model.tpde_streamer.stats().values()
    assert stats["copied_bytes"] > 0
    assert opened.memory[0].begun == 1
    model.tpde_streamer.close()
    assert opened.memory[0].closed


def test_a_layer_larger_than_the_workspace(streamed: Callable[..., Opened], tmp_path: Path) -> None:
    streamed(tiled=("proj_out",), workspace=40 << 10)
    folder, kind = packed_folder(transformer(), tmp_path), diffusers.PixArtTransformer2DModel
    model = load(kind, folder, device="cpu", vram="1GiB", activations="64MiB")
    (slot,) = model.proj_out.tpde_slots.values()
    assert slot.packed.tile_bytes == 40 << 10
    with pytest.raises(PackedWeight):
        model.proj_out.weight.sum()


def test_loading_that_fails_gives_all_back(
    streamed: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise KeyboardInterrupt

    opened, folder = streamed(), packed_folder(unet(), tmp_path)
    monkeypatch.setattr("tpde.integrations.diffusers.load_model.finish", fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        load(diffusers.UNet2DModel, folder, device="cpu", vram="1GiB", activations="64MiB")
    assert caught.tb is not None  # it keeps the model, which is not collected
    assert opened.memory[0].closed


def test_a_budget_that_cannot_work_is_refused_before_anything_is_read(
    streamed: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    folder = packed_folder(unet(), tmp_path)
    monkeypatch.setattr(Checkpoint, "plain_tensor", read)
    monkeypatch.setattr(Checkpoint, "decode", read)
    with pytest.raises(OutOfMemory, match=r"the least that works .* smaller `activations`"):
        load(diffusers.UNet2DModel, folder, device="cpu", vram="32MiB", activations="1MiB")


def test_other_components_come_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated already does not count, and what comes later is not limited."""
    from tpde.integrations.diffusers.streamed import planned

    card = Card(monkeypatch)
    card.free, card.reserved = 4 * GIB, 11 * GIB
    model = unet()
    with Checkpoint([packed_folder(model, tmp_path) / "diffusion_pytorch_model.safetensors"]) as checkpoint:
        runs = {name: Run(it.spec.shape, it.dtype, [it]) for name, it in checkpoint.packed.items()}
        streaming = planned(model, runs, DEVICE, Budget(4 * GIB))
        assert streaming.plans[DEVICE].vram == 4 * GIB
        assert streaming.plans[DEVICE].parts["plain"] == plain_bytes(model, runs) + TABLES_BYTES * len(runs)
        assert card.fraction == 1.0
        streaming.close()
        assert card.fraction == 1.0
        with pytest.raises(OutOfMemory, match=r"4\.00 GiB of 16\.00 GiB are free"):
            planned(model, runs, DEVICE, Budget(5 * GIB))
