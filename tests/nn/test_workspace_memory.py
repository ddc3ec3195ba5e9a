"""The memory of the workspace: how large it is, on which device, and when it is another."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from support.card import Card
from support.models import assert_same_bits
from support.small import IDS, Block, Model, X, torch
from support.workspaces import CPU, group_of, is_free, made
from torch import nn

from tpde.errors import InvalidInput, OutOfMemory
from tpde.nn import PackedTensor, Resident, finish, pack_tensor, packed_modules, replace_parameter
from tpde.nn.workspace import Pool, Workspace


def test_it_grows_and_stays() -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    first = space.buffer
    assert (space.buffer.numel(), space.made) == (4096, 1)
    assert (space.start, space.end) == (first.data_ptr(), first.data_ptr() + 4096)
    for less in (100, 4095, 4096, 0):
        space.reserve(less)
        assert space.buffer is first
    space.reserve(4097)
    assert (space.buffer.numel(), space.made) == (4097, 2)
    assert (space.start, space.end) == (space.buffer.data_ptr(), space.buffer.data_ptr() + 4097)
    assert space.release() == 4097
    assert (space.buffer, space.start, space.end) == (None, 0, 0)
    assert is_free(space.lock)
    space.reserve(0)
    assert space.buffer.numel() == 4097


def test_two_of_them_need_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    space, beside, empty = Workspace(CPU), [], torch.empty

    def allocated(nbytes: int, **options: Any) -> Any:
        beside.append(space.buffer)
        return empty(nbytes, **options)

    monkeypatch.setattr(torch, "empty", allocated)
    space.reserve(4096)
    space.reserve(8192)
    assert beside == [None, None]


@pytest.mark.parametrize("spread", [False, True])
def test_each_device_has_room_for_its_own_blocks(spread: bool) -> None:
    pool = Pool()
    pool.capacity, pool.spread = 8192, spread
    pool = pickle.loads(pickle.dumps(pool))
    assert (pool.capacity, pool.spread) == (8192, spread)
    space = pool.workspace(CPU, 4096)
    assert space.buffer is not None
    assert space.buffer.numel() == (4096 if spread else 8192)
    assert pool.workspace(CPU, 4096) is space


def test_models_on_several_devices_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = made()
    assert not group_of(ours).pool.spread
    there = {id(it) for it in ours.blocks[1].up.weight.packed.sources}
    there |= {id(it) for it in ours.blocks[1].down.weight.packed.sources}
    card = torch.device("meta")  # as far as anybody asks
    monkeypatch.setattr(Resident, "device", property(lambda it: card if id(it) in there else it.blob.device))
    finish(ours)
    assert group_of(ours).pool.spread


@pytest.mark.parametrize("of", ["up", "part"])
def test_blocks_on_two_devices_are_refused(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all of a block has moved, nothing is prepared."""
    torch.manual_seed(0)
    halves = [pack_tensor(torch.randn(96, 64).bfloat16(), f"half {n}") for n in range(2)]
    model = nn.ModuleList([Block(64).to(torch.bfloat16)])
    replace_parameter(model, "0.up.weight", PackedTensor([it.sources[0] for it in halves if it], (192, 64)))
    replace_parameter(model, "0.down.weight", pack_tensor(model[0].down.weight.detach(), "down"))
    finish(model)
    model[0](X)
    up = model[0].up.weight.packed
    there = {id(it) for it in (up.sources if of == "up" else up.sources[1:])}
    card = torch.device("cuda:0")
    monkeypatch.setattr(Resident, "device", property(lambda it: card if id(it) in there else it.blob.device))
    made = model[0].__dict__["tpde_forward"].group
    made.changed()
    made.prepare()
    assert made._workspace is None
    with pytest.raises(InvalidInput, match=r"`0` are on cpu, cuda:0.*whole block to one device"):
        model[0](X)
    there.clear()
    model[0](X)


@pytest.mark.parametrize("first", ["inference", "no_grad"])
def test_one_that_was_made_in_any_mode_serves_all(first: str) -> None:
    """Tensors of inference mode have no versions, and none of autograd."""
    plain, ours = made()
    assert group_of(ours).release()
    with torch.inference_mode() if first == "inference" else torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
    for model in (plain, ours):
        model(IDS).float().square().sum().backward()
    assert_same_bits(ours.blocks[0].up.bias.grad, plain.blocks[0].up.bias.grad)
    with torch.inference_mode():
        assert_same_bits(ours(IDS), plain(IDS))


def test_decoding_to_it_is_no_change() -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    assert space.buffer is not None
    space.buffer.fill_(7)
    space.check()


@pytest.mark.parametrize("of", ["weight", "span", "tiles"])
def test_what_takes_its_place_is_as_large(of: str) -> None:
    """So that the allocator gives it the same memory."""
    _, ours = made()
    slot, size = ours.blocks[0].up.tpde_slots["weight"], group_of(ours).nbytes
    assert slot.nbytes < size
    if of == "tiles":
        slot = ours.head.tpde_slots["weight"]
        slot.packed.tile_bytes = 32 << 10
    ours.blocks[0](X)
    made_of = {
        "weight": slot.instead,
        "span": lambda: slot.span_instead(512, 1024),
        "tiles": lambda: next(iter(slot.tiles()))[2],
    }[of]
    assert group_of(ours).workspace.buffer is not None
    assert made_of().untyped_storage().nbytes() == size
    assert group_of(ours).workspace.buffer is None
    assert made_of().untyped_storage().nbytes() >= size


def test_workspace_is_the_largest_block(pair: tuple[Model, Model]) -> None:
    _, packed = pair
    sizes = {
        id(m.tpde_group()): m.tpde_group().nbytes for name, m in packed_modules(packed) if name != "embed"
    }
    assert sorted(sizes.values()) == [200 * 128, *[2 * 192 * 128] * 3]
    assert packed.head.tpde_group().workspace.buffer.numel() == 2 * 192 * 128


def test_a_workspace_that_is_left_keeps_off_the_next_one(pair: tuple[Model, Model]) -> None:
    """A block that moved has views elsewhere; what its last device gives up later are not those."""
    plain, packed = pair
    expected = plain(IDS)
    assert_same_bits(packed(IDS), expected)
    group = packed.blocks[1].up.tpde_slots["weight"].group
    left, group.pool = group.workspace, copy.copy(group.pool)  # as if of another device
    for slot in group.slots:
        slot.changed()
    assert_same_bits(packed(IDS), expected)
    assert group.workspace is not left
    assert left.release()
    assert_same_bits(packed(IDS), expected)


def test_no_room_for_the_workspace_at_first(
    pair: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = pair
    group = packed.head.tpde_slots["weight"].group
    group.pool = copy.copy(group.pool)
    group.changed()
    with monkeypatch.context() as there_is_none:
        Card(there_is_none).exhaust(there_is_none, 2 * 192 * 128)
        with pytest.raises(OutOfMemory, match="the workspace that weights are decoded to needs"):
            packed(IDS)
    assert_same_bits(packed(IDS), plain(IDS))
