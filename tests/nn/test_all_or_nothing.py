"""What packed weights refuse leaves a model as it was, whichever module of it was called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Model, torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedParameter, pack_module, pack_tensor, packed_modules, unpack_module


def snapshot(model: Any) -> list[Any]:
    """All values of a model, and where they are."""
    return [(name, it.dtype, it.device, it.detach().clone()) for name, it in model.state_dict().items()]


def unchanged(model: Any, before: list[Any]) -> bool:
    now = snapshot(model)
    return all(
        one[:3] == other[:3] and torch.equal(one[3], other[3]) for one, other in zip(now, before, strict=True)
    )


@pytest.fixture
def whole(pair: tuple[Model, Model]) -> Any:
    """A model of which the last part is packed."""
    parts = {"first": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "packed": copy.deepcopy(pair[0])}
    return pack_module(nn.ModuleDict(parts), min_bytes=256)


@pytest.mark.parametrize(
    "move",
    [
        lambda it: it.half(),
        lambda it: it.to(torch.float64),
        lambda it: it.to("meta"),
        lambda it: it.to_empty(device="cpu"),
    ],
)
def test_moves(move: Any, whole: Any) -> None:
    before = snapshot(whole)
    with pytest.raises(PackedWeight, match=r"packed.*unpack_module"):
        move(whole)
    assert unchanged(whole, before)
    move(unpack_module(whole))


def parts(model: Any) -> dict[str, Any]:
    """What a model's modules are called by: some of them, and what others put around them."""
    return {
        "blocks": model.blocks,
        "slice": model.blocks[:1],
        "block": model.blocks[0],
        "compiled": torch.compile(model, backend="eager"),
        "averaged": AveragedModel(model),
        "around": nn.Sequential(model),
    }


PARTS = ["blocks", "slice", "block", "compiled", "averaged", "around"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "move",
    [
        lambda it: it.half(),
        lambda it: it.to("meta"),
        lambda it: it.to_empty(device="cpu"),
        lambda it: it.load_state_dict(
            {name: torch.ones(to.shape) if to.dim() else to for name, to in it.state_dict().items()}
        ),
        lambda it: it._apply(lambda tensor: tensor.double()),
    ],
    ids=["half", "meta", "to_empty", "load", "apply"],
)
def test_parts_and_what_is_around(part: str, move: Any, pair: tuple[Model, Model]) -> None:
    """Plain weights come first in each, as norms do in blocks."""
    model = pair[1]
    for block in model.blocks:
        block._modules = {"first": nn.LayerNorm(3), **block._modules}
    whole = parts(model)[part]
    before = snapshot(whole)
    with pytest.raises(PackedWeight, match=r"packed.*unpack_module"):
        move(whole)
    assert unchanged(whole, before)
    whole.to("cpu")
    whole.load_state_dict(whole.state_dict())
    assert unchanged(whole, before)


def test_a_model_that_renames_what_it_loads(pair: tuple[Model, Model]) -> None:
    class Renaming(nn.ModuleDict):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict(
                {f"it.{name}": it for name, it in state_dict.items()}, *args, **kwargs
            )

    plain, ours = pair
    whole = Renaming({"it": ours})
    before = snapshot(whole)
    with pytest.raises(PackedWeight, match="nothing of the packed model was loaded"):
        whole.load_state_dict({name: torch.ones_like(it) for name, it in plain.state_dict().items()})
    assert unchanged(whole, before)
    whole.load_state_dict(plain.state_dict())
    assert unchanged(whole, before)


