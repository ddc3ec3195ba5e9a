"""What callers may say of plain directories that are loaded packed, and what such directories may hold."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint
from support.models import assert_same_bits, make, outputs, torch

import tpde
from tpde.errors import InvalidInput, NotPacked, NotSafetensors
from tpde.nn import packed_modules

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def assert_as_plain(model: Any, plain: Any) -> None:
    """Some of a model is packed, and all of it has the bits of a plain one."""
    assert next(packed_modules(model), None) is not None
    tpde.unpack_module(model)
    found, expected = model.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)


def with_config(plain: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a directory whose configuration is changed."""
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_weights(plain: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a directory whose weights are changed."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(plain, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---- options ----


@pytest.mark.parametrize("auto", [False, True])
def test_what_else_a_configuration_takes(auto: bool, tmp_path: Path) -> None:
    """As keywords of transformers' own `from_pretrained`: for the configuration, not the model's class."""
    pair = checkpoint(tmp_path, "bert")
    name = "ForSequenceClassification"
    kind = getattr(transformers, f"AutoModel{name}" if auto else f"Bert{name}")
    torch.manual_seed(1)
    plain = kind.from_pretrained(pair.plain, num_labels=5, hidden_dropout_prob=0.3)
    torch.manual_seed(1)
    model = tpde.from_pretrained(
        pair.plain, pack=True, model_class=kind, num_labels=5, hidden_dropout_prob=0.3
    )
    assert (model.num_labels, model.config.hidden_dropout_prob) == (5, 0.3)
    assert_as_plain(model, plain)


def test_no_configuration_is_none(llama: Pair) -> None:
    model = tpde.from_pretrained(llama.plain, pack=True, config=None)
    assert_as_plain(model, llama.kind.from_pretrained(llama.plain))


def test_a_class_knows_its_configuration(llama: Pair, tmp_path: Path) -> None:
    """Old models name no type."""
    folder = with_config(llama.plain, tmp_path / "old", lambda config: config.pop("model_type"))
    model = tpde.from_pretrained(folder, pack=True, model_class=llama.kind)
    assert_as_plain(model, llama.kind.from_pretrained(folder))


@pytest.mark.parametrize("said", [None, {"quant_method": "tpde", "version": 1}])
def test_a_configuration_that_is_passed(said: Any, llama: Pair) -> None:
    config = transformers.AutoConfig.from_pretrained(llama.plain)
    config.num_hidden_layers = 2
    if said is not None:  # of the packed directory
        config.quantization_config = said
    model = tpde.from_pretrained(llama.plain, pack=True, config=config)
    assert getattr(config, "quantization_config", None) == said
    plain = llama.kind.from_pretrained(llama.plain, num_hidden_layers=2)
    assert_as_plain(model, plain)


def test_quantization_that_is_asked_for(llama: Pair) -> None:
    with pytest.raises(InvalidInput, match="`quantization_config` has weights quantized"):
        tpde.from_pretrained(
            llama.plain, pack=True, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)
        )


def test_the_dtype_by_its_old_name(llama: Pair) -> None:
    model = tpde.from_pretrained(llama.plain, pack=True, torch_dtype=torch.float32)
    assert {it.dtype for it in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("pack", [False, True])
def test_a_folder_in_a_directory(pack: bool, llama: Pair, tmp_path: Path) -> None:
    shutil.copytree(llama.plain if pack else llama.packed, tmp_path / "inner")
    model = tpde.from_pretrained(tmp_path, pack=pack, subfolder="inner")
    assert_as_plain(model, llama.kind.from_pretrained(llama.plain))
    with pytest.raises(InvalidInput, match="other` does not exist"):
        tpde.from_pretrained(tmp_path, pack=pack, subfolder="other")


def test_a_variant_whose_dtype_nothing_names(llama: Pair, tmp_path: Path) -> None:
    folder = with_config(llama.plain, tmp_path / "it", lambda config: config.pop("dtype"))
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    model = tpde.from_pretrained(folder, pack=True, variant="fp16")
    assert_as_plain(model, llama.kind.from_pretrained(llama.plain))


@pytest.mark.parametrize("pack", [False, True])
def test_a_revision_on_the_hub(pack: bool, llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[Any] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(llama.plain if pack else llama.packed)

    monkeypatch.setattr(hub, "snapshot_download", download)
    options = {"revision": "abc", "cache_dir": "there", "local_files_only": True, "token": "t"}
    model = tpde.from_pretrained("org/model", pack=pack, **options)
    tpde.from_pretrained("org/model", pack=pack, revision=None)
    assert asked == [("org/model", options), ("org/model", {})]
    assert_as_plain(model, llama.kind.from_pretrained(llama.plain))


# ---- what directories hold ----


@pytest.mark.parametrize("where", ["quantization_config", "text_config"])
def test_models_that_are_quantized(where: str, llama: Pair, tmp_path: Path) -> None:
    said: dict[str, Any] = {"quant_method": "fp8"}
    if where == "text_config":
        said = {"quantization_config": said}
    folder = with_config(llama.plain, tmp_path / "it", lambda config: config.update({where: said}))
    with pytest.raises(InvalidInput, match="is quantized with `fp8`"):
        tpde.from_pretrained(folder, pack=True)


def test_directories_some_of_which_is_packed(tmp_path: Path) -> None:
    """What is packed in the files stays so, as without `pack`; the rest is plain."""
    plain = make("mamba")
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    tpde.pack(files[0], tmp_path / "x")
    (tmp_path / "x").rename(files[0])
    model = tpde.from_pretrained(tmp_path, pack=True)
    assert 0 < sum(1 for _ in packed_modules(model)) < len(files)
    assert_as_plain(model, plain)


@pytest.mark.parametrize("pack", [False, True])
def test_weights_in_pickles(pack: bool, llama: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(llama.plain, folder)
    (folder / "model.safetensors").unlink()
    torch.save(make("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(InvalidInput) as caught:
        tpde.from_pretrained(folder, pack=pack)
    assert isinstance(caught.value, NotPacked) != pack
    if pack:
        assert "has its weights in pickles (`pytorch_model.bin`)" in str(caught.value)
    assert f"tpde pack {folder} old-packed" in str(caught.value.hint)


def test_what_is_no_safetensors_file(llama: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(llama.plain, folder)
    (folder / "model.safetensors").write_bytes(b"<html>" * 40)
    with pytest.raises(NotSafetensors, match="is not a safetensors file") as caught:
        tpde.from_pretrained(folder, pack=True)
    assert caught.value.hint == "fetch it again"


def test_shapes_that_differ_are_transformers_to_refuse(llama: Pair, tmp_path: Path) -> None:
    def cut(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"][:100].clone()

    folder = with_weights(llama.plain, tmp_path / "it", cut)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        tpde.from_pretrained(folder, pack=True)
    torch.manual_seed(1)
    plain = llama.kind.from_pretrained(folder, ignore_mismatched_sizes=True)
    torch.manual_seed(1)
    model = tpde.from_pretrained(folder, pack=True, ignore_mismatched_sizes=True)
    with torch.no_grad():
        assert_same_bits(outputs("llama", model, 1), outputs("llama", copy.deepcopy(plain), 1))
    assert_as_plain(model, plain)
