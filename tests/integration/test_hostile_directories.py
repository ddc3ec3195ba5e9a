"""Model directories from strangers: an error of ours or the right bits, from `tpde plan` and from loading."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.budgets import every, load, simulated
from support.checkpoints import checkpoint
from support.commands import invoke
from support.hostile import Stored, constant, edit_json, tensors_of, write_tensors
from support.models import assert_same_bits, outputs, torch

import tpde
from tpde.codec import reference
from tpde.errors import InvalidInput, OutOfMemory, TpdeError
from tpde.integrations.transformers import quantizer

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

PLAN = ("--vram", "4GiB", "--copy-rate", "55", "--memory-rate", "4200")
DEEP = '{"a":' + "[" * 5000 + "]" * 5000 + "}"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
INDEX = "model.safetensors.index.json"
USAGE = 2


def _plan(folder: Path) -> Any:
    return invoke("plan", folder, *PLAN)


def _refused(folder: Path, match: str) -> None:
    """Both say what is wrong: the command without a traceback."""
    with pytest.raises(TpdeError, match=match):
        tpde.from_pretrained(folder)
    found = _plan(folder)
    assert found.exit_code not in {0, 1}, found.stdout
    assert "Traceback" not in found.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path, "llama").packed


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return checkpoint(tmp_path, "llama", max_shard_size="100KB").packed


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "null", '{"a":' + "9" * 5000 + "}", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_configurations_that_are_no_objects(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    _refused(folder, "config.json")


@pytest.mark.parametrize("text", [DEEP, "[]", "null"])
def test_settings_of_generation_that_are_no_objects(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    _refused(folder, "generation_config.json")


def test_files_that_are_none(folder: Path) -> None:
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # nobody writes to it
    _refused(folder, "regular file")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    _refused(folder, "regular file")
    (folder / "config.json").rmdir()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    _refused(folder, "weights are missing")


@pytest.mark.parametrize(
    "names", [5, True, {"a": 1}, ["__name__"], ["pipeline"], ["LlamaConfig"], ["AutoTokenizer"], [None]]
)
def test_architectures_that_are_no_models(folder: Path, names: Any) -> None:
    edit_json(folder / "config.json", architectures=names)
    _refused(folder, "which transformers .* lacks|names no class")


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "unheard"},
        {"hidden_size": "x"},
        {"num_attention_heads": 0},
        {"hidden_act": "unheard"},
        {"rope_parameters": {"rope_type": "unheard"}},
        {"vocab_size": -1},
        {"dtype": "unheard"},
    ],
)
def test_models_that_transformers_does_not_make(folder: Path, values: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **values)
    found = [_plan(folder)]
    if "model_type" not in values:  # else the class that it names is made all the same
        _refused(folder, "transformers makes no model of")
        found += [invoke("run", folder, task, "a") for task in ("--prompt", "--embed")]
    for it in found:
        assert it.exit_code == USAGE
        assert "transformers makes no model of" in it.stderr
        assert "Traceback" not in it.stderr


@pytest.mark.parametrize("version", ["1", True, None, 1.0, 0, -1])
def test_versions_that_are_no_numbers(folder: Path, version: Any) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "tpde", "version": version})
    _refused(folder, "`version` in the `quantization_config` is .*, which is no number from 1 on")
    assert "which is no number from 1 on" in _plan(folder).stderr


@pytest.mark.parametrize(
    "name", [5, None, "a\0b", "\ud800", "a" * 300, "config.json/x", "../../../etc/passwd"]
)
def test_shards_that_can_be_no_files(sharded: Path, name: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (sharded / INDEX).write_text(json.dumps(index))
    _refused(sharded, "index of shards|weights are missing|safetensors")


@pytest.mark.parametrize(
    "values", [{"weight_map": {}}, {"weight_map": []}, {"metadata": None}, {"metadata": 5}]
)
def test_indexes_of_nothing(sharded: Path, values: dict[str, Any]) -> None:
    edit_json(sharded / INDEX, **values)
    _refused(sharded, "no.* index of shards")


@pytest.mark.parametrize("name", ["x." + "9" * 5000, "x.\u00b2.weight", "x.a" + "9" * 5000])
@pytest.mark.parametrize("packed", [True, False])
def test_names_that_cannot_be_sorted(folder: Path, name: str, packed: bool) -> None:
    tensors = tensors_of(folder)
    tensors[name] = tensors[QUERY] if packed else tensors[QUERY].plain()
    write_tensors(folder, tensors)
    _refused(folder, "cannot sort")


def _twice(tensors: dict[str, Stored]) -> None:
    tensors[QUERY.removeprefix("model.")] = tensors[QUERY]


def _missing(tensors: dict[str, Stored]) -> None:
    tensors.pop(EXPERT)


def _transposed(tensors: dict[str, Stored]) -> None:
    it = tensors[EXPERT]
    shape = it.shape[::-1]
    tensors[EXPERT] = it._replace(shape=shape, data=reference.encode_blob(it.plain().data, it.dtype, shape))


def _halves_of_bytes(tensors: dict[str, Stored]) -> None:
    data = tensors[QUERY].plain().data[:2048]
    tensors[QUERY] = Stored(True, "F4", (64, 64), reference.encode_blob(data, "F4", (64, 64)))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama", _twice, "cannot become"),
        ("mixtral", _missing, "cannot become"),
        ("mixtral", _transposed, "cannot become"),
        pytest.param(
            "llama",
            _halves_of_bytes,
            r"has shape \[64, 32\] in the packed files",
            marks=pytest.mark.skipif(
                not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no dtype for F4"
            ),
        ),
    ],
)
def test_tensors_that_become_no_weight(
    name: str, change: Callable[[dict[str, Stored]], None], said: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, name).packed
    tensors = tensors_of(folder)
    change(tensors)
    write_tensors(folder, tensors)
    with pytest.raises(InvalidInput, match=said):
        tpde.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "other", "like"),
    [
        ("qwen2", "lm_head.weight", "model.embed_tokens.weight"),
        ("t5", "encoder.embed_tokens.weight", "shared.weight"),
    ],
)
def test_tied_weights_of_which_one_is_plain(name: str, other: str, like: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    tensors = tensors_of(pair.packed)
    tensors[other] = tensors[like].plain()
    write_tensors(pair.packed, tensors)
    with torch.no_grad():
        expected = outputs(name, pair.kind.from_pretrained(pair.plain), 1)
        assert_same_bits(outputs(name, tpde.from_pretrained(pair.packed), 1), expected)
        with pytest.MonkeyPatch.context() as patched, simulated(patched, every("host")):
            assert_same_bits(outputs(name, load(pair.packed), 1), expected)


def test_shapes_are_compared_before_anything_is_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm of 2^40 weights takes 200 bytes in the file."""
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = constant((1 << 40,))
    write_tensors(folder, tensors)
    monkeypatch.setattr(quantizer, "load_plain", lambda *_: pytest.fail("it is decoded"))
    _refused(folder, r"has shape \[1099511627776\] in the packed files")


