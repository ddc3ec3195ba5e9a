"""Packed weights of several blobs: what one of them refuses is done to none."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from support.models import assert_same_bits
from support.parameters import draw, packed
from support.small import torch
from torch.nn import functional

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedParameter, PackedTensor, Resident


def test_a_weight_of_several_has_a_name_of_its_own(weight: Any) -> None:
    parts = [packed(weight).packed.sources[0], packed(weight).packed.sources[0]]
    assert PackedTensor(parts, (2, 96, 64)).name == "w"
    made = PackedTensor(parts, (2, 96, 64), "fused")
    assert made.name == made.clone().name == pickle.loads(pickle.dumps(made)).name == "fused"
    assert made.packed_bytes == 2 * parts[0].packed_bytes
    with pytest.raises(InvalidInput, match=r"`w` has shape \[96, 64\], \[64, 96\] is needed"):
        PackedTensor(parts[0], (64, 96))


@torch.no_grad()
def test_rows_of_a_weight_of_several_tensors(weight: Any) -> None:
    made = PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (192, 64))
    ids = torch.tensor([[1, 95, 96, 191]])
    assert_same_bits(functional.embedding(ids, PackedParameter(made)), torch.cat([weight, weight])[ids])


@pytest.mark.parametrize("which", [0, 1])
def test_a_weight_is_where_all_of_it_is(which: int, weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (2, 96, 64))
    assert made.together
    assert made.settled
    source = made.sources[which]
    source.settled = False
    assert not made.settled
    there = torch.device("meta")
    monkeypatch.setattr(Resident, "device", property(lambda it: there if it is source else it.blob.device))
    assert not made.together


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.zero_(),
        torch.zeros_like,
        lambda it: it.flip(0),
        lambda it: it.to(torch.int32),
        lambda it: it.view(torch.int8),
        lambda it: it.to("meta"),
    ],
)
def test_what_gives_other_bytes_than_a_blobs_is_refused(change: Any, weight: Any) -> None:
    ours = packed(weight).packed
    (source,) = ours.sources
    for apply in (ours.apply, ours.check, source.apply, source.check):
        with pytest.raises(PackedWeight, match="`w` is packed, and would lose its bytes"):
            apply(change)
    assert_same_bits(ours.decoded(), weight)


def test_what_one_blob_refuses_is_done_to_none(weight: Any) -> None:
    made = PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (2, 96, 64))
    first, second = made.sources
    told: list[str] = []

    class User:
        def changed(self) -> None:
            told.append("changed")

        def frozen(self) -> None:
            told.append("frozen")

    user = User()
    made.watch(user)
    start = second.blob[:16].clone()
    second.blob[5] ^= 1  # its first bytes, by which functions are tried, differ
    odd = second.blob[:16].clone()

    def move(it: Any) -> Any:
        return torch.zeros_like(it) if torch.equal(it[:16], odd) else it.clone()

    for work in (made.apply, made.check):
        before = first.version
        with pytest.raises(PackedWeight, match="lose its bytes"):
            work(move)
        assert first.version == before
    second.blob[:16] = start
    assert not told
    made.apply(lambda it: it.clone())
    assert told == ["changed"]
    made.tell_frozen()
    assert told == ["changed", "frozen"]
    assert_same_bits(made.decoded(), torch.stack([weight, weight]))


def test_what_one_blob_does_not_take_is_loaded_to_none(weight: Any) -> None:
    class Elsewhere(Resident):
        @property
        def blob(self) -> Any:
            raise PackedWeight("it stays in its file")

    new = draw(96, 64, seed=9)
    ours, other = (
        PackedTensor([packed(it).packed.sources[0] for _ in range(2)], (2, 96, 64)) for it in (weight, new)
    )
    other.parts[1] = Elsewhere(other.sources[1].blob, "there"), other.parts[1][1]
    with pytest.raises(PackedWeight, match="stays in its file"):
        ours.load(other)
    assert_same_bits(ours.decoded(), torch.stack([weight, weight]))
