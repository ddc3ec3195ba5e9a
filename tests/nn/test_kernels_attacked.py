"""What a review of linear layers in the window layout found: each test failed before its fix."""

from __future__ import annotations

import contextlib
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from support.fused import fuse
from support.models import assert_same_bits
from support.small import IDS, torch

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import Resident, kernels, packed_modules, set_kernels
from tpde.weights import product

nn = torch.nn
functional = nn.functional


def delta_of(model: Any) -> bytes:
    other = {name: it.clone() for name, it in model.state_dict().items()}
    for it in other.values():
        it.view(-1)[::50] *= 1.5
    return tpde.make_delta(dict(model.state_dict()), other)


@pytest.mark.parametrize("seed", [2, 3])  # of few do the two kernels' bits differ
@pytest.mark.parametrize("trained", [False, True])
def test_strided_inputs_give_the_bits_that_go_with_what_the_weight_says_of_gradients(
    trained: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = nn.Linear(300, 1000, bias=False).bfloat16().requires_grad_(trained)
    ours, x = fuse(plain), torch.randn(5, 3, 300).bfloat16().transpose(0, 1)
    assert ours.weight.packed.multiplies
    with torch.no_grad():
        needed = plain(x)
        assert_same_bits(ours(x), needed)
        assert_same_bits(functional.linear(x, ours.weight), needed)
    for mine in (ours(x.detach().requires_grad_()), functional.linear(x.requires_grad_(), ours.weight)):
        assert_same_bits(mine, needed)


def test_autocast_leaves_integers_to_pytorch(fused: Any) -> None:
    layer = fused.blocks[0].up
    ids = torch.arange(128).view(2, 64)
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):
            module(ids)


def test_a_model_that_a_delta_changed_goes_to_windows(pair: Any) -> None:
    plain, model = pair
    delta = delta_of(plain)
    tpde.apply_delta(model, delta)
    tpde.apply_delta(plain, delta)
    set_kernels(model, "fused")
    assert any(slot.packed.multiplies for _, it in packed_modules(model) for slot in it.tpde_slots.values())
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    set_kernels(model, "exact")
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))


