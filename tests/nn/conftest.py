"""A small model, plain and packed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # needs torch
    from support.small import Model


@pytest.fixture
def pair() -> tuple[Model, Model]:
    """A plain and a packed model of the same weights."""
    from support.small import Model, torch

    from tpde.nn import pack_module

    torch.manual_seed(5)
    model = Model().to(torch.bfloat16).eval()
    return model, pack_module(copy.deepcopy(model), min_bytes=0)
