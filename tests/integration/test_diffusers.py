"""Models of diffusers from packed files: the bits of the plain ones, alone and in a pipeline."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")

from support.budgets import PIECE, SLOTS, Opened, simulated  # noqa: E402
from support.card import DEVICE, GIB, Card  # noqa: E402

from tpde import pack, unpack, verify  # noqa: E402
from tpde.errors import InvalidInput, NotPacked, OutOfMemory, PackedWeight, UnsupportedDevice  # noqa: E402
from tpde.integrations.diffusers import load, load_model  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.footprint import plain_bytes  # noqa: E402
from tpde.loading.model_units import TABLES_BYTES  # noqa: E402
from tpde.loading.runs import Run  # noqa: E402
from tpde.nn import packed_modules, plain_state_dict, set_kernels  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.units import Placement  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def unet(dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return model.to(dtype).eval()


def transformer() -> Any:
    torch.manual_seed(1)
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=64,
        sample_size=8,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return model.to(torch.bfloat16).eval()


def noise(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


def same_bits(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)))


def packed_folder(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder / "plain", **options)
    pack(folder / "plain", folder / "packed")
    return folder / "packed"


def test_a_unet_has_the_plain_ones_bits(tmp_path: Path) -> None:
    plain = unet()
    packed = load(diffusers.UNet2DModel, packed_folder(plain, tmp_path))
    assert sum(1 for _ in packed_modules(packed)) > 10
    assert not packed.training
    with torch.no_grad():
        found, expected = (it(noise(2, 3, 8, 8), 10).sample for it in (packed, plain))
    assert same_bits(found, expected)
    state = plain_state_dict(packed)
    assert list(state) == list(plain.state_dict())
    assert all(same_bits(state[name], it) for name, it in plain.state_dict().items())


def test_fused_kernels_in_a_transformer(tmp_path: Path) -> None:
    """On the CPU they compute as plain layers do."""
    kind, packed = diffusers.PixArtTransformer2DModel, packed_folder(transformer(), tmp_path)
    plain = kind.from_pretrained(tmp_path / "plain", torch_dtype=torch.bfloat16)
    model = set_kernels(load(kind, packed), "fused")
    slots = [slot for _, module in packed_modules(model) for slot in module.tpde_slots.values()]
    assert sum(slot.packed.multiplies for slot in slots) > 10
    given = {
        "encoder_hidden_states": noise(2, 5, 32),
        "timestep": torch.tensor([1, 1]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    with torch.no_grad():
        assert same_bits(model(noise(2, 4, 8, 8), **given).sample, plain(noise(2, 4, 8, 8), **given).sample)
    for name, value in plain.state_dict().items():
        assert same_bits(plain_state_dict(model)[name], value), name


def test_a_transformer_in_shards_with_buffers_that_it_computes(tmp_path: Path) -> None:
    folder = packed_folder(transformer(), tmp_path, max_shard_size="100KB")
    kind = diffusers.PixArtTransformer2DModel
    plain = kind.from_pretrained(tmp_path / "plain", torch_dtype=torch.bfloat16)
    assert len(list(folder.glob("*.safetensors"))) > 1
    packed = load(kind, folder)
    assert sum(1 for _ in packed_modules(packed)) > 10
    given = {
        "hidden_states": noise(1, 4, 8, 8),
        "encoder_hidden_states": noise(1, 5, 32),
        "timestep": torch.tensor([7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    with torch.no_grad():
        assert same_bits(packed(**given).sample, plain(**given).sample)


def test_in_a_pipeline(tmp_path: Path) -> None:
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)
    plain = diffusers.DDPMPipeline(unet=unet(torch.float32), scheduler=scheduler)
    plain.save_pretrained(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    packed = diffusers.DDPMPipeline.from_pretrained(
        tmp_path / "plain", unet=load(diffusers.UNet2DModel, tmp_path / "packed" / "unet")
    )

    def images(pipeline: Any) -> Any:
        pipeline.set_progress_bar_config(disable=True)
        made = pipeline(
            generator=torch.Generator().manual_seed(3), num_inference_steps=2, output_type="np"
        ).images
        return made.tobytes()

    assert images(packed) == images(plain)
    unpack(tmp_path / "packed", tmp_path / "back")
    for path in (tmp_path / "plain").rglob("*.*"):
        if path.is_file():
            assert (
                tmp_path / "back" / path.relative_to(tmp_path / "plain")
            ).read_bytes() == path.read_bytes()


# ---- by diffusers' own `from_pretrained` ----


def images(pipeline: Any) -> bytes:
    pipeline.set_progress_bar_config(disable=True)
    draw = torch.Generator().manual_seed(3)
    return bytes(pipeline(generator=draw, num_inference_steps=2, output_type="np").images.tobytes())


def packed_pipeline(folder: Path, dtype: Any, **options: Any) -> Any:
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)
    plain = diffusers.DDPMPipeline(unet=unet(dtype), scheduler=scheduler)
    plain.save_pretrained(folder / "plain", **options)
    pack(folder / "plain", folder / "packed")
    return plain


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}, {"variant": "bf16"}])
def test_a_packed_pipeline(options: dict[str, Any], tmp_path: Path) -> None:
    packed_pipeline(tmp_path, torch.bfloat16, **options)
    variant = {"variant": options["variant"]} if "variant" in options else {}
    for dtype in (torch.bfloat16, torch.float32):
        given = {"torch_dtype": dtype, **variant}
        plain, packed = (
            diffusers.DDPMPipeline.from_pretrained(tmp_path / it, **given) for it in ("plain", "packed")
        )
        assert bool(list(packed_modules(packed.unet))) == (dtype is torch.bfloat16)
        state = plain_state_dict(packed.unet)
        assert list(state) == list(plain.unet.state_dict())
        for name, it in plain.unet.state_dict().items():
            assert state[name].dtype == it.dtype
            assert torch.equal(state[name].view(torch.uint8), it.view(torch.uint8))
        with torch.no_grad():
            found, expected = (it.unet(noise(2, 3, 8, 8).to(dtype), 10).sample for it in (packed, plain))
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert verify(tmp_path / "packed") == []
    unpack(tmp_path / "packed", tmp_path / "back")
    for path in (it for it in (tmp_path / "plain").rglob("*") if it.is_file()):
        assert (tmp_path / "back" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("by", ["load", "from_pretrained"])
def test_a_pipeline_that_is_saved_packed(by: str, tmp_path: Path) -> None:
    plain = packed_pipeline(tmp_path, torch.float32)
    kind, folder = diffusers.DDPMPipeline, tmp_path / "packed"
    given = {"unet": load(diffusers.UNet2DModel, folder / "unet")} if by == "load" else {}
    pipe = kind.from_pretrained(folder, **given)
    pipe.save_pretrained(tmp_path / "again")
    again = kind.from_pretrained(tmp_path / "again")
    assert list(packed_modules(again.unet))
    assert images(again) == images(pipe) == images(plain)
    assert sum(1 for _ in packed_modules(load(diffusers.UNet2DModel, tmp_path / "again" / "unet"))) > 10


def test_without_us_diffusers_refuses(tmp_path: Path) -> None:
    packed_pipeline(tmp_path, torch.float32)
    script = (
        "import sys, diffusers\n"
        "try: diffusers.DDPMPipeline.from_pretrained(sys.argv[1])\n"
        "except ValueError as error: assert 'got tpde' in str(error), error\n"
        "else: raise AssertionError('it was loaded')"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "packed"], check=True)


def test_a_streamed_component_is_not_saved(streamed: Callable[..., Opened], tmp_path: Path) -> None:
    streamed()
    folder = packed_folder(unet(), tmp_path)
    model = load(diffusers.UNet2DModel, folder, device="cpu", vram="1GiB", activations="64MiB")
    with pytest.raises(PackedWeight, match="streams its weights"):
        model.save_pretrained(tmp_path / "again")


def test_a_packed_text_encoder_of_a_pipeline(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")
    import tpde.integrations.transformers

    config = transformers.CLIPTextConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    encoder = transformers.CLIPTextModel(config).eval()
    (tmp_path / "plain").mkdir()
    encoder.save_pretrained(tmp_path / "plain" / "text_encoder")
    (tmp_path / "plain" / "model_index.json").write_text("{}")
    pack(tmp_path / "plain", tmp_path / "packed")
    ids = torch.arange(5)[None]
    for found in (
        transformers.CLIPTextModel.from_pretrained(tmp_path / "packed" / "text_encoder"),
        tpde.integrations.transformers.from_pretrained(tmp_path / "packed" / "text_encoder"),
    ):
        assert list(packed_modules(found))
        with torch.no_grad():
            bits = [it(ids).last_hidden_state.numpy().tobytes() for it in (found, encoder)]
        assert bits[0] == bits[1]


def test_what_a_class_keeps_in_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = packed_folder(unet(), tmp_path)
    monkeypatch.setattr(diffusers.UNet2DModel, "_keep_in_fp32_modules", ["to_q", "to_k"])
    plain = diffusers.UNet2DModel.from_pretrained(tmp_path / "plain", torch_dtype=torch.bfloat16)
    packed = load(diffusers.UNet2DModel, folder)
    assert {n: it.dtype for n, it in plain_state_dict(packed).items()} == {
        n: it.dtype for n, it in plain.state_dict().items()
    }
    assert torch.float32 in {it.dtype for it in packed.parameters()}


def test_no_pass_over_all_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is not collected while a model is loaded."""
    seen, build = [], load_model.build

    def built(*args: Any) -> Any:
        seen.append(gc.isenabled())
        return build(*args)

    monkeypatch.setattr(load_model, "build", built)
    assert gc.isenabled()
    load(diffusers.UNet2DModel, packed_folder(unet(), tmp_path))
    assert (seen, gc.isenabled()) == ([False], True)


