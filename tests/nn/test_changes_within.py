"""Weights that a forward pass changes, or a hook in it: a change would be lost in silence, and is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch
from torch import nn
from torch.nn import functional

from tpde.errors import PackedWeight
from tpde.nn import pack_module


def _set(weight: Any, name: str, value: Any) -> None:
    setattr(weight, name, value)


CHANGES = {
    "mul_": lambda weight: weight.mul_(2),
    "+=": lambda weight: weight.__iadd__(1),
    "/=": lambda weight: weight.__itruediv__(2),
    "[]": lambda weight: weight.__setitem__(0, 1.0),
    "data =": lambda weight: _set(weight, "data", weight.detach() * 2),
    "data.mul_": lambda weight: weight.data.mul_(2),
    "data[]": lambda weight: weight.data[0].zero_(),
    "init": nn.init.zeros_,
    "detach": lambda weight: weight.detach().mul_(2),
    "view": lambda weight: weight.t()[3].zero_(),
    "out": lambda weight: torch.mul(torch.ones(192, 64).bfloat16(), 2, out=weight.detach()),
    "function": lambda weight: functional.relu(weight.detach(), inplace=True),
    "foreach": lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
}


class Changes(Block):
    """Calls something with its weight before it computes."""

    change: Any = staticmethod(lambda weight: None)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.change(self.up.weight)
        return super().forward(x)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_refused_by_name(name: str, trained: bool) -> None:
    torch.manual_seed(0)
    plain = Model(block=Changes).to(torch.bfloat16).requires_grad_(trained)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    ours.blocks[1].change = CHANGES[name]
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(PackedWeight, match=r"`blocks\.1\.up\.weight`"):
            ours(IDS)
    del ours.blocks[1].change
    for _ in range(2):
        assert_same_bits(ours(IDS), plain(IDS))


def test_a_layer_alone(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    hook = layer.register_forward_pre_hook(lambda it, _: it.weight.detach().mul_(2))
    x = torch.randn(2, 64).bfloat16()
    conv = nn.Conv1d(64, 64, 3).bfloat16()
    packed = pack_module(copy.deepcopy(conv), min_bytes=0)
    with torch.no_grad():
        # Hooks of a layer that is called alone get the packed weight: a change of its copy is refused there.
        with pytest.raises(PackedWeight, match=r"blocks\.0\.up\.weight"):
            layer(x)
        hook.remove()
        assert_same_bits(layer(x), plain.blocks[0].up(x))
    assert_same_bits(packed(torch.ones(1, 64, 9).bfloat16()), conv(torch.ones(1, 64, 9).bfloat16()))


def test_a_weight_of_another_block() -> None:
    class Reaches(Block):
        def forward(self, x: Any) -> Any:
            if "other" in self.__dict__:
                self.__dict__["other"].up.weight.mul_(2)
            return super().forward(x)

    ours = pack_module(Model(block=Reaches).to(torch.bfloat16), min_bytes=0)
    ours.blocks[0].__dict__["other"] = ours.blocks[1]
    with torch.no_grad(), pytest.raises(PackedWeight, match=r"`blocks\.1\.up\.weight`"):
        ours(IDS)


def test_what_is_read_is_ordinary(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    first = f"{plain.blocks[0].up.weight[0, 0]:.3f}"
    found: list[Any] = []

    def look(layer: Any, *_: Any) -> None:
        weight = layer.weight
        assert not torch.overrides.has_torch_function((weight,))
        assert all(f"{it[0, 0]:.3f}" == first for it in (weight, weight.detach(), weight.data))
        found.extend([copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))])
        found.extend([copy.deepcopy(weight.detach()), pickle.loads(pickle.dumps(weight.detach()))])
        found.extend([weight * 1, weight.clone(), weight.data.clone(), weight.t().contiguous().t()])

    ours.blocks[0].up.register_forward_pre_hook(look)
    with torch.no_grad():
        ours(IDS)
    weight = plain.blocks[0].up.weight.detach()
    for it in found:
        assert type(it) is torch.Tensor
        assert_same_bits(it.contiguous(), weight)
        it.zero_()
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))


@pytest.mark.parametrize(
    "array",
    [
        lambda weight: weight.numpy(force=True),
        lambda weight: weight.detach().numpy(),
        lambda weight: weight.data.t().numpy(),
        lambda weight: np.asarray(weight.detach()),
    ],
)
def test_arrays_are_read_only(array: Any) -> None:
    class Array(Block):
        def forward(self, x: Any) -> Any:
            array(self.up.weight)[0] = 1
            return super().forward(x)

    ours = pack_module(Model(block=Array).bfloat16().float(), min_bytes=0)
    with pytest.raises(ValueError, match="read-only"):
        ours(IDS)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_functions_take_weights() -> None:
    class Compiled(Block):
        def forward(self, x: Any) -> Any:
            return torch.compile(functional.linear, backend="eager")(self.norm(x), self.up.weight)

    torch.manual_seed(0)
    plain = nn.ModuleList([Compiled(64)]).to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(3, 64).bfloat16()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert_same_bits(ours[0](x), plain[0](x))


def test_what_changes_no_values_is_allowed(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    data: list[Any] = []

    def look(layer: Any, *_: Any) -> None:
        weight = layer.weight
        weight.grad = None
        weight.detach().requires_grad_(False)
        data.append(weight.data)

    ours.requires_grad_(False)
    ours.blocks[0].up.register_forward_pre_hook(look)
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.up\.weight`.*`zero_`"):
        data[0].zero_()


@pytest.mark.parametrize("where", ["inference", "no_grad", "grad"])
def test_weights_are_ordinary_in_any_mode(where: str, pair: tuple[Model, Model]) -> None:
    """Whoever keeps one may use it elsewhere."""
    plain, ours = pair
    kept: list[Any] = []
    ours.blocks[0].up.register_forward_pre_hook(lambda layer, _: kept.append(layer.weight))
    mode = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}[where]
    with mode():
        ours(IDS)
        ours.blocks[0](torch.zeros(2, 64).bfloat16())
    for weight in kept:
        assert not weight.is_inference()
        assert weight.requires_grad
        x = torch.ones(2, 64).bfloat16().requires_grad_()
        functional.linear(x, weight).float().sum().backward()
        assert weight.grad is None
        expected = torch.ones(2, 64).bfloat16().requires_grad_()
        functional.linear(expected, plain.blocks[0].up.weight).float().sum().backward()
        assert_same_bits(x.grad, expected.grad)


class Rewrites(nn.Conv1d):
    """Changes its weight, and may fail after that."""

    fails = False

    def forward(self, x: Any) -> Any:
        self.weight.detach().mul_(2)
        if self.fails:
            raise KeyError("theirs")
        return super().forward(x)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("block", [False, True])
def test_changes_are_refused_also_where_the_pass_fails(block: bool, fails: bool) -> None:
    """By a layer that is called alone, and by one in a block."""
    model = nn.ModuleList([nn.Sequential(Rewrites(64, 64, 3))]) if block else Rewrites(64, 64, 3)
    ours = pack_module(model.to(torch.bfloat16), min_bytes=0)
    layer = ours[0][0] if block else ours
    layer.fails = fails
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(PackedWeight, match="weight` is packed"):
            (ours[0] if block else ours)(torch.ones(1, 64, 9).bfloat16())
    space = layer.tpde_group().workspace
    assert (space.depth, space.thread) == (0, 0)
