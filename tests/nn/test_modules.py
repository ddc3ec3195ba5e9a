"""Packed modules behave as modules: called in parts, saved, loaded, wrapped, read, shared by threads."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import re
import threading
import weakref
from typing import Any

import pytest
from support.card import Card
from support.models import assert_same_bits, torch
from support.small import IDS, Model
from torch import nn

import tpde
from tpde.errors import Corrupt, InvalidInput, OutOfMemory, PackedWeight
from tpde.format.constants import ALIGN_BLOB
from tpde.nn import (
    PackedModule,
    PackedParameter,
    PackedTensor,
    finish,
    pack_module,
    pack_tensor,
    packed_modules,
    plain_state_dict,
    replace_parameter,
    supports,
    unpack_module,
)
from tpde.nn.modules import is_conv1d
from tpde.nn.replace import prepare_rows
from tpde.nn.workspace import Workspace


def test_what_is_packed(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    names = [name for name, _ in packed_modules(packed)]
    assert names == ["embed", *(f"blocks.{i}.{n}" for i in range(3) for n in ("up", "down")), "head"]
    assert isinstance(packed.blocks[0].up, nn.Linear)
    assert isinstance(packed.embed, nn.Embedding)
    assert "packed=0." in repr(packed.blocks[0].up)
    kinds = {name: type(parameter) for name, parameter in packed.named_parameters()}
    assert [name for name, kind in kinds.items() if kind is nn.Parameter] == [
        f"blocks.{i}.{name}" for i in range(3) for name in ("norm.weight", "norm.bias", "up.bias")
    ]
    assert list(kinds) == [name for name, _ in plain.named_parameters()]
    assert list(packed.state_dict()) == list(plain.state_dict())
    assert set(kinds.values()) == {nn.Parameter, PackedParameter}


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


def test_tied_weights_are_one_blob(pair: tuple[Model, Model]) -> None:
    _, packed = pair
    assert packed.embed.weight is packed.head.weight
    blobs = {id(it.packed) for it in packed.parameters() if isinstance(it, PackedParameter)}
    assert len(blobs) == 7


def blob_of(parameter: Any) -> Any:
    """The blob of a weight of one source."""
    (source,) = parameter.packed.sources
    return source.blob


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


def test_a_blocks_forward_has_its_own_signature(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    assert inspect.signature(packed.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)


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


def test_a_tensor_packed_alone_is_the_same_whatever_the_threads() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 200).bfloat16()
    one, three = (pack_tensor(weight, "w", threads) for threads in (1, 3))
    assert one is not None
    assert three is not None
    assert torch.equal(one.sources[0].blob, three.sources[0].blob)
    assert (one.name, one.dtype, tuple(one.shape), one.device) == (
        "w",
        weight.dtype,
        (300, 200),
        weight.device,
    )
    assert one.packed_bytes < weight.nbytes
    assert_same_bits(one.decoded(), weight)
    noise = torch.empty(64, 64)
    noise.view(torch.int32).random_(-(2**31), 2**31 - 1)
    assert pack_tensor(noise, "noise") is None


def test_weights_smaller_than_asked_for_stay_plain() -> None:
    sizes = {"0": 64 * 64 * 4, "1": 64 * 32 * 4}
    for least, expected in (
        (0, ["0", "1"]),
        (sizes["1"] + 1, ["0"]),
        (sizes["0"], ["0"]),
        (sizes["0"] + 1, []),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        assert pack_module(model, min_bytes=least) is model
        assert [name for name, _ in packed_modules(model)] == expected


def test_tied_weights_share_memory_in_a_plain_state_dict(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    found = plain_state_dict(packed)
    assert list(found) == list(plain.state_dict())
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    kept = [it.data_ptr() for name, it in found.items() if name != "head.weight"]
    assert len(set(kept)) == len(kept)


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


def test_casts_are_refused(pair: tuple[Model, Model]) -> None:
    plain, packed = pair
    for cast in (lambda m: m.half(), lambda m: m.to(torch.float32), lambda m: m.double()):
        with pytest.raises(
            PackedWeight, match=r"`embed.weight` is packed as torch.bfloat16 and cannot be cast"
        ):
            cast(packed)
    assert_same_bits(packed.to(torch.bfloat16)(IDS), plain(IDS))


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


class Scaled(nn.Embedding):
    """As several models have it."""

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * 8.0


class Direct(nn.Embedding):
    """Reads its weight instead."""

    def forward(self, ids: Any) -> Any:
        return nn.functional.embedding(ids, self.weight)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Direct])
@pytest.mark.parametrize("shape", [(300, 64), (33, 1000), (5000, 12), (40, 8192), (40, 20000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings(kind: type, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    table = kind(*shape).to(dtype)
    draw = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, shape[0], size, generator=draw) for size in ((3, 50), (1,), (0,), ())]
    batches += [torch.tensor([shape[0] - 1, 0]), torch.arange(20, dtype=torch.int32)]
    with torch.no_grad():
        expected = [table(ids) for ids in batches]
    pack_module(table, min_bytes=0)
    assert isinstance(table, PackedModule)
    assert_same_bits([table(ids) for ids in batches], expected)
    for bad in (-1, shape[0]):
        with pytest.raises(IndexError):
            table(torch.tensor([0, bad]))


def test_an_embedding_decodes_only_the_rows_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.weights.resident import Resident

    table = pack_module(nn.Embedding(4000, 256).to(torch.bfloat16))
    spans: list[int] = []
    decode = Resident.decode_on_host
    monkeypatch.setattr(
        Resident, "decode_on_host", lambda self, a, b, out: spans.append(b - a) or decode(self, a, b, out)
    )
    table(torch.tensor([[3, 2000, 3, 3999]]))
    assert sum(spans) == 3 * 512


def test_constant_weights() -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64, bias=False))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[1].weight, -0.25)
    expected = model(IDS)
    pack_module(model, min_bytes=0)
    assert len(list(packed_modules(model))) == 2
    assert_same_bits(model(IDS), expected)
    with pytest.raises(IndexError):
        model(torch.tensor([50]))


def test_what_is_left_plain() -> None:
    assert not supports(nn.LayerNorm(64), "weight")
    assert not supports(nn.Linear(8, 8), "bias")
    assert not supports(nn.Embedding(8, 8, max_norm=1.0), "weight")
    assert supports(nn.Conv1d(8, 8, 3), "weight")
    mixed = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))
    pack_module(mixed, min_bytes=0)
    assert [name for name, _ in packed_modules(mixed)] == ["0"]
    turned = nn.Linear(64, 64)
    turned.weight = nn.Parameter(turned.weight.detach().t())
    pack_module(turned, min_bytes=0)
    assert type(turned) is nn.Linear
    noise = nn.Linear(64, 64)
    noise.weight.data.view(torch.int32).random_(-(2**31), 2**31 - 1)
    pack_module(noise, min_bytes=0)
    assert type(noise) is nn.Linear


def test_a_model_of_which_nothing_is_packed_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    turned, noise, tiny = nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
    turned.weight = nn.Parameter(turned.weight.detach().t())
    noise.weight.data.view(torch.int32).random_(-(2**31), 2**31 - 1)
    frozen = nn.Sequential(nn.LSTM(64, 64).requires_grad_(False), tiny)  # of which the adapter alone could be
    for model, least, said in (
        (nn.Linear(64, 63), None, r"smaller than `min_bytes=16384` \(1\), of layers that keep .* \(1\)"),
        (turned, 0, "no contiguous tensors of floats"),
        (noise, 0, "such that they would not shrink"),
        (frozen, 0, r"are of layers that keep .* \(5\), trained, where most of the model is frozen \(1\)"),
        (nn.LayerNorm(64), 0, "nothing of the LayerNorm was packed: its parameters are of layers that keep"),
        (nn.ReLU(), 0, "no parameters"),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", "tpde"):
            pack_module(model, **({} if least is None else {"min_bytes": least}))
        (record,) = caplog.records
        assert re.search(said, record.getMessage()), record.getMessage()
        assert not list(packed_modules(model))
    caplog.clear()
    for _ in range(2):  # what is packed already is
        pack_module(tiny, min_bytes=0)
    assert not caplog.records


class Experts(nn.Module):
    """A fused tensor, as mixture-of-experts models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 96, 64) * 0.02)

    def forward(self, x: Any, number: int) -> Any:
        return nn.functional.linear(x, self.gate_up_proj[number])


