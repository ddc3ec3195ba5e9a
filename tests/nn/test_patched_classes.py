"""Classes whose forward pass is patched, or that modules exchange for another, while these are packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, Model, nn, torch

from tpde.nn import pack_module, unpack_module


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: forward(self, *args) * 2


def _unlike(model: Any, other: Any) -> bool:
    return not torch.equal(model(IDS), other)


@pytest.mark.parametrize("kernels", ["decoded", "fused"])
@pytest.mark.parametrize("kind", [Block, nn.Linear, nn.Embedding])
def test_a_class_patched_after_packing(
    kind: Any, kernels: str, pair: tuple[Model, Model], request: Any, monkeypatch: Any
) -> None:
    plain, packed = pair
    if kernels == "fused":
        packed = request.getfixturevalue("fused")
    before = packed(IDS)
    monkeypatch.setattr(kind, "forward", _twice(kind.forward))
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))
    monkeypatch.undo()
    assert_same_bits(packed(IDS), before)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_class_patched_before_packing(kind: Any, pair: tuple[Model, Model], monkeypatch: Any) -> None:
    plain, packed = pair
    unpack_module(packed)
    before = plain(IDS)
    monkeypatch.setattr(kind, "forward", _twice(kind.forward))
    pack_module(packed, min_bytes=0)
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Block, nn.Linear])
def test_a_patched_class_is_compiled(
    kind: Any, grad: bool, pair: tuple[Model, Model], monkeypatch: Any
) -> None:
    plain, packed = pair
    torch.compiler.reset()
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        assert_same_bits(compiled(IDS), plain(IDS))
        monkeypatch.setattr(kind, "forward", _twice(kind.forward))
        assert_same_bits(compiled(IDS), plain(IDS))


def test_a_block_that_is_unpacked_has_its_classs_forward(pair: tuple[Model, Model], monkeypatch: Any) -> None:
    plain, packed = pair
    monkeypatch.setattr(Block, "forward", _twice(Block.forward))
    unpack_module(packed)
    assert "forward" not in packed.blocks[0].__dict__
    assert_same_bits(packed(IDS), plain(IDS))


def test_a_block_of_another_class(pair: tuple[Model, Model]) -> None:
    class Twice(Block):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    plain, packed = pair
    before = packed(IDS)
    for model in pair:
        model.blocks[1].__class__ = Twice
    assert _unlike(plain, before)
    assert_same_bits(packed(IDS), plain(IDS))
    unpack_module(packed)
    assert type(packed.blocks[1]) is Twice
    assert "forward" not in packed.blocks[1].__dict__
