"""A block's forward pass while it is packed: its signature, wrappers, copies, and its own afterwards."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Model, X, torch
from support.workspaces import made

from tpde.nn import finish, pack_module, packed_modules, unpack_module


def test_a_blocks_forward_has_its_own_signature(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    assert inspect.signature(packed.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)


def test_a_blocks_own_forward_is_kept(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    first, second = packed.blocks[0], packed.blocks[1]
    unpack_module(packed)
    own = first.forward

    def theirs(*args: Any) -> Any:
        return own(*args)

    first.forward = theirs
    pack_module(packed)
    assert_same_bits(packed(IDS), plain(IDS))
    finish(packed)
    unpack_module(packed)
    assert first.__dict__["forward"] is theirs
    assert "forward" not in second.__dict__


def test_a_blocks_forward_may_be_wrapped(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    ours = packed.blocks[0].forward
    packed.blocks[0].forward = functools.partial(ours)
    assert_same_bits(packed(IDS), plain(IDS))
    finish(packed)
    assert_same_bits(packed(IDS), plain(IDS))
    unpack_module(packed)
    assert ours.group is None
    assert_same_bits(packed(IDS), plain(IDS))


def test_a_wrapper_with_our_attributes_is_called_and_keeps_no_group(pair: tuple[Model, Model]) -> None:
    """Accelerate's hooks copy the attributes of the method that they wrap."""
    plain, packed = pair
    block, calls = packed.blocks[0], list[int]()
    ours = block.forward

    def theirs(*args: Any) -> Any:
        calls.append(1)
        return ours(*args)

    block.forward = functools.update_wrapper(functools.partial(theirs), ours)
    group = weakref.ref(ours.group)
    finish(packed)
    gc.collect()
    assert group() is None
    assert block.forward.group is block.up.tpde_group()
    assert_same_bits(packed(IDS), plain(IDS))
    assert calls == [1]
    unpack_module(packed)
    block.forward = ours  # theirs is taken out
    pack_module(packed, min_bytes=0)
    assert block.forward.group is block.up.tpde_group()
    assert_same_bits(packed(IDS), plain(IDS))


def test_a_layer_out_of_its_block_keeps_its_own_group(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = copy.deepcopy(ours.blocks[0].up)
    assert layer.tpde_group() is layer.tpde_group()
    assert layer.tpde_group() is not ours.blocks[0].up.tpde_group()
    x = torch.randn(3, 64).bfloat16()
    assert_same_bits(layer(x), plain.blocks[0].up(x))


def test_what_finishing_does_is_undone(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    before = {name: set(vars(it)) for name, it in plain.named_modules()}
    finish(ours)
    unpack_module(ours)
    for name, module in ours.named_modules():
        assert set(vars(module)) == before[name], name
        assert type(module) is type(plain.get_submodule(name))


def test_somebodys_own_methods_stay(pair: tuple[Model, Model]) -> None:
    _, ours = pair
    calls: list[str] = []
    block = ours.blocks[0]
    own = {"_apply": lambda fn, recurse=True: calls.append("_apply"), "__reduce_ex__": lambda _: (list, ())}
    unpack_module(ours)
    block.__dict__.update(own)
    finish(ours)
    unpack_module(ours)
    assert {name: block.__dict__[name] for name in own} == own
    ours.to("cpu")
    assert calls == ["_apply"]


def test_an_unpacked_blocks_old_forward_decodes_nothing() -> None:
    plain, ours = made()
    old = ours.blocks[0].forward
    unpack_module(ours)
    assert old.group is None
    with torch.no_grad():
        assert_same_bits(old(X), plain.blocks[0](X))


def test_a_copied_blocks_forward_is_one() -> None:
    _, ours = made()
    block = copy.deepcopy(ours.blocks[0])
    assert block.__dict__["forward"] is block.__dict__["tpde_forward"]
    assert block.forward is not ours.blocks[0].forward


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: torch.nn.Linear(64, 64), torch.ones(2, 64)),
        (lambda: torch.nn.Embedding(64, 64), torch.arange(5)),
        (lambda: torch.nn.Conv1d(64, 64, 3), torch.ones(2, 64, 9)),
    ],
)
def test_an_unpacked_layers_old_forward_is_its_classs(make: Any, given: Any) -> None:
    """Whoever wraps a layer's forward pass, as accelerate's hooks do, goes on calling what it found."""
    layer = make()
    expected = layer(given)
    old = pack_module(layer, min_bytes=0).forward
    assert list(packed_modules(layer))
    layer.forward = lambda x: old(x) * 2
    assert_same_bits(layer(given), expected * 2)
    unpack_module(layer)
    assert_same_bits(layer(given), expected * 2)
    layer.forward = old
    assert_same_bits(layer(given), expected)
