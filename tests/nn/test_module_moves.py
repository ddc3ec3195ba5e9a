"""Packed modules are moved, and are not cast."""

from __future__ import annotations

from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import IDS, Model
from torch import nn

from tpde.errors import PackedWeight
from tpde.nn import pack_module


def test_casts_are_refused(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for cast in (lambda m: m.half(), lambda m: m.to(torch.float32), lambda m: m.double()):
        with pytest.raises(
            PackedWeight, match=r"`embed.weight` is packed as torch.bfloat16 and cannot be cast"
        ):
            cast(packed)
    assert_same_bits(packed.to(torch.bfloat16)(IDS), plain(IDS))


def test_only_a_models_own_parameters_may_be_cast(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    ours.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ours._apply(lambda it: it.float(), recurse=False)
    assert ours.scale.dtype is torch.float32
    with pytest.raises(PackedWeight, match="cannot be cast"):
        ours._apply(lambda it: it.float())
    assert_same_bits(ours(IDS), plain(IDS))


def test_methods_of_a_models_own_class_are_called() -> None:
    calls: list[str] = []

    class Own(nn.Sequential):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            calls.append("_apply")
            return super()._apply(fn, recurse)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("load_state_dict")
            return super().load_state_dict(*args, **kwargs)

    ours = pack_module(Own(nn.Linear(64, 64)).bfloat16(), min_bytes=0)
    ours.to("cpu")
    ours.load_state_dict(ours.state_dict())
    assert calls == ["_apply"] * calls.count("_apply") + ["load_state_dict"]
    assert calls.count("_apply") >= 2


def test_a_move_that_fails_leaves_the_packed_weight(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    held = layer.weight

    def fail(it: Any) -> Any:
        if it.shape == (192,):
            raise KeyError("theirs")
        return it

    with pytest.raises(KeyError, match="theirs"):
        layer._apply(fail)
    assert layer._parameters["weight"] is held
    assert_same_bits(ours(IDS), plain(IDS))


def test_a_weight_is_read_while_it_is_moved(pair: tuple[Model, Model]) -> None:
    """By functions that look at the module meanwhile."""
    _, ours = pair
    layer, held, seen = ours.blocks[0].up, ours.blocks[0].up.weight, list[Any]()

    def look(it: Any) -> Any:
        seen.append(layer.weight)
        return it

    layer._apply(look)
    assert seen
    assert all(it is held for it in seen)


def test_a_streamed_convolution_stays_in_its_format() -> None:
    """A second copy of it would not be in the budget."""
    layer = pack_module(nn.Conv2d(16, 32, 3).bfloat16(), min_bytes=0)
    layer.weight.packed.sources[0].settled = False
    with pytest.raises(PackedWeight, match="memory format"):
        layer.to(memory_format=torch.channels_last)
    layer.weight.packed.sources[0].settled = True
    assert layer.to(memory_format=torch.channels_last) is layer


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("move", [lambda it: it.share_memory(), lambda it: it.to("cpu")])
def test_a_model_that_is_moved_within_its_forward_pass(
    move: Any, gradients: bool, pair: tuple[Model, Model]
) -> None:
    plain, ours = pair
    hook = ours.blocks[0].up.register_forward_hook(lambda *_: move(ours) and None)
    with torch.set_grad_enabled(gradients):
        assert_same_bits(ours(IDS), plain(IDS))
        hook.remove()
        assert_same_bits(ours(IDS), plain(IDS))
