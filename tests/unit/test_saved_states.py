"""What is saved of packed models of transformers, and how their directories are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

import tpde  # noqa: E402
from tpde.errors import InvalidInput, NotPacked, TpdeError, Truncated  # noqa: E402
from tpde.integrations import runs  # noqa: E402
from tpde.integrations.runs import NotARun  # noqa: E402
from tpde.integrations.transformers import save, shape  # noqa: E402
from tpde.integrations.transformers.folder import model_directory, require_files  # noqa: E402
from tpde.integrations.transformers.save import state_to_save  # noqa: E402

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


def test_a_cut_weight_that_would_not_shrink_is_saved_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    weight = model.lm_head.weight.detach().clone()
    tpde.pack_module(model, min_bytes=0)

    def revert(model: Any, state: dict[str, Any], conversions: Any) -> dict[str, Any]:
        run = state.pop(HEAD)
        top, bottom = torch.split(run, [100, 28])
        return state | {"top": top, "bottom": bottom, "flat": run.unsqueeze(0)}

    monkeypatch.setattr(save, "revert", revert)
    pack = save.pack_tensor
    monkeypatch.setattr(save, "pack_tensor", lambda plain, name: None if name == "top" else pack(plain, name))
    found = state_to_save(model, [])
    assert torch.equal(found["top"], weight[:100])
    assert HEAD not in found
    for name, expected in (("bottom", weight[100:]), ("flat", weight[None])):
        made = tpde.nn.PackedTensor(tpde.nn.Resident(found[f"{name}_tpde"], name)).decoded()
        assert made.shape == expected.shape
        assert torch.equal(made, expected)


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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Truncated("it ends early"), Truncated),
        (KeyError("layers"), InvalidInput),
        (NotPacked("x"), NotPacked),
    ],
)
def test_a_model_that_cannot_be_made(
    error: Exception, told: type[TpdeError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of ours are told as they are, those of transformers as one of the configuration."""

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(shape, "model_class_of", lambda _: None)
    monkeypatch.setattr(shape, "require_files", lambda _: None)
    monkeypatch.setattr(shape, "on_meta", fail)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    with pytest.raises(told) as caught, shape.opened_shape(tmp_path):
        pass
    assert (caught.value is error) == (told is not InvalidInput)
    if told is InvalidInput:
        assert "(KeyError: 'layers')" in str(caught.value)


@pytest.mark.parametrize(("named", "used"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_the_dtype_of_a_shape(
    named: str | None, used: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def made(kind: Any, config: Any, dtype: Any) -> Any:
        seen.append(dtype)
        raise NotPacked("no further")

    monkeypatch.setattr(shape, "model_class_of", lambda _: None)
    monkeypatch.setattr(shape, "require_files", lambda _: None)
    monkeypatch.setattr(shape, "stored_dtype", lambda _: torch.bfloat16)
    monkeypatch.setattr(shape, "on_meta", made)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama"} | ({"dtype": named} if named else {}))
    )
    with pytest.raises(NotPacked, match="no further"), shape.opened_shape(tmp_path):
        pass
    assert seen == [used]


def test_a_conversion_that_cuts_through_blobs_is_done_on_plain_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what it takes, and no more; what comes out is packed again."""
    model = llama()
    weights = {name: it.detach().clone() for name, it in model.state_dict().items()}
    tpde.pack_module(model, min_bytes=0)
    norm, used = "model.norm.weight", [object()]

    def revert(model: Any, state: dict[str, Any], conversions: Any) -> dict[str, Any]:
        assert conversions is used
        if not isinstance(state[HEAD], torch.Tensor):
            raise NotARun
        assert not isinstance(state[EMBED], torch.Tensor), "which nothing cuts"
        head = state.pop(HEAD)
        return state | {"turned": head.T, "tiny": head[:1, :3].clone(), "other": 5}

    monkeypatch.setattr(save, "revert", revert)
    monkeypatch.setattr(save, "_is_converted", lambda name, given: given is used and name in (HEAD, norm))
    made = save._revert(model, save._with_runs(model), used)  # type: ignore[arg-type]
    assert "a conversion cuts through blobs" in caplog.text
    assert torch.equal(made[norm], weights[norm])
    assert HEAD not in made
    (turned,) = runs.decoded([made["turned"]], torch.device("cpu"), lambda source: source)
    assert torch.equal(turned, weights[HEAD].T)
    assert torch.equal(made["tiny"], weights[HEAD][:1, :3])
    assert made["other"] == 5
