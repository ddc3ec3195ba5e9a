"""Copies of packed modules, and what is left of those that are dropped."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
import weakref
from typing import Any

import pytest
from support.garbage import alive, uncollected
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch

from tpde.nn import PackedParameter, PackedTensor, Resident, pack_module, packed_modules, unpack_module
from tpde.nn.scope import first_tensor


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(pair: tuple[Model, Model], how: str) -> None:
    plain, packed = pair
    packed(IDS)
    if how == "deepcopy":
        other = copy.deepcopy(packed)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(packed))
    else:
        file = io.BytesIO()
        torch.save(packed, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    packed_embedding = packed.embed.weight.packed
    del pair, packed
    assert_same_bits(other(IDS), plain(IDS))
    assert other.embed.weight is other.head.weight
    assert other.embed.weight.packed is not packed_embedding
    spaces = {id(module.tpde_group().workspace) for name, module in packed_modules(other) if name != "embed"}
    assert len(spaces) == 1
    assert other.blocks[0].forward.group is other.blocks[0].up.tpde_group()
    unpack_module(other)
    assert other.embed.weight is other.head.weight
    assert_same_bits(list(other.state_dict().values()), list(plain.state_dict().values()))


def test_a_pickle_holds_no_workspace_and_no_plain_weight() -> None:
    torch.manual_seed(0)
    model = pack_module(Model(128, 1000).to(torch.bfloat16))
    packed = [it.packed.packed_bytes for it in model.parameters() if isinstance(it, PackedParameter)]
    rest = [it.numel() * 2 for it in model.parameters() if not isinstance(it, PackedParameter)]
    assert len(packed) == 7
    assert len(pickle.dumps(model)) < sum(packed) + sum(rest) + 30_000


def test_copy_of_one_module(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    other = copy.deepcopy(packed.blocks[1].up)
    assert len(pickle.dumps(other)) < 20_000  # not its whole block
    assert_same_bits(other(x), plain.blocks[1].up(x))
    assert_same_bits(copy.deepcopy(packed.embed)(IDS), plain.embed(IDS))


def test_copy_of_a_blob_that_is_a_piece_of_a_larger_tensor(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    weights = {name: it for name, it in packed.named_parameters() if isinstance(it, PackedParameter)}
    blobs = [it.packed.sources[0].blob for it in weights.values()]
    pieces = torch.cat(blobs).split([blob.numel() for blob in blobs])
    state = {
        name: PackedParameter(PackedTensor(Resident(piece, name)))
        for name, piece in zip(weights, pieces, strict=True)
    }
    packed.load_state_dict(state, assign=True, strict=False)
    ours, theirs = (it["blocks.0.up.weight"].packed.sources[0].blob for it in (weights, state))
    assert ours is theirs
    assert len(pickle.dumps(packed.blocks[1].up)) < 20_000
    other = pickle.loads(pickle.dumps(packed))
    assert other.embed.weight is other.head.weight
    assert_same_bits(other(IDS), plain(IDS))
    assert_same_bits(copy.deepcopy(packed)(IDS), plain(IDS))


@pytest.mark.parametrize("how", ["packed", "called", "copied"])
def test_a_model_that_is_dropped_is_freed_at_once(how: str, pair: tuple[Model, Model]) -> None:
    """As a plain one: its weights are in no cycle that garbage collection would have to find."""
    _, packed = pair
    model = copy.deepcopy(packed) if how == "copied" else pack_module(Model().to(torch.bfloat16), min_bytes=0)
    if how != "packed":
        model(IDS)
    refs = [weakref.ref(module) for module in model.modules()]
    refs += [weakref.ref(module.tpde_group()) for name, module in packed_modules(model) if name != "embed"]
    refs += [weakref.ref(parameter) for parameter in model.parameters()] if how != "copied" else []
    with uncollected():
        del model
        assert alive(refs) == []


def test_a_pass_whose_gradients_nobody_wants_leaves_nothing(pair: tuple[Model, Model]) -> None:
    """An operator that saves its result would keep it, were that what the hooks return."""
    _, packed = pair
    results: list[Any] = []
    for block in packed.blocks:
        block.down.register_forward_pre_hook(lambda _, x: results.append(weakref.ref(x[0].untyped_storage())))
    assert packed(IDS).requires_grad
    assert [it() for it in results] == [None] * 3


def test_what_is_kept_of_a_model_that_is_dropped(pair: tuple[Model, Model]) -> None:
    plain, _ = pair
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    block, up, forward = packed.blocks[0], packed.blocks[1].up, packed.blocks[2].forward
    del packed
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert_same_bits(block(x), plain.blocks[0](x))
    assert_same_bits(up(x), plain.blocks[1].up(x))
    assert up.tpde_group() is up.tpde_group()  # made once
    with pytest.raises(ReferenceError, match=r"was deleted, with the model; keep one of them"):
        forward(x)


class Scaled(Block):
    """A block with an attribute of its own."""

    scale = 1.0

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle", "copy of a copy"])
def test_a_copied_block_is_its_own(how: str) -> None:
    plain = Model(block=Scaled).to(torch.bfloat16)
    model = pack_module(copy.deepcopy(plain), min_bytes=0)
    block = model.blocks[0]
    if how == "deepcopy":
        other = copy.deepcopy(block)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(block))
    else:
        other = copy.copy(copy.copy(block)) if how == "copy of a copy" else copy.copy(block)
    other.scale = 2.0
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert_same_bits(other(x), plain.blocks[0](x) * 2)
    assert_same_bits(block(x), plain.blocks[0](x))
    del model, block
    assert_same_bits(other(x), plain.blocks[0](x) * 2)
    assert "__reduce_ex__" not in unpack_module(other).__dict__
    assert_same_bits(copy.copy(other)(x), plain.blocks[0](x) * 2)


def test_a_copied_model_outlives_its_original(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    other = copy.copy(pack_module(copy.deepcopy(packed), min_bytes=0))
    assert_same_bits(other.to("cpu")(IDS), plain(IDS))


def test_a_block_that_is_a_layer_is_copied(pair: tuple[Model, Model]) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64)).to(torch.bfloat16)
    other = copy.copy(pack_module(copy.deepcopy(plain), min_bytes=0)[0])
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert_same_bits(other(x), plain(x))


def test_what_holds_a_blocks_forward_is_copied_with_it(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    holder = torch.nn.Module()
    holder.call = packed.blocks[0].forward
    holder.model = packed
    for other in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        other.model.blocks[0].up.bias.data.zero_()
        x = torch.randn(2, 64, dtype=torch.bfloat16)
        assert_same_bits(other.call(x), other.model.blocks[0](x))
        assert_same_bits(holder.call(x), plain.blocks[0](x))


def theirs(self: Any, x: Any) -> Any:
    """A block's forward pass, of somebody's own."""
    return self.down(torch.relu(self.up(x))) * 3


def unbound(x: Any) -> Any:
    """One that knows no block."""
    return x * 3


@pytest.mark.parametrize(
    ("bound", "how"),  # no module whose attribute is a method of it can be pickled
    [(False, "deepcopy"), (False, "pickle"), (False, "itself"), (True, "deepcopy"), (True, "itself")],
)
def test_somebodys_own_forward_is_copied(bound: bool, how: str) -> None:
    """Bound to the block, or a function."""
    plain = Model().to(torch.bfloat16)
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        block = model.blocks[0]
        block.forward = types.MethodType(theirs, block) if bound else unbound
    pack_module(ours, min_bytes=0)
    ours.blocks[0].forward.mark = "theirs"
    block = {
        "deepcopy": lambda: copy.deepcopy(ours).blocks[0],
        "pickle": lambda: pickle.loads(pickle.dumps(ours)).blocks[0],
        "itself": lambda: ours.blocks[0],
    }[how]()
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert_same_bits(block(x), plain.blocks[0](x))
    assert block.forward.mark == "theirs"
    assert block.forward.group is block.__dict__["tpde_forward"].group
    assert not hasattr(block.forward, "__wrapped__")
    assert list(inspect.signature(block.forward).parameters) == ["x"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_what_others_put_on_a_blocks_forward_is_copied(how: str, pair: tuple[Model, Model]) -> None:
    _, ours = pair
    forward = ours.blocks[0].forward
    forward.mark = "theirs"
    other = copy.deepcopy(ours) if how == "deepcopy" else pickle.loads(pickle.dumps(ours))
    assert other.blocks[0].forward.mark == "theirs"
    assert other.blocks[0].forward is not forward
    assert not hasattr(other.blocks[1].forward, "mark")
    assert not hasattr(forward, "__wrapped__")
    assert list(inspect.signature(other.blocks[0].forward).parameters) == ["x"]


def test_the_tensor_that_compiled_code_waits_for() -> None:
    given = torch.ones(2, requires_grad=True)
    here, elsewhere = given.device, torch.empty(2, device="meta")
    for args, kwargs in (
        ((given,), {}),
        ((1, given, torch.zeros(3)), {}),
        ((None,), {"x": given}),
        ((elsewhere, given), {}),
    ):
        found = first_tensor(args, kwargs, here)
        assert found.data_ptr() == given.data_ptr()
        assert not found.requires_grad
    assert first_tensor((elsewhere,), {}, here).device == here
    with pytest.raises(TypeError, match="called without a tensor"):
        first_tensor((1,), {"x": [given]}, here)


def rebuilt(kind: Any, state: dict[str, Any]) -> Any:
    """A module of a class, with these attributes."""
    made = kind.__new__(kind)
    made.__dict__.update(state)
    return made


class OfAttributes(torch.nn.Sequential):
    """A model that makes copies of itself, and gives `pickle` no state."""

    def __reduce__(self) -> Any:
        return rebuilt, (OfAttributes, vars(self).copy())


class OfSizes(torch.nn.Linear):
    """A layer that does, and fills the copy."""

    def __reduce__(self) -> Any:
        return OfSizes.of, (self.in_features, self.out_features, self.state_dict())

    @staticmethod
    def of(width: int, rows: int, state: dict[str, Any]) -> OfSizes:
        made = OfSizes(width, rows)
        made.load_state_dict(state)
        return made


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "block"])
@pytest.mark.parametrize("kind", ["fx", "attributes", "sizes"])
def test_models_that_rebuild_themselves_are_copied(kind: str, inside: bool, how: str) -> None:
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    plain: Any = {
        "fx": lambda: torch.fx.symbolic_trace(torch.nn.Sequential(*layers)),
        "attributes": lambda: OfAttributes(*layers),
        "sizes": lambda: OfSizes(64, 64),
    }[kind]()
    plain = torch.nn.Sequential(plain, torch.nn.Linear(64, 3)) if inside else plain
    x = torch.randn(5, 64)
    wanted = plain(x)
    packed = pack_module(plain, min_bytes=0)
    make = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}
    other = make[how](packed)
    assert_same_bits(other(x), wanted)
    assert_same_bits(make[how](other)(x), wanted)
    assert_same_bits(unpack_module(other)(x), wanted)
    if how != "copy":  # which shares its modules
        assert_same_bits(packed(x), wanted)


class OfItsName(torch.nn.Sequential):
    """A model that `pickle` looks up by a name."""

    def __reduce__(self) -> str:
        return "BY_NAME"


BY_NAME = OfItsName(torch.nn.Linear(64, 64))


def test_a_model_that_is_known_by_a_name_is_itself_again() -> None:
    pack_module(BY_NAME, min_bytes=0)
    assert copy.deepcopy(BY_NAME) is pickle.loads(pickle.dumps(BY_NAME)) is BY_NAME
