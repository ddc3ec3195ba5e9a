"""What several of these tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

import tpde


@pytest.fixture
def packed(tmp_path: Path, plain: Path) -> Path:
    """A plain file packed: the module's own."""
    path = tmp_path / "packed.safetensors"
    tpde.pack(plain, path)
    return path
