"""New blobs in old weights: what was prepared for old ones is made anew, and nothing is the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Model, torch

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedParameter, PackedTensor, Resident, pack_module, pack_tensor, plain_state_dict
from tpde.weights import resident
from tpde.weights import rows as rows_of
from tpde.weights.source import Source
from tpde.weights.span import Span


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return pack_module(Model().to(torch.bfloat16), min_bytes=0)


def packed(seed: int, rows: int = 96, columns: int = 64) -> PackedTensor:
    generator = torch.Generator().manual_seed(seed)
    made = pack_tensor(torch.randn(rows, columns, generator=generator).to(torch.bfloat16), "w")
    assert made is not None
    return made


class _Addressed:
    """Decodes as a device would: from the address that the blob had when this was made."""

    def __init__(self, items: Sequence[tuple[Source, int]], device: Any) -> None:
        self.items = [(it, at, it.blob.data_ptr()) for it, at in items]

    def __call__(self, out: Any) -> None:
        for it, at, address in self.items:
            assert it.blob.data_ptr() == address, f"`{it.name}` was decoded from a stale address"
            it.decode_on_host(0, it.nbytes, out.numpy()[at : at + it.nbytes])


class _Rows(rows_of.RowReader):
    """Looks rows up as a device would: see `_Addressed`."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._at = source.blob.data_ptr()

    def __call__(self, ids: Any) -> Any:
        assert self.packed.blob.data_ptr() == self._at, "rows were looked up at a stale address"
        return super().__call__(ids)


@pytest.fixture
def addressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "Materializer", _Addressed)
    monkeypatch.setattr(resident, "RowReader", _Rows)


@pytest.mark.usefixtures("addressed")
@pytest.mark.parametrize("assign", [False, True])
def test_a_new_blob_is_decoded_from_where_it_is(assign: bool) -> None:
    """A forward pass before has prepared all blocks, and rows, for the old one."""
    ours, other = model(0), model(1)
    expected = other(IDS)
    assert not torch.equal(ours(IDS), expected)
    ours.load_state_dict(other.state_dict(), assign=assign)
    assert_same_bits(ours(IDS), expected)
    weight = ours.blocks[0].up.weight
    assert_same_bits(weight.detach().clone(), other.blocks[0].up.weight.detach().clone())


@pytest.mark.usefixtures("addressed")
def test_a_weight_alone_is_decoded_from_where_it_is() -> None:
    one, other = packed(0), packed(1)
    one.decoded()
    one.rows(torch.arange(3))
    one.load(other)
    assert_same_bits(one.decoded(), other.decoded())
    assert_same_bits(one.rows(torch.arange(5, 9)), other.decoded()[5:9])


@pytest.mark.usefixtures("addressed")
def test_a_blob_in_shared_memory_is_decoded_from_where_it_is() -> None:
    """It is the same tensor at another address."""
    ours, one = model(0), packed(0)
    expected, whole = ours(IDS), one.decoded().clone()
    ours.share_memory()
    assert all(it.is_shared() for it in ours.parameters())
    assert_same_bits(ours(IDS), expected)
    one.rows(torch.arange(3))
    one.apply(lambda blob: blob.share_memory_())
    assert_same_bits(one.decoded(), whole)
    assert_same_bits(one.rows(torch.arange(5, 9)), whole[5:9])


def test_a_new_blob_has_its_own_tables() -> None:
    one = packed(0)
    narrow = pack_tensor((torch.randn(96, 64) * 1e-20).to(torch.bfloat16), "w")
    assert narrow is not None
    before = one.sources[0].device_tables()
    one.load(narrow)
    after, needed = one.sources[0].device_tables(), narrow.sources[0].device_tables()
    assert before is not None
    assert after is not None
    assert needed is not None
    assert torch.equal(after[1], needed[1])
    assert not torch.equal(after[1], before[1])


def test_users_are_told_once_of_a_new_blob() -> None:
    one, told = packed(0), []

    class User:
        def changed(self) -> None:
            told.append("changed")

        def updated(self) -> None:
            told.append("updated")

    user = User()
    one.watch(user)  # type: ignore[arg-type]
    one.load(packed(1))
    assert told == ["updated", "changed"]
    one.refresh()
    one.load(one.clone())  # the same bytes: a tied weight, the second time
    assert told == ["updated", "changed"]


def test_what_was_loaded_is_not_the_callers() -> None:
    ours, state = model(0), model(1).state_dict()
    ours.load_state_dict(state)
    expected = ours(IDS)
    for value in state.values():
        if isinstance(value, PackedParameter):
            for source in value.packed.sources:
                source.blob.zero_()
    assert_same_bits(ours(IDS), expected)


