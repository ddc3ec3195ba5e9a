"""Products of many rows whose work is shared out as a test says."""

from __future__ import annotations

import pytest

from tpde.cuda import many_rows
from tpde.cuda.many_rows import Shares, Tiles

KINDS = [(256, 8), (128, 8), (128, 12)]  # rows of x and warps of a tile


def share_out(monkeypatch: pytest.MonkeyPatch, runs: int, kind: tuple[int, int] = KINDS[0]) -> Tiles:
    """Have all products take such tiles, in so many runs."""
    made = Tiles(*kind, 1.0)
    monkeypatch.setattr(many_rows, "shares_of", lambda *_: Shares(made, runs))
    return made