def test_more_than_the_host_has(folder: Path) -> None:
    """Here the configuration agrees."""
    tensors = tensors_of(folder)
    rows = 1 << 45
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), constant((rows, 64)))
    write_tensors(folder, tensors)
    edit_json(folder / "config.json", vocab_size=rows)
    with pytest.raises(OutOfMemory, match="the system refused"):  # to make room for the head
        tpde.from_pretrained(folder)


def test_names_steer_no_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = tensors_of(folder)
    tensors["x\nall is well\x1b[2J"] = tensors[QUERY]
    write_tensors(folder, tensors)
    with caplog.at_level(logging.INFO, "tpde"):
        tpde.from_pretrained(folder)
    (line,) = [it.getMessage() for it in caplog.records if "have no place" in it.getMessage()]
    assert r"`x\nall is well\x1b[2J`" in line


def test_names_write_no_lines_of_verify(folder: Path) -> None:
    tensors = tensors_of(folder)
    it = tensors[QUERY]
    tensors["x\nintact, 0.01 s"] = it._replace(data=it.data[:-200] + bytes(200))
    write_tensors(folder, tensors)
    found = invoke("verify", folder / "model.safetensors")
    assert found.exit_code
    assert "\nintact" not in found.stdout
    assert r"x\nintact, 0.01 s" in found.stdout