def test_replacing_on_the_meta_device() -> None:
    torch.manual_seed(3)
    plain = nn.ModuleDict({"experts": Experts(), "out": nn.Linear(64, 64)})
    with torch.device("meta"):
        model = nn.ModuleDict({"experts": Experts(), "out": nn.Linear(64, 64, bias=False)})
    sources = []
    for number in range(4):
        for half in range(2):
            piece = plain["experts"].gate_up_proj[number, 48 * half : 48 * (half + 1)].detach().contiguous()
            packed = pack_tensor(piece, f"experts.{number}.w{half}")
            assert packed is not None
            sources += packed.sources
    replace_parameter(model, "experts.gate_up_proj", PackedTensor(sources, (4, 96, 64)))
    replace_parameter(model, "out.weight", pack_tensor(plain["out"].weight.detach(), "out.weight"))
    finish(model)
    x = torch.randn(3, 64)
    for number in range(4):
        assert_same_bits(model["experts"](x, number), plain["experts"](x, number))
    assert list(model.state_dict()) == ["experts.gate_up_proj", "out.weight"]
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert_same_bits(again["experts"](x, 2), plain["experts"](x, 2))
    assert_same_bits(plain_state_dict(model)["experts.gate_up_proj"], plain["experts"].gate_up_proj)


