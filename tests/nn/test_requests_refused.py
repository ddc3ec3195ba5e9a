"""What is refused of a model whose rows are under several states: its parts, its weights, changes of them."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
from support.models import assert_same_bits
from support.row_tunes import IDS, Tunes, make
from support.small import torch

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import plain_state_dict


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_parts_are_refused(pack: bool) -> None:
    tunes = make(pack=pack, blocks=2)
    model, x = tunes.packed, torch.zeros(2, 64).bfloat16()
    model.use(["math", "law"])
    model(IDS[:2])
    for part, took in (
        (model.blocks[0], x),
        (model.blocks[1].norm, x),
        (model.blocks[0].up, x),
        (model.embed, IDS[:2]),
        (model.head, x),
    ):
        with pytest.raises(InvalidInput, match="by itself") as caught:
            part(took)
        assert caught.value.where
        if pack and part is not model.blocks[1].norm:
            with pytest.raises(InvalidInput, match=r"by itself|the same for all of them"):
                part.forward(took)
    with pytest.raises(InvalidInput):
        type(model).forward(model, IDS[:2])
    model.use("math")
    with torch.no_grad():
        assert_same_bits(model.blocks[0](x), tunes.plain["math"].blocks[0](x))


def test_parts_are_refused_in_other_threads_meanwhile(tunes: Tunes) -> None:
    model, found = tunes.packed, list[Any]()
    model.use(["math", "law"])

    def other() -> None:
        try:
            found.append(model.blocks[0](torch.zeros(2, 64).bfloat16()))
        except InvalidInput as error:
            found.append(error)

    def hold(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)

    hook = model.blocks[1].register_forward_pre_hook(hold)
    model(IDS[:2])
    hook.remove()
    assert len(found) == 2
    assert all(isinstance(it, InvalidInput) for it in found)


def test_weights_are_refused(tunes: Tunes) -> None:
    model = tunes.packed
    model.use(["math", "law"])
    assert model.blocks[0].up.weight.shape == (192, 64)
    with pytest.raises(InvalidInput, match="the same for all of them"):
        model.blocks[0].up.weight.float()
    for ask in (model.state_dict, model.blocks.state_dict, model.blocks[1].norm.state_dict):
        with pytest.raises(InvalidInput, match="was asked for its state"):
            ask()
    with pytest.raises(InvalidInput):
        plain_state_dict(model)
    with pytest.raises(InvalidInput):
        tpde.unpack_module(model)
    for part in (model, model.blocks[0], model.blocks[0].norm):
        with pytest.raises((PackedWeight, InvalidInput)):
            copy.deepcopy(part)
        with pytest.raises((PackedWeight, InvalidInput)):
            pickle.dumps(part)
    model.use("law")
    tpde.unpack_module(model)
    with torch.no_grad():
        assert_same_bits(model(IDS), tunes.plain["law"](IDS))


def test_a_plain_model_is_not_unpacked(tunes: Tunes) -> None:
    plain = make(pack=False, blocks=1).packed
    plain.use(["math", "law"])
    with pytest.raises(InvalidInput, match="each of 2 rows"):
        tpde.unpack_module(plain)
    plain.use(None)
    use = plain.use
    tpde.unpack_module(plain)
    with pytest.raises(InvalidInput):
        use([None])


def test_parameters_of_the_caller_are_not_overwritten() -> None:
    tunes = make(torch.float32, blocks=2)
    own = {"blocks.0.norm.weight": torch.full((64,), 3.0)}
    tunes.packed.use(["math", "law"])
    tunes.check(["math", "law"])
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.norm\.weight` is another tensor"):
        torch.func.functional_call(tunes.packed, own, (IDS[:2],))
    assert (own["blocks.0.norm.weight"] == 3).all()
    tunes.check(["math", "law"])
    tunes.packed.use("math")
    with torch.no_grad():
        found = torch.func.functional_call(tunes.packed, own, (IDS[:2],))
        assert_same_bits(found, torch.func.functional_call(tunes.plain["math"], own, (IDS[:2],)))
    assert (own["blocks.0.norm.weight"] == 3).all()


def test_what_was_trained_is_not_lost(tunes: Tunes) -> None:
    tunes.packed.use(["math", "law"])
    tunes.check(["math", "law"])
    with torch.no_grad():
        tunes.packed.blocks[0].norm.weight.mul_(2)
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.norm\.weight` was changed"):
        tunes.packed(IDS[:2])
    assert tunes.packed.tpde_deltas.active == ("math", "law")


def test_no_switch_within_a_call(tunes: Tunes) -> None:
    tunes.packed.use(["math", "law"])
    hook = tunes.packed.blocks[1].register_forward_pre_hook(lambda *_: tunes.packed.use("math"))
    with pytest.raises(PackedWeight, match="between two of them"):
        tunes.packed(IDS[:2])
    hook.remove()
    tunes.check(["math", "law"])
