"""`tpde.from_pretrained`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpde.errors import InvalidInput
from tpde.integrations.device import checked_device
from tpde.integrations.transformers.folder import packed_directory, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_class_of(folder: Path) -> Any:
    """The class of transformers that `config.json` names.

    Raises
    ------
    InvalidInput
        If it names none, or one that this transformers lacks.
    """
    import transformers

    names = read_config(folder).get("architectures") or []
    found = getattr(transformers, str(names[0]), None) if names else None
    if found is None:
        lacks = f"names {names[:1]}, which transformers {transformers.__version__} lacks"
        raise InvalidInput(
            f"`{folder / 'config.json'}` {lacks if names else 'names no class'}; pass `model_class=`, "
            "such as `transformers.AutoModelForCausalLM`"
        )
    return found


def from_pretrained(
    path: str | os.PathLike[str],
    device: str | int | torch.device | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    model_class: type[Any] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Build a transformers model straight from packed files, its weights staying packed.

    Outputs are those of the plain model, bit for bit. Neither host nor device ever holds the plain weights:
    device memory is that of the packed ones and of one transformer block.

    Parameters
    ----------
    path : path-like
        A model directory that `tpde pack` or `save_pretrained` wrote, or the id of one on the Hugging Face
        hub.
    device : str, int or torch.device, optional
        Where the model goes: `cpu` (the default) or a CUDA device.
    dtype : torch.dtype or str, optional
        As of transformers' own `from_pretrained`. By default, what `config.json` says; weights that are
        stored otherwise are decoded and cast, and stay plain.
    model_class : type, optional
        Such as `transformers.AutoModelForCausalLM`. By default, the class that `config.json` names.
    **kwargs
        For the class's `from_pretrained`, such as `attn_implementation` or `device_map`.

    Returns
    -------
    transformers.PreTrainedModel
        In evaluation mode.

    Raises
    ------
    MissingDependency
        If torch or transformers 5 is missing.
    NotPacked, InvalidInput
        If it is not a packed model.
    Truncated, Corrupt, UnsupportedVersion
        If a file is damaged, or newer than this version. Chunks are checked when they are decoded first.
    OutOfMemory
        If the device has too little free memory; says how much is needed and free.
    UnsupportedDevice
        If the device is not there, or cannot decode.

    Examples
    --------
    >>> model = tpde.from_pretrained("packed", device="cuda")  # doctest: +SKIP
    >>> model.generate(**tokenizer("Hello", return_tensors="pt").to("cuda"))  # doctest: +SKIP
    """
    from tpde.integrations.transformers.quantizer import loading_to

    folder = packed_directory(path)
    kind = model_class_of(folder) if model_class is None else model_class
    if device is not None and "device_map" in kwargs:
        raise InvalidInput("`device` and `device_map` both say where the model goes; pass one of them")
    with loading_to(checked_device(device)):
        model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype or "auto", **kwargs)
    return model