def test_replacing_what_does_not_fit() -> None:
    torch.manual_seed(0)  # few numbers, which do not always shrink
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(64))
    packed = pack_tensor(torch.randn(64, 32), "it")
    with pytest.raises(InvalidInput, match=r"shape \[32, 64\], the packed weight .*shape \[64, 32\]"):
        replace_parameter(model, "0.weight", packed)
    with pytest.raises(InvalidInput, match=r"no parameter `2.weight`"):
        replace_parameter(model, "2.weight", packed)
    with pytest.raises(InvalidInput, match=r"no parameter `0.wight`"):
        replace_parameter(model, "0.wight", packed)
    with pytest.raises(InvalidInput, match="LayerNorm cannot be packed"):
        replace_parameter(model, "1.weight", packed)
    half = pack_tensor(torch.randn(16, 64), "half")
    with pytest.raises(InvalidInput, match="has 8192 bytes, its parts have 4096"):
        PackedTensor(half.sources, (32, 64))
    with pytest.raises(InvalidInput, match="one source at least"):
        PackedTensor([])
    other = pack_tensor(torch.randn(160, 64).half(), "other")
    with pytest.raises(InvalidInput, match=r"`other` holds torch.float16, `half` torch.float32"):
        PackedTensor([*half.sources, *other.sources], (32, 64))
    with pytest.raises(InvalidInput, match=r"torch.float64"):
        replace_parameter(model, "0.weight", pack_tensor(torch.randn(32, 64).double(), "double"))
    assert type(model[0]) is nn.Linear


def test_workspace_is_the_largest_block(pair: tuple[Model, Model]) -> None:
    _, packed = pair
    sizes = {
        id(m.tpde_group()): m.tpde_group().nbytes for name, m in packed_modules(packed) if name != "embed"
    }
    assert sorted(sizes.values()) == [200 * 128, *[2 * 192 * 128] * 3]
    assert packed.head.tpde_group().workspace.buffer.numel() == 2 * 192 * 128


def test_a_workspace_is_not_given_back_before_another_stream_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator knows only the stream on which the memory was taken."""

    class Stream:
        def __init__(self) -> None:
            self.waited: list[Any] = []

        def wait_stream(self, other: Any) -> None:
            self.waited.append(other)

    empty = torch.empty

    class Buffer:
        def __init__(self, nbytes: int, **_: Any) -> None:
            self.nbytes, self.recorded, self.data = nbytes, list[Any](), empty(0)

        def numel(self) -> int:
            return self.nbytes

        def data_ptr(self) -> int:
            return 1 << 20

        def untyped_storage(self) -> Any:
            return empty(0).untyped_storage()

        def record_stream(self, stream: Any) -> None:
            self.recorded.append(stream)

    loading, computing = Stream(), Stream()
    monkeypatch.setattr(torch, "empty", Buffer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def enter(stream: Stream) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: id(stream), raising=False)

    enter(loading)
    space = Workspace(torch.device("cuda", 0))
    space.reserve(1024)
    alone: Any = space.buffer
    assert space.release() == 1024
    assert alone.recorded == [], "one stream is the allocator's own"
    space.reserve(1024)
    buffer: Any = space.buffer
    enter(computing)
    space.order()
    assert computing.waited == [loading]
    assert space.release() == 1024
    assert buffer.recorded == [computing]


# ---- what is packed, and what is not ----


class Holds(nn.Module):
    """Holds a parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.it = parameter

    def forward(self, x: Any) -> Any:
        return self.it.sum() + x


