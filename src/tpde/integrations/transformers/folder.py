"""Packed model directories: telling whether one is, and what it holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from tpde.errors import InvalidInput, NotPacked
from tpde.frameworks import torch_dtype
from tpde.integrations.checkpoint import Checkpoint
from tpde.integrations.transformers.config import METHOD
from tpde.packing.directory import INDEX_SUFFIX
from tpde.packing.sources import resolve

INDEX = "model" + INDEX_SUFFIX


def packed_directory(path: str | os.PathLike[str]) -> Path:
    """Find a packed model directory.

    Parameters
    ----------
    path : path-like
        The directory, or the id of a model on the Hugging Face hub.

    Raises
    ------
    InvalidInput
        If there is none, or it is no model.
    NotPacked
        If it is not packed.
    """
    folder = resolve(path)
    if not folder.is_dir():
        raise InvalidInput(f"`{folder}` is a file; name the model directory that holds its `config.json`")
    config = read_config(folder)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise NotPacked(
            f"`{folder}` is not packed: its `config.json` does not name `{METHOD}`; pack it with `tpde pack "
            f"{folder} {folder.name}-packed`, and name that"
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model directory.

    Raises
    ------
    InvalidInput
        If there is none, or it cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"`{folder}` has no `config.json`, so it is no model; check the path") from None
    except ValueError as error:
        raise InvalidInput(f"`{path}` is not JSON ({error}); mend it, or fetch it again") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"`{path}` holds no JSON object; mend it, or fetch it again")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers would load."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise InvalidInput(f"`{index}` is not an index of shards: no `weight_map`") from None
        return [folder / str(name) for name in sorted(names)]
    return [folder / "model.safetensors"]


def require_weights(folder: Path) -> None:
    """Make sure that the weight files are there.

    Raises
    ------
    InvalidInput
        Naming the first that is not.
    """
    for file in weight_files(folder):
        if not file.exists():
            raise InvalidInput(f"`{file}` does not exist, so that weights are missing; fetch it again")


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of a model whose `config.json` names none: that of its first floating-point tensor."""
    with Checkpoint(weight_files(folder)[:1]) as checkpoint:
        specs = {name: it.spec for name, it in checkpoint.packed.items()} | checkpoint.plain
        for name in sorted(specs):
            dtype = torch_dtype(specs[name].dtype)
            if dtype.is_floating_point:
                return dtype
    return torch.get_default_dtype()