def test_each_weight_is_asked_once(pair: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is decoded for that, and compared with what would be loaded."""
    asked: list[str] = []
    taken = PackedParameter.takes

    def takes(self: Any, value: Any) -> bool:
        asked.append(self.packed.name)
        return taken(self, value)

    monkeypatch.setattr(PackedParameter, "takes", takes)
    for _ in range(2):
        asked.clear()
        pair[1].load_state_dict(pair[0].state_dict())
        held = [slot.packed.name for _, it in packed_modules(pair[1]) for slot in it.tpde_slots.values()]
        assert sorted(asked) == sorted(held * 2), "before, and where it is loaded"


def test_a_layer_refuses_for_itself(pair: tuple[Model, Model]) -> None:
    layer = pair[1].blocks[0].up
    before = snapshot(layer)
    with pytest.raises(PackedWeight, match="cannot be cast"):
        layer.half()
    assert unchanged(layer, before)


@pytest.mark.parametrize("assign", [False, True])
def test_other_values_are_refused_before_any_is_loaded(assign: bool, whole: Any) -> None:
    before = snapshot(whole)
    other = {name: torch.ones_like(it.detach().clone()) for name, it in whole.state_dict().items()}
    with pytest.raises(
        PackedWeight, match=r"`packed\.embed\.weight`.*nothing of .* was loaded.*unpack_module"
    ):
        whole.load_state_dict(other, assign=assign)
    assert unchanged(whole, before)
    layer = whole["packed"].blocks[0].up
    with pytest.raises(PackedWeight, match=r"`packed\.blocks\.0\.up\.weight`.*nothing of .* was loaded"):
        layer.load_state_dict({"weight": torch.ones(192, 64), "bias": torch.ones(192)}, assign=assign)
    assert unchanged(whole, before)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("how", ["whole", "layer", "positional"])
def test_values_of_another_dtype_are_not_assigned(how: str, around: bool, whole: Any) -> None:
    """The biases would be of that dtype then."""
    before = snapshot(whole)
    model = whole["packed"].blocks[0].up if how == "layer" else whole
    state = {name: it.detach().float() for name, it in model.state_dict().items()}
    if around:
        model, state = nn.ModuleDict({"it": model}), {f"it.{name}": it for name, it in state.items()}
    args: Any = (state, True, True) if how == "positional" else (state,)
    kwargs = {} if how == "positional" else {"assign": True}
    error = PackedWeight
    if around and how == "layer":  # PyTorch's, by then with what it loaded before
        error = RuntimeError
    with pytest.raises(error, match=r"packed as torch.bfloat16 on cpu, and torch.float32 on cpu would be"):
        model.load_state_dict(*args, **kwargs)
    if error is PackedWeight:
        assert unchanged(whole, before)
        model.load_state_dict(state)
        assert unchanged(whole, before)
        model.load_state_dict(
            {name: it.detach().clone() for name, it in model.state_dict().items()}, assign=True
        )
        assert unchanged(whole, before)


def test_a_packed_weight_that_is_not_alike_is_refused_before_any_is_loaded(whole: Any) -> None:
    before = snapshot(whole)
    other = pack_tensor(torch.randn(64, 64).bfloat16(), "other")
    assert other is not None
    state = {name: torch.zeros_like(it.detach().clone()) for name, it in whole.state_dict().items()}
    state["packed.embed.weight"] = PackedParameter(other)
    with pytest.raises(InvalidInput, match="packed alike"):
        whole.load_state_dict(state)
    assert unchanged(whole, before)


def test_a_state_dict_that_hooks_change_is_theirs(pair: tuple[Model, Model]) -> None:
    """As those that rename what older versions of a model had."""
    plain, ours = pair
    state = {name: it.detach() * 2 for name, it in plain.state_dict().items()}

    def halve(module: Any, state_dict: Any, *_: Any) -> None:
        for name in list(state_dict):
            state_dict[name] = state_dict[name] / 2

    ours.register_load_state_dict_pre_hook(halve)
    ours.load_state_dict(state)
    assert_same_bits(ours(IDS), plain(IDS))


class Renames(nn.Sequential):
    """Knows the names that an older version of it had."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _rename(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _rename(_: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name in [it for it in state_dict if it.startswith(f"{prefix}old.")]:
        state_dict[prefix + name.removeprefix(f"{prefix}old.")] = state_dict.pop(name)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("kind", [nn.Sequential, Renames])
def test_old_names_are_refused_before_anything_beneath_is_loaded(kind: Any, around: bool) -> None:
    made = kind(nn.LayerNorm(64), nn.Linear(64, 64))
    if kind is nn.Sequential:
        made.register_load_state_dict_pre_hook(_rename)
    model = pack_module(nn.Sequential(made) if around else made, min_bytes=0)
    before = snapshot(model)
    old = {it.replace("0.", "0.old.", 1) if around else f"old.{it}": value for it, *_, value in before}
    model.load_state_dict(old)
    with pytest.raises(PackedWeight, match="nothing of the packed model was loaded"):
        model.load_state_dict({it: 2 * value for it, value in old.items()})
    assert unchanged(model, before)


def test_models_that_hold_nothing_packed_are_asked_nothing() -> None:
    before = nn.Module._apply, nn.Module.load_state_dict, nn.Module._load_from_state_dict
    pack_module(nn.Sequential(nn.Linear(64, 64)), min_bytes=0)
    assert (nn.Module._apply, nn.Module.load_state_dict, nn.Module._load_from_state_dict) == before


@pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm`:FutureWarning", "ignore:`?torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize(
    "work",
    [
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
        lambda layer: prune.identity(layer, "weight"),
        lambda layer: prune.custom_from_mask(layer, "weight", torch.ones(64, 64)),
        lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.2),
        torch.jit.script,
        lambda layer: torch.jit.script(nn.Sequential(layer)),
    ],
)
def test_a_layer_that_refuses_is_as_it_was(work: Any) -> None:
    plain = nn.Linear(64, 64).bfloat16().float()
    layer = pack_module(copy.deepcopy(plain), min_bytes=0)
    attributes, hooks = set(layer.__dict__), len(layer._forward_pre_hooks)
    with pytest.raises(PackedWeight, match=r"`weight`.*packed.*unpack_module"):
        work(layer)
    assert list(layer._parameters) == ["weight", "bias"]
    assert not layer._buffers
    assert len(layer._forward_pre_hooks) == hooks
    assert set(layer.__dict__) == attributes
    x = torch.randn(3, 64)
    assert_same_bits(layer(x), plain(x))
    layer.register_parameter("weight_scale", nn.Parameter(torch.ones(1)))  # somebody else's
    assert_same_bits(unpack_module(layer)(x), plain(x))


def test_unpacking_keeps_ties(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    with pytest.raises(PackedWeight, match=r"`embed\.weight` is tied.*holds both"):
        unpack_module(ours.head)
    assert ours.head.weight is ours.embed.weight
    assert isinstance(ours.head.weight, PackedParameter)
    assert_same_bits(ours(IDS), plain(IDS))
    unpack_module(ours.blocks)  # those that are tied to nothing
    unpack_module(ours)
    assert ours.head.weight is ours.embed.weight
    layer = pack_module(copy.deepcopy(plain), min_bytes=0).head
    unpack_module(layer)  # the other one is gone
    assert type(layer.weight) is nn.Parameter
