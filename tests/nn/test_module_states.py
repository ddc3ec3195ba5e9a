"""State dicts of packed modules, the plain weights that they give back, and damage on the way, by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import IDS, Model
from torch import nn

from tpde.errors import Corrupt, InvalidInput, PackedWeight
from tpde.nn import PackedParameter, pack_module, pack_tensor, packed_modules, plain_state_dict, unpack_module


def blob_of(parameter: Any) -> Any:
    """The blob of a weight of one source."""
    (source,) = parameter.packed.sources
    return source.blob


def test_state_dicts(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    torch.manual_seed(77)
    other = pack_module(Model().to(torch.bfloat16), min_bytes=0)
    assert not torch.equal(other(IDS), plain(IDS))
    other.load_state_dict(packed.state_dict())
    assert_same_bits(other(IDS), plain(IDS))
    assert other.embed.weight is other.head.weight
    assert blob_of(other.embed.weight) is not blob_of(packed.embed.weight)
    other.load_state_dict(packed.state_dict(), assign=True)
    assert blob_of(other.embed.weight) is blob_of(packed.embed.weight)
    assert_same_bits(other(IDS), plain(IDS))
    packed.load_state_dict(plain.state_dict())  # the same values
    assert_same_bits(packed(IDS), plain(IDS))
    found = plain_state_dict(packed)
    assert list(found) == list(plain.state_dict())
    assert found["embed.weight"] is found["head.weight"]


def test_state_dicts_that_do_not_fit(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    state = dict(plain.state_dict())
    state["blocks.0.up.weight"] = state["blocks.0.up.weight"].clone()
    state["blocks.0.up.weight"].view(torch.int16)[3, 5] ^= 1
    with pytest.raises(PackedWeight, match=r"`blocks.0.up.weight` is packed, and .*other .*unpack_module"):
        packed.load_state_dict(state)
    state = packed.state_dict()
    state["blocks.0.up.weight"], state["blocks.0.down.weight"] = (
        state["blocks.0.down.weight"],
        state["blocks.0.up.weight"],
    )
    with pytest.raises(InvalidInput, match=r"`blocks.0.up.weight` is torch.bfloat16 of shape \[192, 64\]"):
        packed.load_state_dict(state)
    state = packed.state_dict()
    del state["blocks.0.up.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.up.weight"):
        packed.load_state_dict(state)
    assert_same_bits(packed(IDS), plain(IDS))


def halve(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    for name in list(state_dict):
        if name.startswith(prefix) and not isinstance(state_dict[name], PackedParameter):
            state_dict[name] = state_dict[name] / 2


@pytest.mark.parametrize("path", ["", "blocks", "blocks.0", "blocks.0.up"])
def test_hooks_of_any_module_change_state_dicts(path: str, pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    module = ours.get_submodule(path)
    module.register_load_state_dict_pre_hook(halve)
    prefix = f"{path}.".lstrip(".")
    state = {name: it * (2 if name.startswith(prefix) else 1) for name, it in plain.state_dict().items()}
    ours.load_state_dict(state)
    assert_same_bits(ours(IDS), plain(IDS))
    if path:
        own = {name.removeprefix(prefix): it for name, it in state.items() if name.startswith(prefix)}
        module.load_state_dict(own)
        assert_same_bits(ours(IDS), plain(IDS))


def test_what_hooks_hide_is_told_once_they_have_run(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    ours.register_load_state_dict_pre_hook(halve)
    state = {name: it * 2 for name, it in plain.state_dict().items()}
    other = pack_tensor(torch.randn(64, 64).bfloat16(), "other")
    assert other is not None
    for value, said in ((PackedParameter(other), "packed alike"), (torch.zeros(192, 64), "other values")):
        with pytest.raises((InvalidInput, PackedWeight), match=rf"`blocks\.0\.up\.weight` .*{said}"):
            ours.load_state_dict(state | {"blocks.0.up.weight": value})
    assert_same_bits(ours(IDS), plain(IDS))


def test_tied_weights_share_memory_in_a_plain_state_dict(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    found = plain_state_dict(packed)
    assert list(found) == list(plain.state_dict())
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    kept = [it.data_ptr() for name, it in found.items() if name != "head.weight"]
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("trained", [False, True])
def test_unpacked_weights_have_memory_of_their_own_and_no_more(trained: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(16, 33, 3), nn.Linear(31, 33)).bfloat16().requires_grad_(trained)
    plain.to(memory_format=torch.channels_last)
    ours = pack_module(copy.deepcopy(plain).to(memory_format=torch.contiguous_format), min_bytes=0)
    ours.to(memory_format=torch.channels_last)
    state, expected = plain_state_dict(ours), plain.state_dict()
    unpack_module(ours)
    for name, parameter in plain.named_parameters():
        found = ours.get_parameter(name)
        assert type(found) is nn.Parameter
        assert found.requires_grad is trained
        for it in (found, state[name]):
            assert it.stride() == expected[name].stride()
            assert it.untyped_storage().nbytes() == it.numel() * it.element_size()
            assert_same_bits(it, parameter)


def test_damage_names_tensor_and_chunk() -> None:
    torch.manual_seed(0)
    model = pack_module(Model(256, 500).to(torch.bfloat16))
    blob = blob_of(model.blocks[1].down.weight)
    blob[blob.numel() * 3 // 4] ^= 0x10
    for _ in range(2):  # the lock is left as it was
        with pytest.raises(Corrupt, match=r"blocks.1.down.weight") as caught:
            model(IDS)
        assert caught.value.tensor == "blocks.1.down.weight"
        assert caught.value.chunk in (17, 18)
    blob[blob.numel() * 3 // 4] ^= 0x10
    assert model(IDS).shape == (2, 7, 500)
    assert not model.blocks[1].up.tpde_group().workspace.depth
    blob_of(model.embed.weight)[5000:] = 255
    with pytest.raises(Corrupt, match=r"`embed.weight`"):
        model(IDS)


def test_unpacking_stops_at_damage(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    names = [name for name, _ in packed_modules(packed)]
    blob = blob_of(packed.blocks[1].down.weight)
    blob[blob.numel() * 3 // 4] ^= 0x10
    with pytest.raises(Corrupt) as caught:
        unpack_module(packed)
    assert caught.value.tensor == "blocks.1.down.weight"
    assert caught.value.chunk is not None
    left = [name for name, _ in packed_modules(packed)]
    assert left == names[names.index("blocks.1.down") :]
    for name in names[: names.index("blocks.1.down")]:
        assert type(packed.get_submodule(name).weight) is nn.Parameter
        assert_same_bits(packed.get_submodule(name).weight, plain.get_submodule(name).weight, name)
