"""What is saved of packed models of transformers, and how their directories are told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from transformers.core_model_loading import ConversionOps, WeightConverter  # noqa: E402

import tpde  # noqa: E402
from tpde.errors import InvalidInput, NotPacked, Truncated  # noqa: E402
from tpde.integrations.transformers.folder import model_directory, require_files  # noqa: E402
from tpde.integrations.transformers.save import state_to_save  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, **options)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def test_blobs_are_saved_under_the_names_of_their_weights() -> None:
    model = llama()
    plain = dict(model.state_dict())
    tpde.pack_module(model, min_bytes=0)
    found = state_to_save(model, [])
    assert {name.removesuffix("_tpde") for name in found} == set(plain)
    assert {name for name in plain if f"{name}_tpde" in found} == {
        n for n, it in plain.items() if it.dim() == 2
    }
    assert found[f"{HEAD}_tpde"].dtype is torch.uint8
    assert torch.equal(found["model.norm.weight"], plain["model.norm.weight"])


@pytest.mark.parametrize(("ties", "kept"), [({HEAD: EMBED}, EMBED), ({EMBED: HEAD}, HEAD)])
def test_of_tied_weights_the_one_is_saved_that_others_are_tied_to(ties: dict[str, str], kept: str) -> None:
    """Whichever comes first in the model."""
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tpde.pack_module(model, min_bytes=0)
    model.all_tied_weights_keys = ties
    found = state_to_save(model, [])
    other = HEAD if kept == EMBED else EMBED
    assert f"{kept}_tpde" in found
    assert not {other, f"{other}_tpde", kept} & set(found)


class Made(ConversionOps):  # type: ignore[misc]
    """Loading makes one weight of others; saving makes those of it, by a function."""

    def __init__(self, made: Callable[[Any], dict[str, Any]]) -> None:
        self._made = made

    def convert(self, given: dict[str, list[Any]], *_: Any, **__: Any) -> dict[str, Any]:
        (only,) = given.values()
        return self._made(only[0])

    @property
    def reverse_op(self) -> Made:
        return self


def converted(made: Callable[[Any], dict[str, Any]], *names: str) -> list[Any]:
    """Conversions of the head into weights of these names."""
    return [WeightConverter(list(names), HEAD, operations=[Made(made)])]


def decoded(found: dict[str, Any], name: str) -> Any:
    return tpde.nn.PackedTensor(tpde.nn.Resident(found[f"{name}_tpde"], name)).decoded()


def test_a_cut_weight_that_would_not_shrink_is_saved_plain() -> None:
    model = llama()
    weight = model.lm_head.weight.detach().clone()
    tpde.pack_module(model, min_bytes=0)

    def cut(run: Any) -> dict[str, Any]:
        top, bottom = torch.split(run, [5, 123])  # of which the first has few bytes
        return {"top": top, "bottom": bottom, "flat": run.unsqueeze(0)}

    found = state_to_save(model, converted(cut, "top", "bottom", "flat"))
    assert torch.equal(found["top"], weight[:5])
    assert not {HEAD, f"{HEAD}_tpde", "top_tpde"} & set(found)
    for name, expected in (("bottom", weight[5:]), ("flat", weight[None])):
        made = decoded(found, name)
        assert made.shape == expected.shape
        assert torch.equal(made, expected)


def test_a_conversion_that_cuts_through_blobs_is_done_on_plain_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of what it takes, and no more; what comes out is packed again."""
    model = llama()
    weights = {name: it.detach().clone() for name, it in model.state_dict().items()}
    tpde.pack_module(model, min_bytes=0)
    blob = model.model.embed_tokens.weight.packed.sources[0].blob

    def turn(head: Any) -> dict[str, Any]:
        return {"turned": head.T, "tiny": head[:1, :3].clone(), "other": 5}

    found = state_to_save(model, converted(turn, "turned", "tiny", "other"))
    assert "a conversion cuts through blobs" in caplog.text
    assert torch.equal(found["model.norm.weight"], weights["model.norm.weight"])
    assert not {HEAD, f"{HEAD}_tpde"} & set(found)
    assert torch.equal(decoded(found, "turned"), weights[HEAD].T)
    assert torch.equal(found["tiny"], weights[HEAD][:1, :3])
    assert found["other"] == 5
    assert found[f"{EMBED}_tpde"].data_ptr() == blob.data_ptr(), "which nothing cuts"


# ---- directories ----


@pytest.mark.parametrize(
    "quantization", [None, {}, {"quant_method": "fp8"}, "tpde", ["quant_method"], {"quant_method": None}]
)
def test_a_directory_that_is_not_packed(quantization: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(NotPacked, match="does not name `tpde`"):
        model_directory(folder, pack=False)
    if quantization is None:
        assert model_directory(folder, pack=True) == (folder, None)
    else:
        with pytest.raises(InvalidInput, match="is quantized with `"):
            model_directory(folder, pack=True)
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "tpde"}}')
    for pack in (False, True):
        assert model_directory(folder, pack=pack) == (folder, {"quant_method": "tpde"})


def test_files_that_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"model\.safetensors` does not exist") as caught:
        require_files(tmp_path)
    assert caught.value.where == str(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(InvalidInput, match=r"model\.safetensors` is no file"):
        require_files(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "model.safetensors").touch()
    require_files(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(InvalidInput, match="generation_config"):
        require_files(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a packed directory."""
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "plain")
    tpde.pack(folder / "plain", folder / "packed")
    return folder


def with_config(folder: Path, made: Path, **changes: Any) -> Path:
    """Give a copy of a directory whose configuration says something else, or no longer."""
    shutil.copytree(made, folder)
    config = json.loads((folder / "config.json").read_text())
    config = {key: it for key, it in (config | changes).items() if it is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_that_cannot_be_made(made: Path, tmp_path: Path) -> None:
    """Errors of ours are told as they are, those of transformers as one of the configuration."""
    short = with_config(tmp_path / "short", made / "packed", dtype=None)
    os.truncate(short / "model.safetensors", 5000)
    with pytest.raises(Truncated), opened_shape(short):
        pass
    odd = with_config(tmp_path / "odd", made / "packed", hidden_act="curly")
    with pytest.raises(InvalidInput, match=r"makes no model of .*\(KeyError: .*curly"), opened_shape(odd):
        pass


@pytest.mark.parametrize(("named", "used"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_the_dtype_of_a_shape(named: str | None, used: Any, made: Path, tmp_path: Path) -> None:
    folder = with_config(tmp_path / "it", made / "packed", dtype=named)
    with opened_shape(folder) as (model, _, _):
        assert {it.dtype for it in model.parameters()} == {used}
        assert {it.device.type for it in model.parameters()} == {"meta"}
