"""What else holds the weights of a model with deltas: autograd, state dicts, copies, moves."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
from support.models import assert_same_bits
from support.small import IDS, torch
from support.tunes import make

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedParameter, add_deltas, pack_module


def test_gradients_are_those_of_the_state_of_the_forward_pass() -> None:
    """Also if another is in use by the time of the backward pass, which decodes again."""
    tunes = make()
    for names in (tunes.plain["math"], tunes.packed):
        for it in names.parameters():
            it.requires_grad_(False)
    found = []
    for model in (tunes.plain["math"], tunes.packed):
        if model is tunes.packed:
            model.use("math")
        x = torch.ones(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
        y = x
        for block in model.blocks:
            y = y + block.down(torch.relu(block.up(y)))  # norms are copied, and autograd sees that
        if model is tunes.packed:
            model.use("law")
        y.sum().backward()
        found.append(x.grad)
    assert_same_bits(found[1], found[0])


def test_a_plain_parameter_that_autograd_keeps_is_missed() -> None:
    tunes = make()
    tunes.packed.use("math")
    loss = tunes.packed(IDS).sum()
    tunes.packed.use("law")
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed by an in-place"):
        loss.backward()


def test_state_dicts_and_copies_are_of_the_state_in_use() -> None:
    tunes = make()
    tunes.packed.use("math")
    file = io.BytesIO()
    torch.save(tunes.packed.state_dict(), file)
    tunes.packed.use("law")
    file.seek(0)
    again = torch.load(file, weights_only=True)
    for key, value in tunes.plain["math"].state_dict().items():
        found = again[key]
        assert_same_bits(found.plain() if isinstance(found, PackedParameter) else found, value, key)
    block = copy.deepcopy(tunes.packed.blocks[0])
    tunes.packed.use(None)
    x = torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        assert_same_bits(block(x), tunes.plain["law"].blocks[0](x))
        assert_same_bits(copy.deepcopy(block)(x), tunes.plain["law"].blocks[0](x))


def test_a_whole_model_is_neither_copied_nor_pickled() -> None:
    tunes = make()
    with pytest.raises(PackedWeight, match="math, law"):
        copy.deepcopy(tunes.packed)
    with pytest.raises(PackedWeight, match="math, law"):
        pickle.dumps(tunes.packed)
    tunes.packed.use("math")
    tunes.check("math")


def test_unpacking_gives_the_state_in_use() -> None:
    tunes = make()
    tunes.packed.use("math")
    with pytest.raises(PackedWeight, match="part of a model with deltas"):
        tpde.unpack_module(tunes.packed.blocks[0])
    use = tunes.packed.use
    tpde.unpack_module(tunes.packed)
    tunes.check("math")
    assert not hasattr(tunes.packed, "use")
    assert not hasattr(tunes.packed, "tpde_deltas")
    assert "forward" not in tunes.packed.__dict__
    with pytest.raises(InvalidInput):
        use("law")
    use(None)
    tunes.check("math")
    for key, value in tunes.plain["math"].state_dict().items():
        assert_same_bits(tunes.packed.state_dict()[key], value, key)


def test_other_weights_are_not_loaded_beneath() -> None:
    tunes = make()
    tunes.packed.load_state_dict(tunes.packed.state_dict())
    other = pack_module(copy.deepcopy(tunes.plain["law"]), min_bytes=0)
    before = tunes.packed(IDS)
    with pytest.raises(PackedWeight, match="deltas on it"):
        tunes.packed.load_state_dict(other.state_dict())
    assert_same_bits(tunes.packed(IDS), before)
    tunes.packed.use("math")
    other.load_state_dict(tunes.packed.state_dict())  # the other way, it is a weight like any other
    with torch.no_grad():
        assert_same_bits(other(IDS), tunes.plain["math"](IDS))


def test_moves() -> None:
    tunes = make()
    tunes.packed.use("math")
    tunes.packed.to("cpu").share_memory()
    assert tunes.packed.head.weight.is_shared()
    for name in ("math", "law", None):
        tunes.packed.use(name)
        tunes.check(name)
    with pytest.raises(PackedWeight, match="cannot be cast"):
        tunes.packed.half()
    with pytest.raises(PackedWeight, match="would lose its bytes"):
        tunes.packed.to_empty(device="cpu")
    tunes.check(None)


def test_what_was_trained_is_not_lost() -> None:
    tunes = make()
    tunes.packed.use("math")
    norm = tunes.packed.blocks[0].norm
    with torch.no_grad():
        norm.weight.mul_(1)  # another version of the same values
    tunes.packed.use("law")
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.norm\.weight` was changed"):
        tunes.packed.use("math")
    assert tunes.packed.tpde_deltas.active == "law"


def test_casts_of_plain_parameters_are_not_kept() -> None:
    """Autocast keeps them by parameters, until it ends."""
    torch.manual_seed(5)
    base = torch.nn.Linear(64, 64)
    double = copy.deepcopy(base)
    with torch.no_grad():
        double.weight.mul_(2)
    model = add_deltas(copy.deepcopy(base), {"double": tpde.make_delta(base, double)})
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        for name, plain in ((None, base), ("double", double), (None, base)):
            model.use(name)
            assert_same_bits(model(x), plain(x), str(name))
        model.use(["double", None, "double"])
        found = model(x)
        assert_same_bits(found[[0, 2]], double(x[[0, 2]]))
        assert_same_bits(found[1:2], base(x[1:2]))
