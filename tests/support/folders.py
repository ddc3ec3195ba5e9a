"""What is in folders: of any, and of a model before and after it is replaced."""

from __future__ import annotations

from pathlib import Path

# Of a model that is replaced: what is not the model's, and all, before and after.
STRAYS = {".cache", ".cache/deep", ".cache/deep/notes", "link", "pipe", "logs"}
OLD = STRAYS | {"config.json"}
NEW = STRAYS | {"config.json", "model.safetensors", "tpde_manifest.json"}


def names(folder: Path) -> set[str]:
    """Give everything below a folder."""
    return {it.relative_to(folder).as_posix() for it in folder.rglob("*")}


def visible(folder: Path) -> list[str]:
    """Give what is in a folder: all of it, hidden names too."""
    return sorted(it.name for it in folder.iterdir())