def test_another_dtype_is_decoded_and_cast(tmp_path: Path) -> None:
    plain = unet()
    model = load(diffusers.UNet2DModel, packed_folder(plain, tmp_path), dtype=torch.float32)
    assert not list(packed_modules(model))
    expected = plain.float()
    with torch.no_grad():
        found, wanted = (it(noise(1, 3, 8, 8).float(), 1).sample for it in (model, expected))
    assert found.numpy().tobytes() == wanted.numpy().tobytes()


def test_what_is_not_such_a_component(tmp_path: Path) -> None:
    folder = packed_folder(unet(), tmp_path)
    with pytest.raises(NotPacked, match="tpde pack"):
        load(diffusers.UNet2DModel, tmp_path / "plain")
    with pytest.raises(InvalidInput, match="name the folder of one component"):
        load(diffusers.UNet2DModel, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layers_per_block": 2}))
    with pytest.raises(InvalidInput, match=r"lacks `down_blocks\.0\.resnets\.1"):
        load(diffusers.UNet2DModel, folder)
    (folder / "config.json").write_text(json.dumps(config | {"in_channels": 4}))
    says = r"`conv_in\.weight` has shape \[32, 3, 3, 3\] in `.*packed`, a UNet2DModel of its `config\.json`"
    with pytest.raises(InvalidInput, match=says) as caught:
        load(diffusers.UNet2DModel, folder)
    assert (caught.value.found, caught.value.needed) == ((32, 3, 3, 3), (32, 4, 3, 3))
    assert caught.value.hint == "fetch `config.json` and the weights together"


# ---- budgets ----


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