def test_which_parameters_can_be_packed() -> None:
    fused = torch.randn(4, 32, 32).bfloat16()
    assert supports(Holds(nn.Parameter(fused)), "it")
    assert not supports(Holds(nn.Parameter(fused[:1])), "it")
    assert not supports(Holds(nn.Parameter(fused[0])), "it")
    assert not supports(Holds(nn.Parameter(fused[None])), "it")
    assert not supports(Holds(nn.Parameter(fused)), "other")
    assert not supports(nn.Bilinear(4, 4, 4), "weight")
    assert not supports(nn.Linear(4, 4, bias=False), "bias")
    assert not supports(nn.Conv2d(4, 4, 3), "bias")
    assert not supports(nn.Embedding(8, 8, sparse=True), "weight")
    assert supports(nn.Embedding(8, 8), "weight")
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear):
        assert supports(kind(4, 4, 3), "weight")
    assert not supports(nn.ConvTranspose2d(4, 4, 3), "weight")


def test_only_transformers_own_turned_layers_are_taken_for_such() -> None:
    theirs = type("Conv1D", (nn.Module,), {})
    assert not is_conv1d(theirs)
    theirs.__module__ = "transformers.pytorch_utils"
    assert is_conv1d(theirs)
    assert not is_conv1d(type("Other", (nn.Module,), {"__module__": "transformers.pytorch_utils"}))


class Kind(nn.Parameter):
    """Somebody's own."""


@pytest.mark.parametrize(
    "make",
    [
        Kind,
        lambda values: nn.Parameter(values.transpose(1, 2)),
        lambda values: nn.Parameter((values * 100).to(torch.int32), requires_grad=False),
        lambda values: nn.Parameter(values.to("meta")),
        lambda values: nn.Parameter(values.to_sparse()),
        lambda values: nn.Parameter(values.to(torch.complex64)),
    ],
    ids=["class", "strides", "integers", "meta", "sparse", "complex"],
)
def test_parameters_of_other_kinds_stay_as_they_are(make: Any) -> None:
    parameter = make(torch.randn(4, 32, 32).bfloat16().float())
    model = pack_module(Holds(parameter), min_bytes=0)
    assert type(model) is Holds
    assert model.it is parameter


def test_a_parameter_is_packed_if_all_who_hold_it_can() -> None:
    layer = nn.Linear(32, 32, bias=False).bfloat16()
    for holders in ([layer, Holds(layer.weight)], [Holds(layer.weight), layer]):
        assert [*packed_modules(pack_module(nn.Sequential(*holders), min_bytes=0))] == []
    assert len([*packed_modules(pack_module(nn.Sequential(layer, layer), min_bytes=0))]) == 1


@pytest.mark.parametrize("trained", [200, 320, 440])
def test_the_smaller_part_is_trained(trained: int) -> None:
    """As adapters are; of two halves, both are packed."""
    model = nn.ModuleList([nn.Linear(64, size, bias=False) for size in (trained, 640 - trained)])
    model[1].requires_grad_(False)
    pack_module(model.bfloat16(), min_bytes=0)
    kinds = [isinstance(it.weight, PackedParameter) for it in model]
    assert kinds == [trained >= 320, True]


def test_parts_of_a_tied_weight_are_counted_once() -> None:
    model = nn.ModuleList([nn.Linear(64, 20, bias=False), *(nn.Linear(64, 30, bias=False) for _ in range(3))])
    model[0].requires_grad_(False)
    for layer in model[2:]:
        layer.weight = model[1].weight
    model.append(nn.Linear(64, 20, bias=False).requires_grad_(False))
    pack_module(model.bfloat16(), min_bytes=0)
    assert type(model[1]) is nn.Linear, "30 rows are trained, 40 are not"
    assert isinstance(model[0].weight, PackedParameter)


