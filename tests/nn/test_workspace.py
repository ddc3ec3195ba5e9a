"""The workspace of a model: nobody has it after a call, and each weight is in its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, Model, X, torch
from support.workspaces import group_of, in_thread, is_free, made
from torch import nn
from torch.nn import functional

from tpde.errors import PackedWeight
from tpde.nn import PackedTensor, finish, pack_module, pack_tensor, replace_parameter
from tpde.weights.source import Source

# ---- who has it ----


def fail(error: type[BaseException]) -> Callable[[Any], None]:
    def within(x: Any) -> None:
        raise error("theirs")

    return within


def nested(model: Any) -> None:
    model.blocks[0].__dict__["within"] = model.blocks[1]
    model(IDS)


def failing(model: Any, error: type[BaseException]) -> None:
    model.blocks[1].__dict__["within"] = fail(error)
    with pytest.raises(error, match="theirs"):
        model(IDS)


def nested_and_failing(model: Any) -> None:
    model.blocks[0].__dict__["within"] = model.blocks[1]
    failing(model, KeyError)


def beside(model: Any, within: Any) -> None:
    model.blocks[0].__dict__["within"] = lambda x: in_thread(lambda: within(model))
    model(IDS)


def beside_and_failing(model: Any) -> None:
    def within(model: Any) -> None:
        with pytest.raises(RuntimeError):
            model.blocks[1].up(torch.zeros(3, 5, dtype=torch.bfloat16))

    beside(model, within)


def refused_hooks(model: Any) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("none"), pytest.raises(RuntimeError, match="none"):
        model(IDS)


def changed(model: Any) -> None:
    model.blocks[0].__dict__["within"] = lambda x: model.blocks[0].up.weight.detach().zero_()
    with pytest.raises(PackedWeight):
        model(IDS)


def called_wrongly(layer: Any) -> None:
    with pytest.raises(RuntimeError):
        layer(torch.zeros(3, 5, dtype=torch.bfloat16))


WAYS: dict[str, Callable[[Any], Any]] = {
    "a pass": lambda model: model(IDS),
    "a backward pass": lambda model: model(IDS).float().sum().backward(),
    "a block within another": nested,
    "an error": lambda model: failing(model, KeyError),
    "an interrupt": lambda model: failing(model, KeyboardInterrupt),
    "an error of a block within another": nested_and_failing,
    "a thread in a block": lambda model: beside(model, lambda it: it.blocks[1].up(X)),
    "an error of a thread in a block": beside_and_failing,
    "a layer of a block": lambda model: model.blocks[0].up(X),
    "an error of a layer of a block": lambda model: called_wrongly(model.blocks[0].up),
    "a layer that is none": lambda model: model.head(X),
    "an error of a layer that is none": lambda model: called_wrongly(model.head),
    "hooks that are refused": refused_hooks,
    "a change that is refused": changed,
    "a transform": lambda model: torch.func.vmap(model.blocks[0])(X),
}


@pytest.mark.parametrize(
    ("way", "gradients"),
    [
        *((way, True) for way in WAYS),
        *((way, False) for way in WAYS if way not in ("a backward pass", "hooks that are refused")),
    ],
)
def test_nobody_has_it_afterwards(way: str, gradients: bool) -> None:
    plain, ours = made()
    with torch.set_grad_enabled(gradients):
        WAYS[way](ours)
    for block in ours.blocks:
        block.__dict__.pop("within", None)
    space = group_of(ours).workspace
    assert (space.depth, space.thread, space.group, space.filled) == (0, 0, None, None)
    assert not space.some
    assert not space.beside
    assert is_free(space.lock)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with torch.no_grad():
        assert_same_bits(in_thread(lambda: torch.no_grad()(ours)(IDS)), plain(IDS))


def test_a_tiled_layer_gives_it_back() -> None:
    _, ours = made()
    ours.head.weight.packed.tile_bytes = 32 << 10
    finish(ours)
    ours.head(X)
    called_wrongly(ours.head)
    space = ours.head.tpde_group().workspace
    assert (space.depth, space.thread, space.group) == (0, 0, None)
    assert is_free(space.lock)


# ---- what is in it ----


@pytest.mark.parametrize("width", [60, 64])
def test_weights_lie_in_the_workspace_side_by_side_at_round_addresses(width: int) -> None:
    """As round as the allocator's own: matrix libraries choose kernels by it."""
    ours = pack_module(Model(width).to(torch.bfloat16), min_bytes=0)
    space = ours.blocks[0].up.tpde_group().workspace
    found: dict[int, list[range]] = {}

    def look(layer: Any, *_: Any) -> None:
        at, size = layer.weight.data_ptr() - space.start, layer.weight.nbytes
        found.setdefault(id(layer.tpde_group()), []).append(range(at, at + size))

    for layer in (it for block in ours.blocks for it in (block.up, block.down)):
        layer.register_forward_pre_hook(look)
    with torch.no_grad():
        ours(IDS)
    assert sorted(len(it) for it in found.values()) == [2, 2, 2]
    for places in found.values():
        assert all(it.start % 512 == 0 for it in places)
        end = 0
        for it in sorted(places, key=lambda it: it.start):
            assert end <= it.start <= it.stop <= space.end - space.start
            end = it.stop


