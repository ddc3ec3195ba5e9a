"""Whether a file or a directory is packed, or says that it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tpde.errors import AlreadyPacked, InvalidInput, NotJson
from tpde.files.documents import json_object
from tpde.files.file_kinds import SAFETENSORS, is_config
from tpde.files.reader import PackedFile
from tpde.files.walk import FolderTree
from tpde.format.constants import METHOD

MAKE_PLAIN = "make a plain model of it with `tpde unpack`, and pack that"


def is_packed(path: Path) -> bool:
    """Whether a safetensors file is packed."""
    with PackedFile(path) as file:
        return file.is_packed


def packed_names(path: Path) -> list[str]:
    """Names of the packed tensors of a safetensors file."""
    with PackedFile(path) as file:
        return file.packed_names()


def says_packed(config: object) -> bool:
    """Whether the content of a `config.json` says that weights are packed by tpde."""
    ours = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(ours, dict) and ours.get("quant_method") == METHOD


def packing_configs(tree: FolderTree) -> list[str]:
    """The configurations in a directory that say that weights are packed by tpde.

    Raises
    ------
    InvalidInput
        If one cannot be read: what it says is not known then.
    """
    found = []
    for name in tree.files:
        if is_config(name):
            try:
                config = json_object(tree.root / name)[1]
            except NotJson:
                continue
            if says_packed(config):
                found.append(name)
    return found


def already_packed(folder: Path) -> AlreadyPacked:
    """The error for a directory that is packed and should not be."""
    where = str(folder)
    return AlreadyPacked(
        f"`{where}` is packed already",
        hint=(
            f"restore the plain model with `tpde unpack {where} {folder.resolve().name}-plain`, or use it as "
            f"it is (`tpde inspect {where}` shows what is in it)"
        ),
        where=where,
    )


def refuse_packed(tree: FolderTree, weights: Collection[str]) -> None:
    """Refuse a directory whose weight files are packed, or that says so.

    Raises
    ------
    AlreadyPacked
        If they are.
    InvalidInput
        If it says so, and its weights are plain.
    """
    where = str(tree.root)
    if any(is_packed(tree.root / name) for name in weights if name.endswith(SAFETENSORS)):
        raise already_packed(tree.root)
    configs = packing_configs(tree)
    if configs:
        raise InvalidInput(
            f"`{tree.root / configs[0]}` says that the weights are packed, but they are plain",
            hint=MAKE_PLAIN,
            where=where,
        )