def test_a_packed_tensor_ends_where_blobs_end() -> None:
    for rows in range(90, 110):
        made = pack_tensor(torch.randn(rows, 37).bfloat16(), "w")
        assert made is not None
        assert made.packed_bytes % ALIGN_BLOB == 0


def test_a_tensor_is_packed_for_gpus() -> None:
    """Also where zstd would make less of it."""
    weight = (torch.arange(96 * 64).reshape(96, 64) % 7 + 1).bfloat16()
    made = pack_tensor(weight, "w")
    assert made is not None
    assert made.sources[0].codec.name == "prefix"
    assert_same_bits(made.decoded(), weight)


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


def test_others_of_a_modules_class_are_plain(pair: tuple[Model, Model]) -> None:
    """As adapters make them."""
    plain, ours = pair
    for module, args in ((ours.blocks[0].up, (3, 4)), (ours.embed, (3, 4))):
        made = type(module)(*args, dtype=torch.float64)
        assert type(made) is module.tpde_base
        assert made.weight.dtype is torch.float64
    assert type(plain.embed) is ours.embed.tpde_base


# ---- groups, and blocks ----


def test_of_an_embedding_nothing_is_decoded_to_the_workspace() -> None:
    """However large it is, in a block or not."""
    model = nn.ModuleDict({"embed": nn.Embedding(3000, 64), "blocks": nn.ModuleList([nn.Embedding(900, 64)])})
    model["head"] = nn.Linear(64, 100)
    pack_module(model.bfloat16(), min_bytes=0)
    for embedding in (model["embed"], model["blocks"][0]):
        assert isinstance(embedding.weight, PackedParameter)
        assert embedding.tpde_slots["weight"].group is None
        assert not {"tpde_own_group", "tpde_forward"} & set(vars(embedding))
    space = model["head"].tpde_group().workspace
    assert space.end - space.start == 100 * 128


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


def test_methods_of_a_models_own_class_are_called() -> None:
    calls: list[str] = []

    class Own(nn.Sequential):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            calls.append("_apply")
            return super()._apply(fn, recurse)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("load_state_dict")
            return super().load_state_dict(*args, **kwargs)

    ours = pack_module(Own(nn.Linear(64, 64)).bfloat16(), min_bytes=0)
    ours.to("cpu")
    ours.load_state_dict(ours.state_dict())
    assert calls == ["_apply"] * calls.count("_apply") + ["load_state_dict"]
    assert calls.count("_apply") >= 2


