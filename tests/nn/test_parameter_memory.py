"""A packed weight has no plain bytes: its address is no number, its storage is read by nobody."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import assert_same_bits
from support.parameters import draw, packed
from support.small import torch

from tpde.errors import PackedWeight
from tpde.nn import PackedParameter, PackedTensor, Resident, pack_module


def test_what_reads_memory_is_refused(weight: Any, tmp_path: Path) -> None:
    ours, other = packed(weight), packed(weight)
    address = ours.data_ptr()
    assert address == ours.detach().data_ptr()
    assert address != other.data_ptr()
    assert {address: 1}[ours.data_ptr()] == 1
    for read in (lambda: address == 0, lambda: address + 1, lambda: int(address), lambda: bool(address)):
        with pytest.raises(PackedWeight, match="`w` is packed, and has no plain bytes"):
            read()
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    with pytest.raises(PackedWeight, match=r"tpde\.torch\.save_file"):
        safetensors.save({"w": ours})
    layer = pack_module(torch.nn.Linear(64, 64), min_bytes=0)
    safetensors.save_file({"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}, tmp_path / "plain")
    with pytest.raises(PackedWeight) as told:
        safetensors.load_model(layer, tmp_path / "plain")
    assert "load files with `tpde.torch.load_model`" in str(told.value.hint)
    storage = ours.untyped_storage()
    assert storage.nbytes() < weight.nbytes
    assert (
        storage.data_ptr() == ours.detach().untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    )
    for look in (bytes, list, lambda it: it[0], lambda it: it.tolist(), lambda it: it.clone()):
        with pytest.raises(PackedWeight, match="`w` is packed, and has no plain bytes"):
            look(storage)


def test_an_address_is_no_number(weight: Any) -> None:
    address: Any = packed(weight).data_ptr()
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mod", "and_"):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            getattr(operator, name)(address, 16)
    for name in ("add", "sub"):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            getattr(operator, name)(16, address)
    for look in (bool, int, operator.not_):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            look(address)
    assert not address != address  # noqa: SIM202
    assert hash(address) == hash(address)


def test_what_a_storage_says(weight: Any) -> None:
    ours = packed(weight)
    storage, blob = ours.untyped_storage(), ours.packed.sources[0].blob.untyped_storage()
    assert (len(storage), storage.nbytes(), storage.device) == (len(blob), blob.nbytes(), blob.device)
    for name in ("nothing", "_share_filename_cpu_", "__array_interface__"):
        assert not hasattr(storage, name)
    for look in (lambda: storage[0], lambda: list(storage), lambda: storage.copy_(blob)):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            look()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize(
    "share",
    [
        torch.from_dlpack,
        np.from_dlpack,
        lambda w: w.storage(),
        lambda w: w._typed_storage(),
        lambda w: torch.empty(0).set_(w),
    ],
)
def test_memory_of_a_copy_is_given_to_nobody(share: Any) -> None:
    ours = packed(draw(96, 64, dtype=torch.float32), requires_grad=False)
    with pytest.raises(PackedWeight, match=r"`w` is packed, and `.*` would give .*detach\(\)\.clone"):
        share(ours)
    share(ours.detach().clone())


def test_a_weight_is_shared_if_all_of_it_is(weight: Any) -> None:
    ours = PackedParameter(PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (2, 96, 64)))
    assert not ours.is_shared()
    ours.packed.sources[0].blob.share_memory_()
    assert not ours.is_shared()
    assert ours.share_memory_() is ours
    assert ours.is_shared()
    assert_same_bits(ours.plain(), torch.stack([weight, weight]))


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_blobs_are_where_kernels_read_them(shift: int, weight: Any) -> None:
    blob = packed(weight).packed.sources[0].blob
    room = torch.empty(blob.numel() + 32, dtype=torch.uint8)
    at = -room.data_ptr() % 16 + shift
    given = room[at : at + blob.numel()].copy_(blob)
    source = Resident(given, "w")
    assert source.blob.data_ptr() % 16 == 0
    assert (source.blob.data_ptr() == given.data_ptr()) == (not shift)
    assert_same_bits(PackedTensor(source).decoded(), weight)
    moved = PackedTensor(Resident(blob, "w"))
    moved.apply(lambda it: given if it is blob else it)
    assert moved.sources[0].blob.data_ptr() % 16 == 0
    assert_same_bits(moved.decoded(), weight)
