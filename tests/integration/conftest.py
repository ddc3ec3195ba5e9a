"""What several of these tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tpde

if TYPE_CHECKING:  # these need torch
    from support.budgets import Opened
    from support.checkpoints import Pair


@pytest.fixture
def packed(tmp_path: Path, plain: Path) -> Path:
    """A plain file packed: the module's own."""
    path = tmp_path / "packed.safetensors"
    tpde.pack(plain, path)
    return path


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Pair]:
    """A tiny mixture of experts."""
    from support.checkpoints import checkpoint

    return request.param, checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Let models load under a budget to a simulated device, all of their weights staying in host memory."""
    from support.budgets import every, simulated

    with simulated(monkeypatch, every("host")) as found:
        yield found