def test_only_a_models_own_parameters_may_be_cast(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    ours.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ours._apply(lambda it: it.float(), recurse=False)
    assert ours.scale.dtype is torch.float32
    with pytest.raises(PackedWeight, match="cannot be cast"):
        ours._apply(lambda it: it.float())
    assert_same_bits(ours(IDS), plain(IDS))


def test_packing_in_steps(pair: tuple[Model, Model]) -> None:
    """Whoever packs a block again, or more of it, gets one model."""
    plain, ours = pair
    unpack_module(ours.blocks[1])
    pack_module(ours.blocks, min_bytes=0)
    finish(ours)
    assert_same_bits(ours(IDS), plain(IDS))
    replace_parameter(ours, "blocks.1.up.weight", ours.blocks[1].up.weight)
    assert list(ours.blocks[1].up.tpde_slots) == ["weight"]
    finish(ours)
    assert_same_bits(ours(IDS), plain(IDS))


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


@pytest.mark.parametrize("trained", [False, True])
def test_a_weight_that_is_replaced_says_what_the_one_before_said(trained: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(trained)
    made = pack_tensor(model[0].weight.detach(), "w")
    assert made is not None
    replace_parameter(model, "0.weight", made)
    assert model[0].weight.plain_requires_grad is trained
    assert finish(model)(torch.ones(1, 64)).requires_grad is trained


# ---- what is set, taken out, and put there ----


def test_what_may_be_set(pair: tuple[Model, Model]) -> None:
    _, ours = pair
    layer, other = ours.blocks[0].up, ours.blocks[1].up
    with pytest.raises(PackedWeight, match="cannot be replaced"):
        layer.weight = other.weight
    with pytest.raises(PackedWeight, match="cannot be quantized"):
        layer.qconfig = None
    layer.weight = layer.weight
    ours.blocks[0].norm.qconfig = None
    layer.other = 7
    del layer.other
    layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    layer.scale = nn.Parameter(torch.zeros(1))
    assert list(layer._parameters) == ["weight", "bias", "scale"]


def test_a_weight_that_was_taken_out_is_missed(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    held = layer._parameters.pop("weight")
    assert not hasattr(layer, "weight")
    with pytest.raises(PackedWeight, match="cannot be computed from a `weight_g`"):
        layer.register_parameter("weight_g", None)
    assert layer._parameters["weight"] is held
    assert list(layer._parameters) == ["weight", "bias"]
    with pytest.raises(PackedWeight, match="cannot be computed from a `weight_orig`"):
        layer.register_parameter("weight_orig", held)
    layer.register_parameter("weight_of_mine", nn.Parameter(torch.ones(2)))
    assert_same_bits(ours(IDS), plain(IDS))


def test_a_move_that_fails_leaves_the_packed_weight(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    held = layer.weight

    def fail(it: Any) -> Any:
        if it.shape == (192,):
            raise KeyError("theirs")
        return it

    with pytest.raises(KeyError, match="theirs"):
        layer._apply(fail)
    assert layer._parameters["weight"] is held
    assert_same_bits(ours(IDS), plain(IDS))


def test_a_weight_is_read_while_it_is_moved(pair: tuple[Model, Model]) -> None:
    """By functions that look at the module meanwhile."""
    _, ours = pair
    layer, held, seen = ours.blocks[0].up, ours.blocks[0].up.weight, list[Any]()

    def look(it: Any) -> Any:
        seen.append(layer.weight)
        return it

    layer._apply(look)
    assert seen
    assert all(it is held for it in seen)


def test_a_streamed_convolution_stays_in_its_format() -> None:
    """A second copy of it would not be in the budget."""
    layer = pack_module(nn.Conv2d(16, 32, 3).bfloat16(), min_bytes=0)
    layer.weight.packed.sources[0].settled = False
    with pytest.raises(PackedWeight, match="memory format"):
        layer.to(memory_format=torch.channels_last)
    layer.weight.packed.sources[0].settled = True
    assert layer.to(memory_format=torch.channels_last) is layer


def test_values_for_a_moment_of_an_embedding() -> None:
    plain = nn.Embedding(50, 64).bfloat16()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    state = {"weight": plain.weight.detach() * 2}
    assert_same_bits(
        torch.func.functional_call(ours, state, (IDS,)), torch.func.functional_call(plain, state, (IDS,))
    )
    assert_same_bits(ours(IDS), plain(IDS))


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


def test_what_hooks_hide_is_told_at_last(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    ours.register_load_state_dict_pre_hook(halve)
    state = {name: it * 2 for name, it in plain.state_dict().items()}
    other = pack_tensor(torch.randn(64, 64).bfloat16(), "other")
    assert other is not None
    for value, said in ((PackedParameter(other), "packed alike"), (torch.zeros(192, 64), "other values")):
        with pytest.raises(RuntimeError, match=rf"blocks\.0\.up\.weight: .*{said}"):
            ours.load_state_dict(state | {"blocks.0.up.weight": value})
    assert_same_bits(ours(IDS), plain(IDS))


def test_rows_are_prepared_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the blob is on its device; else when it is asked for, and it is there."""
    prepared: list[str] = []
    monkeypatch.setattr(PackedTensor, "prepare_rows", lambda self: prepared.append(self.name))
    model = nn.ModuleDict({"a": nn.Embedding(50, 64), "b": nn.Embedding(60, 64), "c": nn.Linear(64, 64)})
    pack_module(model.bfloat16(), min_bytes=0)
    assert prepared == ["a.weight", "b.weight"]
    prepared.clear()
    model["b"].weight.packed.sources[0].settled = False
    finish(model)
    assert prepared == ["a.weight"]
    prepared.clear()
    prepare_rows(model)
    assert prepared == ["a.weight", "b.weight"]
    prepared.clear()
    model["a"].to("cpu")
    model["c"].to("cpu")
    assert prepared == ["a.weight"]


@pytest.mark.parametrize("model", ["llama", {"weight": torch.zeros(2, 2)}])
def test_what_is_no_module_is_not_packed(model: Any) -> None:
    with pytest.raises(tpde.InvalidArgument, match=r"takes a `torch\.nn\.Module`, not a `(str|dict)`"):
        tpde.pack_module(model)
