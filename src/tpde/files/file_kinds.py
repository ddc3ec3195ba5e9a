"""What files of a model directory are, by their names."""

from __future__ import annotations

import re

from tpde.files.shards import is_index

SAFETENSORS = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# `pytorch_model.bin`, `pytorch_model-00001-of-00002.bin`, `diffusion_pytorch_model.fp16.bin`, and indexes.
_PICKLE = re.compile(r"(pytorch_model|diffusion_pytorch_model)([-.][^/]+)?\.bin", re.ASCII)
_PICKLE_INDEX = re.compile(r"(pytorch_model|diffusion_pytorch_model)\.bin\.index(\.[^./]+)?\.json", re.ASCII)


def folder_of(name: str) -> str:
    """The folder that a file is in; empty for that of the directory itself."""
    return name.rpartition("/")[0]


def last_of(name: str) -> str:
    """The last part of a name."""
    return name.rpartition("/")[2]


def is_config(name: str) -> bool:
    """Whether a file is a configuration, which may say that weights are packed."""
    return last_of(name) == "config.json"


def may_change(name: str) -> bool:
    """Whether packing may change a file otherwise than by packing its tensors: configurations and indexes."""
    return is_config(name) or is_index(name)


def safetensors_name(name: str) -> str | None:
    """The name that weights in a pickle, or their index, get as safetensors; None for other files.

    Examples
    --------
    >>> safetensors_name("pytorch_model-00001-of-00002.bin")
    'model-00001-of-00002.safetensors'
    >>> safetensors_name("unet/diffusion_pytorch_model.bin")
    'unet/diffusion_pytorch_model.safetensors'
    """
    folder, last = folder_of(name), last_of(name)
    if not (_PICKLE.fullmatch(last) or _PICKLE_INDEX.fullmatch(last)):
        return None
    stem = last.removeprefix("pytorch_")  # in transformers' names; diffusers' keep theirs
    made = re.sub(r"\.bin(?=\.index|$)", SAFETENSORS, stem)
    return f"{folder}/{made}" if folder else made


def may_stay_link(link: str, target: str) -> bool:
    """Whether a link may go on leading to a file when both are packed: that gets what its name asks for."""
    if safetensors_name(link) is not None or safetensors_name(target) is not None:
        return False  # the target gets another name
    kinds = (is_index, is_config, lambda it: it.endswith(SAFETENSORS))
    return all(kind(target) for kind in kinds if kind(link))
