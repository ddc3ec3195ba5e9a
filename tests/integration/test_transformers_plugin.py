"""After `import tpde.integrations.transformers`, transformers loads and saves packed models by itself."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint, write
from support.models import NAMES, assert_same_bits, inputs, make, outputs, torch

import tpde
import tpde.torch
from tpde import nn as packed_nn
from tpde.errors import InvalidInput, NotPacked
from tpde.files.reader import PackedFile

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
plugin = pytest.importorskip("tpde.integrations.transformers")


def _logits(name: str, found: Any, pair: Pair) -> None:
    plain = pair.kind.from_pretrained(pair.plain)
    with torch.no_grad():
        assert_same_bits(outputs(name, found, 2), outputs(name, plain, 2), name)


def test_auto_classes(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    packed = transformers.AutoModelForCausalLM.from_pretrained(pair.packed)
    assert list(packed_nn.packed_modules(packed))
    assert packed.config.quantization_config.quant_method == "tpde"
    _logits("llama", packed, pair)


@pytest.mark.parametrize("where", ["subfolder", "hub"])
def test_a_dtype_that_nothing_names_is_found_wherever_the_model_is(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of a packed tensor, the first in the files; the plain ones have another."""
    made = make("llama")
    for it in made.modules():
        if "Norm" in type(it).__name__:
            it.float()
    pair = write(tmp_path, made)
    for folder in (pair.plain, pair.packed):
        config = json.loads((folder / "config.json").read_text())
        config.pop("dtype")
        (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"subfolder": "packed"}
    name = str(tmp_path)
    if where == "hub":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        kept, commit = tmp_path / "hub" / "models--org--model", "a" * 40
        shutil.copytree(pair.packed, kept / "snapshots" / commit)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text(commit)
        name, options = "org/model", {"cache_dir": tmp_path / "hub", "local_files_only": True}
    packed = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    assert packed.dtype is torch.bfloat16
    _logits("llama", packed, pair)
    options["dtype"] = torch.float16
    assert transformers.AutoModelForCausalLM.from_pretrained(name, **options).dtype is torch.float16


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "gpt2")
    code = (
        "import sys, tpde.integrations.transformers; from transformers import AutoModelForCausalLM as A;"
        "m = A.from_pretrained(sys.argv[1]).transformer.h[0].mlp.c_fc; print(type(m).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, pair.packed],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.stdout == "PackedConv1D\n", done.stderr
    assert "UNEXPECTED" not in done.stderr
    assert "MISSING" not in done.stderr


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, "auto"])
def test_device_map(device_map: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    if device_map == "auto" and torch.cuda.is_available():
        pytest.skip("the model would go to a GPU")
    pair = checkpoint(tmp_path, "llama")
    packed = transformers.AutoModelForCausalLM.from_pretrained(pair.packed, device_map=device_map)
    _logits("llama", packed, pair)


@pytest.mark.parametrize(
    ("device_map", "match"),
    [
        ({"model": "cpu", "lm_head": "disk"}, "`lm_head` on disk"),
        ({"model": 0, "lm_head": "cpu"}, "`lm_head` on cpu beside 0"),
        ({"model": "cpu"}, "no place for `lm_head.weight`"),
    ],
)
def test_device_maps_that_cannot_be(device_map: Any, match: str, tmp_path: Path) -> None:
    from tpde.integrations.transformers.device_maps import device_of

    with pytest.raises(InvalidInput, match=match):
        device_of("lm_head.weight", device_map)


@pytest.mark.parametrize(("layers", "gpus"), [(8, 2), (32, 2), (32, 4)])
def test_auto_divides_layers_evenly(layers: int, gpus: int) -> None:
    """Under a budget a model is spread, though the first device would hold all of it."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    from tpde.integrations.transformers.device_maps import spread

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "vocab_size": 300}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **sizes))
    limits = spread(dict.fromkeys(range(gpus), 1 << 40) | {"cpu": 1 << 40}, model, lambda *_: 2.0)
    assert set(limits) == set(range(gpus))
    found = accelerate.infer_auto_device_map(
        model, max_memory=limits, no_split_module_classes=["LlamaDecoderLayer"], dtype=torch.bfloat16
    )
    places = [found.get(f"model.layers.{i}") for i in range(layers)]
    each = [places.count(gpu) for gpu in range(gpus)]
    assert sum(each) == layers
    assert max(each) - min(each) <= 2


def test_a_map_for_auto_counts_packed_bytes(tmp_path: Path) -> None:
    """With room for the packed weights and one block, but not for the plain ones, all fits one device."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    from tpde.integrations.transformers.quantizer import TpdeHfQuantizer

    seen = {}

    class Watch(TpdeHfQuantizer):
        def _load(self) -> None:
            model = self._model
            seen.update({n: self.param_element_size(model, n, p) for n, p in model.named_parameters()})
            seen["room"] = self.adjust_max_memory({0: 1_000_000, "cpu": 7})
            super()._load()

    from transformers.quantizers import auto

    pair = checkpoint(tmp_path, "llama")
    before = auto.AUTO_QUANTIZER_MAPPING["tpde"]
    auto.AUTO_QUANTIZER_MAPPING["tpde"] = Watch
    try:
        transformers.AutoModelForCausalLM.from_pretrained(pair.packed, device_map="auto")
    finally:
        auto.AUTO_QUANTIZER_MAPPING["tpde"] = before
    assert seen["model.norm.weight"] == 2
    assert 1 < seen["model.layers.0.mlp.up_proj.weight"] < 2
    block = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    assert seen["room"] == {0: 1_000_000 - block, "cpu": 7}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shards", [None, "120KB"])
def test_saving(name: str, shards: str | None, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    packed = tpde.from_pretrained(pair.packed)
    again = tmp_path / "again"
    packed.save_pretrained(again, **({"max_shard_size": shards} if shards else {}))
    assert (len(list(again.glob("*.safetensors"))) > 1) == bool(shards)
    assert tpde.verify(again) == []
    _logits(
        name,
        transformers.AutoModel.from_pretrained(again) if name == "bert" else tpde.from_pretrained(again),
        pair,
    )
    _logits(name, packed, pair)  # as before
    # Unpacked, it is the plain model: the same names and bytes, and nothing that tells of packing.
    tpde.unpack(again, tmp_path / "restored")
    expected = tpde.torch.load_file(pair.plain / "model.safetensors")
    found = {}
    for file in (tmp_path / "restored").glob("*.safetensors"):
        with PackedFile(file) as opened:
            assert not opened.is_packed
        found.update(tpde.torch.load_file(file))
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)
    assert "quantization_config" not in json.loads((tmp_path / "restored" / "config.json").read_text())
    _logits(name, pair.kind.from_pretrained(tmp_path / "restored"), pair)


def test_saved_files_hold_the_same_blobs(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    tpde.from_pretrained(pair.packed).save_pretrained(tmp_path / "again")
    with (
        PackedFile(pair.packed / "model.safetensors") as before,
        PackedFile(tmp_path / "again" / "model.safetensors") as after,
    ):
        assert set(after.packed_names()) == set(before.packed_names())
        for name in before.packed_names():
            old, new = before.tensor(name).blob.header, after.tensor(name).blob.header
            assert old == new, name


def test_verify_names_damage_in_a_directory_saved_again(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    again = tmp_path / "again"
    tpde.from_pretrained(pair.packed).save_pretrained(again)
    path = again / "model.safetensors"
    with PackedFile(path) as file:
        entry = file.container.entries["lm_head.weight_tpde"]
        at = (
            file.container.data_start + entry.begin + file.tensor("lm_head.weight").blob.header.chunks_at + 99
        )
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    (problem,) = tpde.verify(again)
    assert (problem.tensor, problem.chunk) == ("lm_head.weight", 0)
    with pytest.raises(InvalidInput, match="no source"):
        tpde.verify(again, against=pair.plain)


def test_copies_and_pickles(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    packed = tpde.from_pretrained(pair.packed)
    _logits("mixtral", copy.deepcopy(packed), pair)
    _logits("mixtral", pickle.loads(pickle.dumps(packed)), pair)
    copy.deepcopy(packed).save_pretrained(tmp_path / "again")
    assert tpde.verify(tmp_path / "again") == []


def test_unpacking_gives_what_plain_loading_gives(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "qwen2")
    plain, packed = pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed)
    tpde.unpack_module(packed)
    found, expected = dict(packed.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)
        assert found[key].requires_grad == value.requires_grad
    assert packed.lm_head.weight is packed.model.embed_tokens.weight


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for what transformers renamed
def test_adapters_train(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    pair = checkpoint(tmp_path, "llama", torch.float32)
    losses = []
    for model in (pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed)):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        optimizer = torch.optim.SGD([it for it in adapted.parameters() if it.requires_grad], 0.1)
        took = inputs("llama", 2, 9)["input_ids"]
        for _ in range(2):
            loss = adapted(input_ids=took, labels=took).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert_same_bits(losses[2:], losses[:2])


def test_a_plain_model_is_not_packed_on_the_way(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    with pytest.raises(NotPacked, match="pack_module"):
        transformers.AutoModelForCausalLM.from_pretrained(pair.plain, quantization_config=plugin.TpdeConfig())


def test_a_generation_config_comes_along(tmp_path: Path) -> None:
    model = make("llama")
    model.generation_config.max_new_tokens = 3
    packed = tpde.from_pretrained(write(tmp_path, model).packed)
    assert packed.generation_config.max_new_tokens == 3


def test_the_loader_says_what_is_missing(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "bert")
    kind = transformers.BertForSequenceClassification
    _, expected = kind.from_pretrained(pair.plain, output_loading_info=True)
    _, found = kind.from_pretrained(pair.packed, output_loading_info=True)
    assert (
        set(found["missing_keys"])
        == set(expected["missing_keys"])
        == {"classifier.weight", "classifier.bias"}
    )
    assert not found["unexpected_keys"]
