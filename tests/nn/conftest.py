"""A small model: plain, packed, in windows, of several fine-tunes; and a weight that is not to be decoded."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # needs torch
    from support.row_tunes import Tunes
    from support.small import Model


@pytest.fixture
def pair() -> tuple[Model, Model]:
    """A plain and a packed model of the same weights."""
    from support.small import Model, torch

    from tpde.nn import pack_module

    torch.manual_seed(5)
    model = Model().to(torch.bfloat16).eval()
    return model, pack_module(copy.deepcopy(model), min_bytes=0)


@pytest.fixture
def fused(pair: tuple[Model, Model]) -> Any:
    """The packed one, whose linear layers are multiplied as they are packed."""
    from tpde.nn import set_kernels

    return set_kernels(pair[1], "fused")


@pytest.fixture
def tunes() -> Tunes:
    """A packed model of two fine-tunes, and the plain ones."""
    from support.row_tunes import make

    return make(blocks=2)


@pytest.fixture
def weight() -> Any:
    """A matrix."""
    from support.parameters import draw

    return draw(96, 64)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is decoded fails the test."""
    from tpde.weights.source import Source

    def refuse(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Source, "decode_on_host", refuse)
