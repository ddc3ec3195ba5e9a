"""What is in a model directory of `support.changes`, packed, and what verify finds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tpde
from tpde.format.constants import MANIFEST

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def pack_beside(source: Path) -> Path:
    """Pack a model into the directory `packed` beside it."""
    tpde.pack(source, source.with_name("packed"))
    return source.with_name("packed")


def manifest_of(packed: Path) -> dict[str, Any]:
    """What the manifest says."""
    return dict(json.loads((packed / MANIFEST).read_text("utf-8")))


def problems(packed: Path, source: Path | None = None) -> set[tuple[str, str]]:
    """Where verify finds something, and what in a few words."""
    root = packed.parent
    return {
        (Path(it.file).relative_to(root).as_posix(), it.message.replace(f"{root}/", ""))
        for it in tpde.verify(packed, against=source)
    }
