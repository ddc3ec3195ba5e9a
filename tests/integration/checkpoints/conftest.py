"""A small training run to save."""

from __future__ import annotations

import copy
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run() -> dict[int, dict[str, Any]]:
    """Give the states of a run by their steps."""
    from support.training import training

    return {step: copy.deepcopy(state) for step, state in training(9)}