@pytest.mark.parametrize("way", ["fused", "exact"])
def test_what_was_interrupted_leaves_no_weight_in_a_wrong_group(
    pair: Any, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = pair
    if way == "exact":
        set_kernels(model, "fused")
    real, done = kernels.convert, []

    def convert(packed: Any, to_windows: bool) -> bool:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(packed)
        return real(packed, to_windows)

    monkeypatch.setattr(kernels, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        set_kernels(model, way)
    slots = [slot for _, it in packed_modules(model) for name, slot in it.tpde_slots.items()]
    assert sum(slot.packed.multiplies for slot in slots) not in (0, len(slots))
    own = [model.embed.tpde_slots["weight"]]  # rows of it are looked up
    assert all((slot.group is None) == slot.packed.multiplies for slot in slots if slot not in own)
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    monkeypatch.undo()
    set_kernels(model, way)
    assert {slot.packed.multiplies for slot in slots} == {way == "fused"}


def test_a_second_call_ends_what_was_interrupted_last(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = pair

    def finish(model: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        set_kernels(model, "fused")
    monkeypatch.undo()
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))
    set_kernels(model, "fused")
    assert all(slot.group is None for _, it in packed_modules(model) for slot in it.tpde_slots.values())
    with torch.no_grad():
        assert_same_bits(model(IDS), plain(IDS))


def test_nothing_to_do_regroups_nothing(pair: Any) -> None:
    model = pair[1]
    before = [slot.group for _, it in packed_modules(model) for slot in it.tpde_slots.values()]
    set_kernels(model.blocks[0], "exact")
    assert [slot.group for _, it in packed_modules(model) for slot in it.tpde_slots.values()] == before


def test_what_a_graph_was_recorded_with_stays(pair: Any, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fused.blocks[0].up
    monkeypatch.setattr(product, "capturing", lambda device: True)
    with torch.no_grad():
        layer(torch.randn(3, layer.in_features).bfloat16())
    monkeypatch.undo()
    with pytest.raises(PackedWeight, match="was recorded in a CUDA graph"):
        set_kernels(fused, "exact")
    with pytest.raises(PackedWeight, match="was recorded in a CUDA graph"):
        tpde.apply_delta(fused, delta_of(pair[0]))
    assert layer.weight.packed.multiplies


def test_kernels_get_no_address_of_anything_else(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code, in which nobody has looked at devices and sizes."""
    slot = fused.blocks[0].up.tpde_slots["weight"]
    source, x = slot.packed.sources[0], torch.randn(3, slot.shape[1]).bfloat16()

    def refuse(*args: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(source, "_there", SimpleNamespace(takes=lambda count: True))
    monkeypatch.setattr(source, "_product", refuse)
    monkeypatch.setattr(source, "decode_into", lambda out: out.zero_())
    monkeypatch.setattr(slot, "instead", lambda: torch.zeros(slot.shape, dtype=slot.dtype))
    with pytest.raises(AssertionError):
        torch.ops.tpde.linear(x, None, slot.key, slot.shape[0], False)
    one = torch.ones(1).bfloat16()
    assert torch.equal(
        torch.ops.tpde.linear(x, one, slot.key, slot.shape[0], False), one.expand(3, slot.shape[0])
    )
    for elsewhere in ((x.to("meta"), None), (x, torch.ones(slot.shape[0], device="meta").bfloat16())):
        with contextlib.suppress(RuntimeError):  # which is PyTorch's
            slot.product(*elsewhere)


def test_whoever_counts_operations_counts_the_product(pair: Any, fused: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, counts = torch.randn(2, 3, 64).bfloat16().requires_grad_(), []
    for model in (pair[0].requires_grad_(False), fused):
        with FlopCounterMode(display=False) as counter:
            model.blocks[0].up(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_an_assigned_weight_is_where_the_other_one_is(fused: Any) -> None:
    """A blob that is made to be loaded is made on the host."""
    packed = fused.blocks[0].up.weight.packed.sources[0]
    mine = Resident(packed.blob, "w")

    class Elsewhere:
        header, memory, device = packed.header, packed.memory, torch.device("meta")
        blob = packed.blob

    with pytest.raises(InvalidInput, match="on the `meta` device"):
        mine.load(Elsewhere(), assign=True)  # type: ignore[arg-type]


def test_attention_of_pytorch_takes_the_weights_of_its_layers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    plain = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 64)).bfloat16().eval()
    ours, x = fuse(plain), torch.randn(2, 5, 64).bfloat16()
    assert ours[1].weight.packed.multiplies
    with torch.no_grad():
        assert_same_bits(ours(x), plain(x))
    assert_same_bits(ours(x), plain(x))
    set_kernels(ours, "exact")
    with torch.no_grad():
        assert_same_bits(ours(x), plain(x))


def test_rows_are_decoded_where_they_go() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(512, 512, bias=False).bfloat16()
    source = fuse(plain).weight.packed.sources[0]
    needed = plain.weight.detach().view(torch.uint8).view(-1)
    tracemalloc.start()  # which counts NumPy's memory, not PyTorch's
    try:
        found = source.instead()
        assert tracemalloc.get_traced_memory()[1] < source.nbytes // 4
    finally:
        tracemalloc.stop()
    assert torch.equal(found.view(torch.uint8).view(-1), needed)
    for begin, end, at in ((0, 2048, 0), (1024, 3072, 1), (1024, 3071, 0), (5, 1024, 2), (7, 7, 0)):
        room = torch.zeros(end - begin + at, dtype=torch.uint8)
        source.decode_on_host(begin, end, room.numpy()[at:])
        assert torch.equal(room[at:], needed[begin:end])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_multiplied_by_the_decoded_weight() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 192).bfloat16()
    x = torch.nested.nested_tensor([torch.randn(rows, 64).bfloat16() for rows in (3, 2)])
    for mine, theirs in zip(fuse(plain)(x).unbind(), plain(x).unbind(), strict=True):
        assert_same_bits(mine, theirs)
