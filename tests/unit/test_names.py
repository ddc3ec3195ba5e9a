"""What files of a model directory are by their names."""

from __future__ import annotations

import pytest

from tpde.files.file_kinds import folder_of, is_config, last_of, may_change, may_stay_link, safetensors_name


@pytest.mark.parametrize(
    ("name", "folder", "last"), [("a", "", "a"), ("a/b", "a", "b"), ("a/b/c", "a/b", "c"), ("", "", "")]
)
def test_parts_of_names(name: str, folder: str, last: str) -> None:
    assert (folder_of(name), last_of(name)) == (folder, last)


@pytest.mark.parametrize(
    ("name", "config", "changes"),
    [
        ("config.json", True, True),
        ("a/b/config.json", True, True),
        ("model.safetensors.index.json", False, True),
        ("a/model.safetensors.index.fp16.json", False, True),
        ("generation_config.json", False, False),
        ("config.json/x", False, False),
        ("tokenizer.json", False, False),
        ("pytorch_model.bin.index.json", False, False),
    ],
)
def test_files_that_packing_may_change(name: str, config: bool, changes: bool) -> None:
    assert (is_config(name), may_change(name)) == (config, changes)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("a/b/pytorch_model.bin", "a/b/model.safetensors"),
        ("pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"),
        ("pytorch_model.fp16.bin", "model.fp16.safetensors"),
        ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"),
        ("diffusion_pytorch_model.non_ema.bin", "diffusion_pytorch_model.non_ema.safetensors"),
        ("pytorch_model.bin.index.json", "model.safetensors.index.json"),
        ("x/pytorch_model.bin.index.fp16.json", "x/model.safetensors.index.fp16.json"),
        ("diffusion_pytorch_model.bin.index.json", "diffusion_pytorch_model.safetensors.index.json"),
        ("pytorch_model.bin.bin", "model.bin.safetensors"),
        ("pytorch_model", None),
        ("pytorch_model.bin.part", None),
        ("pytorch_modelx.bin", None),
        ("my_pytorch_model.bin", None),
        ("pytorch_model/x.bin", None),
        ("training_args.bin", None),
        ("optimizer.bin", None),
        ("pytorch_model.pt", None),
        ("pytorch_model.bin.index.a.b.json", None),
        ("pytorch_model-1.bin.index.json", None),
        ("model.safetensors", None),
        ("model.safetensors.index.json", None),
    ],
)
def test_names_that_pickles_get(name: str, made: str | None) -> None:
    assert safetensors_name(name) == made


@pytest.mark.parametrize(
    ("link", "target", "stays"),
    [
        ("a", "b", True),
        ("a.safetensors", "x/b.safetensors", True),
        ("a.safetensors", "blob", False),
        ("blob", "a.safetensors", True),
        ("x/config.json", "config.json", True),
        ("config.json", "other.json", False),
        ("other.json", "config.json", True),
        ("a.safetensors.index.json", "b.safetensors.index.json", True),
        ("a.safetensors.index.json", "b.json", False),
        ("b.json", "a.safetensors.index.json", True),
        ("pytorch_model.bin", "b", False),
        ("a", "pytorch_model.bin", False),
        ("pytorch_model.bin", "x/pytorch_model.bin", False),
    ],
)
def test_links_that_go_on_leading_to_what_their_names_ask_for(link: str, target: str, stays: bool) -> None:
    assert may_stay_link(link, target) is stays