def test_assigning_takes_the_callers_blob() -> None:
    ours, state = model(0), model(1).state_dict()
    ours.load_state_dict(state, assign=True)
    name = "blocks.0.up.weight"
    assert ours.get_parameter(name).packed.sources[0].blob is state[name].packed.sources[0].blob


def test_a_parameter_is_where_the_blob_is_that_was_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries put inputs where parameters say that they are."""
    ours, state = model(0), model(1).state_dict()
    name, card = "blocks.0.up.weight", torch.device("cuda:0")
    there = state[name].packed.sources[0].blob  # as far as anybody asks: there need not be a card
    monkeypatch.setattr(Resident, "device", property(lambda it: card if it.blob is there else it.blob.device))
    ours.load_state_dict(state, assign=True)
    found = {it: parameter.device for it, parameter in ours.named_parameters()}
    assert found == {it: card if it == name else torch.device("cpu") for it in found}


def test_a_blob_of_another_shape_is_refused() -> None:
    one = packed(0)
    before = one.decoded().clone()
    for other in (packed(0, 48, 128), packed(0, 96, 32)):
        with pytest.raises(InvalidInput, match="packed alike"):
            one.load(other)
        with pytest.raises(InvalidInput, match=r"the blob holds BF16 of shape"):
            one.sources[0].load(other.sources[0])
    assert_same_bits(one.decoded(), before)


def test_a_weight_has_room_for_its_parts_and_no_more() -> None:
    parts = [Resident(packed(it).sources[0].blob, f"part {it}") for it in range(2)]
    assert PackedTensor(parts, (2, 96, 64)).nbytes == 2 * 96 * 64 * 2
    for shape in ((96, 64), (3, 96, 64)):
        with pytest.raises(InvalidInput, match="its parts have"):
            PackedTensor(parts, shape)


def test_a_blob_that_moved_to_shared_memory_is_read_there() -> None:
    one = packed(0)
    expected, source = one.decoded().clone(), one.sources[0]
    one.apply(lambda blob: blob.share_memory_())
    assert source.blob.is_shared()
    assert_same_bits(one.decoded(), expected)
    reader = source.host_reader()
    other = packed(1).sources[0]
    other.host_reader()
    other.blob.share_memory_()  # behind its back, as `torch.multiprocessing` does
    assert_same_bits(PackedTensor(other).decoded(), packed(1).decoded())
    assert other.host_reader() is not reader


def test_signs_of_zeros_and_payloads_of_nan_are_values() -> None:
    weight = torch.randn(96, 64).to(torch.bfloat16)
    weight[0, :2] = torch.tensor([0.0, float("nan")])
    made = pack_tensor(weight, "w")
    assert made is not None
    ours = PackedParameter(made)
    assert ours.takes(weight.clone())
    weight[0, 0] = -0.0
    assert not ours.takes(weight)
    with pytest.raises(PackedWeight, match="other values"), torch.no_grad():
        ours.copy_(weight)


def test_a_copy_that_is_asked_for_is_one() -> None:
    ours = PackedParameter(packed(0))
    copied = ours.to(copy=True)
    assert isinstance(copied, PackedParameter)
    assert copied.packed is not ours.packed
    assert copied.packed.sources[0].blob.data_ptr() != ours.packed.sources[0].blob.data_ptr()
    assert ours.to("cpu") is ours


def test_a_plain_state_dict_has_its_weights_memory_and_no_more() -> None:
    made = Model(words=201).to(torch.bfloat16)
    made.head.weight = torch.nn.Parameter(torch.randn(201, 63).to(torch.bfloat16))
    found = plain_state_dict(pack_module(made, min_bytes=0))
    for name, value in found.items():
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name
    assert not isinstance(found["head.weight"], PackedParameter)


def test_an_expert_is_all_of_its_bytes() -> None:
    weight = torch.randn(4, 48, 64).to(torch.bfloat16)
    made = pack_tensor(weight, "w")
    assert made is not None
    for number in range(4):
        found = made.expert(number)
        assert isinstance(found, Span)
        assert_same_bits(found.decoded().view(torch.bfloat16).view(48, 64), weight[number])


def test_compiled_code_gives_the_workspace_back_first() -> None:
    ours = model(0)
    group = ours.blocks[0].__dict__["tpde_forward"].group
    ours(IDS)
    space = group.workspace
    assert space.buffer is not None
    flat = torch.ops.tpde.materialize(torch.empty(0), group.key, group.pool.capacity // 2, torch.bfloat16)
    assert space.buffer is None
    assert flat.numel() == group.pool.capacity // 2