def test_a_weight_that_is_read_twice_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(nn.Conv1d):
        def forward(self, x: Any) -> Any:
            return functional.conv1d(x, self.weight) + functional.conv1d(x, self.weight)

    torch.manual_seed(0)
    plain = Twice(64, 64, 3, bias=False).to(torch.bfloat16)
    ours, decoded = pack_module(copy.deepcopy(plain), min_bytes=0), []
    decode = Source.decode_on_host
    monkeypatch.setattr(
        Source, "decode_on_host", lambda self, *args: (decoded.append(1), decode(self, *args))[1]
    )
    x = torch.randn(1, 64, 9).to(torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(ours(x), plain(x))
    assert len(decoded) == 1


def test_a_weight_of_several_tensors_in_a_block() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(64).to(torch.bfloat16)])
    ours = copy.deepcopy(plain)
    parts = [
        pack_tensor(it.clone(), f"part {n}") for n, it in enumerate(plain[0].up.weight.detach().split(64))
    ]
    sources = [it.sources[0] for it in parts if it is not None]
    replace_parameter(ours, "0.down.weight", pack_tensor(plain[0].down.weight.detach(), "down"))
    replace_parameter(ours, "0.up.weight", PackedTensor(sources, (192, 64)))
    finish(ours)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert_same_bits(ours[0](X), plain[0](X))


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_the_compilers_buffer_holds_weights_of_any_dtypes(dtypes: tuple[str, str]) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(64)])
    plain[0].up.to(getattr(torch, dtypes[0]))
    plain[0].down.to(torch.bfloat16).to(getattr(torch, dtypes[1]))
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    one = ours[0].__dict__["tpde_forward"].group
    flat = one.materialize(torch.empty(0))
    assert flat.dtype is (getattr(torch, dtypes[0]) if len(set(dtypes)) == 1 else torch.uint8)
    assert flat.nbytes == one.pool.capacity
    for name in ("up", "down"):
        slot = getattr(ours[0], name).tpde_slots["weight"]
        assert_same_bits(slot.in_buffer(flat), getattr(plain[0], name).weight)


def test_what_was_derived_from_old_blobs_is_made_anew() -> None:
    """Compiled code finds weights by their keys."""
    _, ours = made()
    slot, one = ours.blocks[0].up.tpde_slots["weight"], group_of(ours)
    slot.packed.tile_bytes = 32 << 10
    before, tiles = (slot.key, one.key), slot.prepare_tiles()
    assert slot.prepare_tiles() is tiles
    torch.manual_seed(5)
    new = pack_tensor(torch.randn(192, 64).bfloat16(), "new")
    assert new is not None
    slot.packed.load(new)
    assert slot.key != before[0]
    assert one.key != before[1]
    assert slot.prepare_tiles() is not tiles
