"""Packed model directories: telling whether one is, and what it holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tpde.errors import InvalidInput, MissingShard, printable
from tpde.files.documents import json_object
from tpde.files.inputs import resolve
from tpde.files.shards import read_index
from tpde.files.weight_files import not_packed
from tpde.format.constants import METHOD, VERSION
from tpde.frameworks import torch_dtype
from tpde.loading.checkpoint_files import Checkpoint
from tpde.loading.quantized import PackedConfig

INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin", "pytorch_model.bin.index.json"


def model_directory(
    path: str | os.PathLike[str], *, pack: bool, instead: str = "", subfolder: str = "", **hub: Any
) -> tuple[Path, dict[str, Any] | None]:
    """Find a model directory, and what its `config.json` says of its packed weights.

    Parameters
    ----------
    path : path-like
        The directory, or the id of a model on the Hugging Face hub.
    pack : bool
        It may be plain.
    instead : str
        What else than to pack it can be done with one that is plain, for the hint.
    subfolder : str
        Where in it the model is.
    **hub
        How it is downloaded: see `tpde.files.inputs.resolve`.

    Returns
    -------
    Path, dict or None
        None if it is plain.

    Raises
    ------
    InvalidInput
        If there is none, or it is no model, or one that is or was quantized or whose weights are in pickles.
    NotPacked
        If it is not packed.
    UnsupportedVersion
        If it was packed by a newer tpde.
    """
    folder = resolve(path, **hub) / subfolder
    if not folder.is_dir():
        raise InvalidInput(
            f"`{folder}` {'is a file' if folder.exists() else 'does not exist'}",
            hint="name the model directory that holds its `config.json`",
            where=str(folder),
        )
    said = _quantization(read_config(folder))
    if isinstance(said, dict) and said.get("quant_method") == METHOD:
        PackedConfig(said.get("version", VERSION), said.get("source"))  # raises where it cannot be loaded
        return folder, said
    if not pack:
        raise not_packed(
            folder,
            f"`{folder}` is not packed: its `config.json` does not name `{METHOD}`",
            hint=f"pack it with `tpde pack {folder} {folder.name}-packed`, and name that{instead}",
        )
    if said is not None:
        method = said.get("quant_method") if isinstance(said, dict) else said
        raise InvalidInput(
            f"`{folder}` is quantized with `{method}`: its weights are not packed as they come",
            hint="load it with transformers, or name the model that it was made from",
            where=str(folder),
        )
    pickles = [name for name in PICKLED if (folder / name).exists()]
    if pickles and next(folder.glob("*.safetensors"), None) is None:
        raise InvalidInput(
            f"`{folder}` has its weights in pickles (`{pickles[0]}`), which cannot be loaded packed",
            hint=f"run `tpde pack {folder} {folder.name}-packed`, and name that",
            where=str(folder / pickles[0]),
        )
    return folder, None


def _quantization(config: dict[str, Any]) -> Any:
    """What a configuration, or that of its text model, says of quantized weights: transformers reads both."""
    said, text = config.get("quantization_config"), config.get("text_config")
    return text.get("quantization_config") if said is None and isinstance(text, dict) else said


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model directory.

    Raises
    ------
    InvalidInput
        If there is none, or it cannot be read.
    """
    path = folder / "config.json"
    if not path.exists():
        hint = "check the path"
        if (folder / "model_index.json").exists():
            hint = (
                "it is a pipeline of diffusers: load it with `DiffusionPipeline.from_pretrained`, after "
                "`tpde.register()`"
            )
        raise InvalidInput(f"`{folder}` has no `config.json`, so it is no model", hint=hint, where=str(path))
    return json_object(path)[1]


def weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers would load: a whole one comes first, whatever an index says."""
    path, whole = folder / INDEX, folder / "model.safetensors"
    if path.exists() and not os.path.isfile(whole):  # `Path.is_file` raises for what can be no file's name
        index = read_index(path)
        if "metadata" not in index.rest:  # which transformers takes for granted
            raise InvalidInput(
                f"`{path}` is not an index of shards as transformers reads them: it has no `metadata`",
                hint="add an empty object, or fetch it again",
            )
        return index.files()
    return [whole]


def require_files(folder: Path) -> None:
    """Make sure that the weight files are there, and that what else transformers reads is JSON.

    Raises
    ------
    MissingShard, InvalidInput
        Naming the first file that is not.
    """
    generation = folder / "generation_config.json"
    if generation.exists():
        json_object(generation)
    for file in weight_files(folder):
        if not os.path.isfile(file):
            what = "is no file" if os.path.exists(file) else "does not exist"
            raise MissingShard(
                f"`{printable(file)}` {what}, so that weights are missing",
                hint="fetch it again",
                where=str(file),
            )


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of a model whose `config.json` names none: that of its first floating-point tensor.

    Those of 8 bits are passed over, as transformers does: no model computes in one.
    """
    return dtype_of_files(weight_files(folder)[:1])


def dtype_of_files(paths: Iterable[str | os.PathLike[str]]) -> torch.dtype:
    """The dtype of the first floating-point tensor of weight files, packed or plain: see `stored_dtype`."""
    with Checkpoint(paths) as checkpoint:
        specs = {name: it.spec for name, it in checkpoint.packed.items()} | checkpoint.plain
        for name in sorted(specs):
            dtype = torch_dtype(specs[name].dtype)
            if dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
    return torch.get_default_dtype()
