"""Packed modules behave as modules: called in parts, alone, one within another, read, shared by threads."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import IDS, Model
from torch import nn

from tpde.errors import PackedWeight
from tpde.nn import PackedParameter, finish, pack_module


def test_tied_weights_are_one_blob(pair: tuple[Model, Model]) -> None:
    _, packed = pair
    assert packed.embed.weight is packed.head.weight
    blobs = {id(it.packed) for it in packed.parameters() if isinstance(it, PackedParameter)}
    assert len(blobs) == 7


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("grad", [False, True])
def test_a_bias_may_be_replaced(grad: bool, pair: tuple[Model, Model]) -> None:
    for model in pair:
        torch.nn.utils.parametrize.register_parametrization(model.blocks[1].up, "bias", _Twice())
    plain, packed = pair
    with torch.set_grad_enabled(grad):
        assert_same_bits(packed(IDS), plain(IDS))
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    assert_same_bits(packed.blocks[1].up(x), plain.blocks[1].up(x))


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_that_is_no_blocks(own: bool, pair: tuple[Model, Model]) -> None:
    """Called alone it is decoded like a block, within one it leaves the block's weights where they are."""
    plain, packed = pair
    x = torch.randn(3, plain.head.in_features).to(torch.bfloat16)
    if own:
        assert_same_bits(packed.head(x), plain.head(x))
        space = packed.head.tpde_slots["weight"].group.workspace
        assert (space.thread, space.filled, space.depth) == (0, None, 0)
        return
    results = []
    for model in pair:
        block = model.blocks[1]
        found: list[torch.Tensor] = []
        block.down.register_forward_pre_hook(lambda *_, m=model, f=found: f.append(m.head(x)))
        found.append(model(IDS))
        results.append(found)
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_parts_called_on_their_own(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert_same_bits(packed.blocks[2](x), plain.blocks[2](x))
    assert_same_bits(packed.blocks[2].up(x), plain.blocks[2].up(x))
    assert_same_bits(packed.head(x), plain.head(x))


def test_a_block_inside_another(pair: tuple[Model, Model]) -> None:
    """A view that a block holds is not overwritten by what it calls."""
    plain, packed = pair

    class Outer(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.own = nn.ModuleList([Holder(model)])

        def forward(self, x: Any) -> Any:
            return self.own[0](x)

    class Holder(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.first = model.blocks[0].up
            self.shared = (model.blocks[1], model.head)  # in a tuple: not its children

        def forward(self, x: Any) -> Any:
            held = self.first.weight
            y = self.shared[0](x)
            logits = self.shared[1](y)
            return nn.functional.linear(y, held), self.first(y), logits

    x = torch.randn(2, 64, dtype=torch.bfloat16)
    expected = Outer(plain)(x)
    outer = finish(Outer(packed))
    assert_same_bits(list(outer(x)), list(expected))


def test_other_errors_leave_no_scope_open(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    with pytest.raises(RuntimeError):
        packed.blocks[0](torch.zeros(3, 5, dtype=torch.bfloat16))

    def fail(module: Any, args: Any) -> None:
        raise KeyError("theirs")

    hook = packed.blocks[0].register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(KeyError, match="theirs"):
        packed(IDS)
    hook.remove()
    assert not packed.blocks[0].up.tpde_group().workspace.depth
    assert_same_bits(packed(IDS), plain(IDS))


def test_reading_a_weight_from_outside(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for path in ("embed", "blocks.1.up", "head"):
        weight = packed.get_submodule(path).weight
        assert_same_bits(weight, plain.get_submodule(path).weight, path)
        assert isinstance(weight, nn.Parameter)
        assert not weight.requires_grad
        assert (weight.shape, weight.device.type) == (plain.get_submodule(path).weight.shape, "cpu")
        assert type(weight + 1) is torch.Tensor
        assert type(weight.clone()) is torch.Tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.data.add_(1),
        lambda m: m.weight.mul_(2),
        lambda m: exec("m.weight.data += 1", {"m": m}),
        lambda m: exec("m.weight.data = m.weight.data + 1", {"m": m}),
        lambda m: m.weight.__setitem__(0, 0),
        lambda m: m.weight.copy_(torch.zeros_like(m.weight)),
        lambda m: torch.add(m.weight, 1, out=m.weight),
        lambda m: nn.init.normal_(m.weight),
        lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(192, 64))),
    ],
)
def test_changing_a_weight_is_refused(pair: tuple[Model, Model], change: Any) -> None:
    plain, packed = pair
    with torch.no_grad(), pytest.raises(PackedWeight, match="unpack_module"):
        change(packed.blocks[0].up)
    assert_same_bits(packed(IDS), plain(IDS))


def test_threads(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    ids = [torch.randint(0, 200, (n, 9)) for n in range(1, 5)]
    with torch.no_grad():
        expected = [plain(it) for it in ids]
    wrong: list[Any] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(15):
                try:
                    assert_same_bits(packed(ids[number]), expected[number])
                except BaseException as error:
                    wrong.append(error)
                    return

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_others_of_a_modules_class_are_plain(pair: tuple[Model, Model]) -> None:
    """As adapters make them."""
    plain, ours = pair
    for module, args in ((ours.blocks[0].up, (3, 4)), (ours.embed, (3, 4))):
        made = type(module)(*args, dtype=torch.float64)
        assert type(made) is module.tpde_base
        assert made.weight.dtype is torch.float64
    assert type(plain.embed) is ours.embed.tpde_base


class Two(nn.Module):
    """Two fused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 32).bfloat16())
        self.down = nn.Parameter(torch.randn(4, 32, 64).bfloat16())

    def forward(self, x: Any) -> Any:
        return (x @ self.up[1]) @ self.down[2]


def test_a_module_of_two_packed_parameters() -> None:
    torch.manual_seed(0)
    plain = Two()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    assert list(ours.tpde_slots) == ["up", "down"]
    x = torch.randn(3, 64).bfloat16()
    assert_same_bits(ours(x), plain(x))
    assert repr(ours).startswith("PackedTwo(packed=0.")
    again = pickle.loads(pickle.dumps(ours))
    assert list(again.tpde_slots) == ["up", "down"]
    assert_same_bits(again(x), plain(x))
