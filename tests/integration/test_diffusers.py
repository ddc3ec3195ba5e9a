"""Models of diffusers from packed files: the bits of the plain ones."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from support.diffusion import diffusers, noise, packed_folder, same_bits, torch, transformer, unet

from tpde.errors import InvalidInput, NotPacked
from tpde.integrations.diffusers import load, load_model
from tpde.nn import packed_modules, plain_state_dict, set_kernels

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


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


def test_what_is_loaded_in_inference_mode_is_ordinary(tmp_path: Path) -> None:
    path = packed_folder(unet(), tmp_path)
    with torch.inference_mode():
        model = load(diffusers.UNet2DModel, path)
    assert not any(it.is_inference() for it in model.parameters())


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
