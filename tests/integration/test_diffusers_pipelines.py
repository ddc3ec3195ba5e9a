"""Pipelines of diffusers with packed components: the bits of the plain ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.diffusion import diffusers, noise, torch, unet

from tpde import pack, unpack, verify
from tpde.integrations.diffusers import load
from tpde.nn import packed_modules, plain_state_dict

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


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
