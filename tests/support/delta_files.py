"""Small states on disk to make deltas of: one file with its delta, and directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import spoilt
from support.contents import fill
from support.files import safetensors_bytes
from support.states import files, folders
from tpde.format.container import TensorSpec
from tpde.store.diffing import diff

makers = pytest.mark.parametrize("make", [files, folders], ids=["file", "directory"])

SMALL = TensorSpec("BF16", (600,))
OLD = np.frombuffer(fill("normal", SMALL), np.uint16)
NEW = np.where(np.arange(600) % 60, OLD, OLD + 1).astype(np.uint16)


def file_delta(folder: Path) -> tuple[Path, Path]:
    """Give two states of one file, and the delta between them."""
    (folder / "base").write_bytes(spoilt.PLAIN)
    words = np.frombuffer(fill("normal", spoilt.SPEC), np.uint16).copy()
    words[::50] ^= 1
    tensors = {"w": (spoilt.SPEC, words.tobytes()), "few": (spoilt.SMALL, bytes(range(9)))}
    (folder / "target").write_bytes(safetensors_bytes(tensors))
    diff(folder / "base", folder / "target", folder / "delta")
    return folder / "base", folder / "target"


def weight_folder(path: Path, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a directory of files of BF16 tensors."""
    for name, holds in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        tensors = {tensor: (SMALL, words.tobytes()) for tensor, words in holds.items()}
        (path / name).write_bytes(safetensors_bytes(tensors))
    return path
