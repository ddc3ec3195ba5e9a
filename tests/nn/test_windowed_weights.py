"""Weights in the window layout are updated, loaded, copied, moved and read in parts; damage is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
from support.emulated import windows_on_cpu  # noqa: F401
from support.fused import weights
from support.models import assert_same_bits
from support.parameters import draw, packed
from support.small import IDS, Model, torch
from support.window_encoding import room

import tpde
from tpde.codec import window_plan, windows
from tpde.cuda.window_products import DeviceWindow
from tpde.errors import Corrupt, InvalidInput, PackedWeight, Truncated
from tpde.nn import PackedParameter, PackedTensor, pack_module, plain_state_dict, set_kernels
from tpde.weights import windowed
from tpde.weights.packed_tensor import rebuild_tensor
from tpde.weights.windowed import Windowed


def test_updates_in_place(pair: Any, fused: Any) -> None:
    plain = pair[0]
    old = {name: it.clone() for name, it in plain.state_dict().items()}
    with torch.no_grad():
        plain.blocks[1].up.weight[::3] *= 1.5
        plain.embed.weight[5] = 1e30
    delta = tpde.make_delta(old, dict(plain.state_dict()))
    assert tpde.apply_delta(fused, delta) > 0
    assert all(it.multiplies for it in weights(fused))
    with torch.no_grad():
        assert_same_bits(fused(IDS), plain(IDS))
    assert tpde.apply_delta(fused, delta) >= 0  # again
    with torch.no_grad():
        assert_same_bits(fused(IDS), plain(IDS))


@pytest.mark.parametrize("theirs", ["exact", "fused"])
@pytest.mark.parametrize("mine", ["exact", "fused"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_either_kind(pair: Any, mine: Any, theirs: Any, assign: bool) -> None:
    torch.manual_seed(6)
    other = Model().bfloat16().eval()
    model, state = pair[1], set_kernels(pack_module(copy.deepcopy(other), min_bytes=0), theirs).state_dict()
    set_kernels(model, mine).load_state_dict(state, assign=assign)
    assert [it.multiplies for it in weights(model)] == [mine == "fused"] * 7
    with torch.no_grad():
        assert_same_bits(model(IDS), other(IDS))


def test_copies_and_pickles(pair: Any, fused: Any) -> None:
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(it.packed.multiplies for it in state.values() if isinstance(it, PackedParameter))
    loaded = set_kernels(pack_module(Model().bfloat16().eval(), min_bytes=0), "fused")
    loaded.load_state_dict(state)
    for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), loaded):
        assert all(it.multiplies for it in weights(made))
        assert made.head.weight.packed is made.embed.weight.packed
        with torch.no_grad():
            assert_same_bits(made(IDS), pair[0](IDS))
    one = copy.deepcopy(fused.blocks[0].up)
    x = torch.randn(3, 64).bfloat16()
    assert_same_bits(one(x), pair[0].blocks[0].up(x))


def test_damaged_windows_are_refused(fused: Any) -> None:
    _, (blobs, *rest, _) = fused.blocks[0].up.weight.packed.__reduce__()  # without hashes, as of anybody
    assert rebuild_tensor(blobs, *rest).multiplies
    whole = blobs[0].numpy()
    messages = []
    found = windows.header(whole)
    for at in {*range(8, 128), found.offsets_at + 5, found.entries_at + 3}:
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        try:
            rebuild_tensor([torch.from_numpy(damaged)], *rest)
        except (Corrupt, Truncated, tpde.UnsupportedVersion, InvalidInput) as error:
            messages.append(str(error))
    assert len(messages) >= 120  # a XOR of the table may become another
    assert all(rest[0][0] in it for it in messages)
    for at in (found.offsets_at, found.offsets_at + 4, found.entries_at - 1):
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        with pytest.raises(Corrupt):
            rebuild_tensor([torch.from_numpy(damaged)], *rest)
    for size in (8, 127, 128, whole.size - 1):
        with pytest.raises((Corrupt, Truncated)):
            rebuild_tensor([torch.from_numpy(whole[:size].copy())], *rest)


def test_one_bit_of_pickled_words_is_found(fused: Any) -> None:
    """Any words decode: what was pickled is told by its hash."""
    made, (blobs, *rest, digests) = fused.blocks[0].up.weight.packed.__reduce__()
    damaged = blobs[0].clone()
    damaged[-1] ^= 1
    for blob, hashes, says in (
        (damaged, digests, "the bytes hash to"),
        (blobs[0], ["0" * 32], "the bytes hash to"),
        (blobs[0], digests * 2, "no packed weight"),
        (blobs[0], [7], "no packed weight"),
        (blobs[0], "x", "no packed weight"),
    ):
        with pytest.raises((Corrupt, InvalidInput), match=says):
            made([blob], *rest, hashes)
    assert_same_bits(
        made(blobs, *rest).decoded(), made(blobs, *rest, digests).decoded()
    )  # of an older version
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    data = bytearray(file.getvalue())
    data[data.index(blobs[0].numpy().tobytes()) + blobs[0].numel() - 1] ^= 1
    with pytest.raises(Corrupt, match=r"blocks\.0\.up\.weight"):
        torch.load(io.BytesIO(data), weights_only=True)


def test_moving_keeps_the_bytes(fused: Any) -> None:
    before = [it.sources[0].memory.clone() for it in weights(fused)]
    fused.to("cpu").share_memory()
    assert all(it.sources[0].memory.is_shared() for it in weights(fused))
    assert all(torch.equal(a, it.sources[0].memory) for a, it in zip(before, weights(fused), strict=True))
    with pytest.raises(PackedWeight, match="lose its bytes"):
        fused.to("meta")
    with pytest.raises(PackedWeight, match="cannot be cast"):
        fused.float()


@pytest.mark.parametrize("start", [1, 16])
def test_a_blob_is_taken_where_it_lies(fused: Any, start: int) -> None:
    blob = fused.head.weight.packed.sources[0].memory
    room = torch.empty(start + blob.numel(), dtype=torch.uint8)
    room[start:] = blob
    made = Windowed(room[start:], "head")
    assert made.memory.data_ptr() == room.data_ptr() + start
    assert_same_bits(made.instead(), plain_state_dict(fused)["head.weight"])
    assert made.pickled().untyped_storage().nbytes() == blob.numel()
    for wrong in (blob.view(2, -1), blob[::2], blob.view(torch.int8), blob.to("meta")):
        with pytest.raises(InvalidInput, match="one-dimensional, contiguous and uint8"):
            Windowed(wrong, "head")


@pytest.mark.parametrize("shape", [(1, 1), (17, 5), (33, 70), (100, 384)], ids=str)
def test_parts(shape: tuple[int, int]) -> None:
    """Spans and rows of any place, and loading what is packed otherwise."""
    torch.manual_seed(0)
    words = torch.randn(shape).bfloat16()
    made = Windowed(torch.from_numpy(window_plan.encode(words.view(torch.int16).numpy())), "it")
    packed, flat = PackedTensor(made), words.view(-1).view(torch.uint8)
    assert_same_bits(packed.decoded(), words)
    draw = np.random.default_rng(0)
    for _ in range(20):
        begin, end = np.sort(draw.integers(0, flat.numel() + 1, 2)).tolist()
        assert torch.equal(packed.span(begin, end).decoded(), flat[begin:end])
    ids = torch.randint(0, shape[0], (4, 3))
    assert_same_bits(packed.rows(ids), words[ids])


@pytest.mark.parametrize("bias", [draw(96)[::2], draw(1).expand(48), draw(48)])
def test_a_bias_is_there_until_it_is_read(bias: Any, windows_on_cpu: None, monkeypatch: Any) -> None:  # noqa: F811
    """What is not contiguous is copied, and its copy's memory not given to others before."""
    matrix, x = draw(48, 512), draw(3, 512, seed=1)
    source = Windowed.of(packed(matrix).packed.sources[0], 9)
    assert source is not None
    memory = room(source.memory.numel(), 128, 0)
    memory[:] = source.memory.numpy()
    taken: list[Any] = []

    class There(DeviceWindow):
        def room(self, count: int) -> int:
            taken.extend(torch.full((48,), torch.nan, dtype=torch.bfloat16) for _ in range(9))
            return super().room(count)

    source._there = There(source.window, memory.ctypes.data, 0)
    monkeypatch.setattr(windowed, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(windowed, "stream_handle", lambda device: 0)
    found = source.product(x, bias, False)
    assert taken
    assert_same_bits(found, source.product(x, bias.clone().contiguous(), False))
    assert not found.isnan().any()
