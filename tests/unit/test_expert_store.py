"""Fetching experts: where they lie in fused weights, which places they take, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packed import pack

pytest.importorskip("torch", reason="needs torch")

from support.expert_stores import CPU, PIECE, Fixture

from tpde.errors import InvalidInput, ReadError, UnsupportedDevice
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec
from tpde.io.sources import Extent, FileSource
from tpde.nn import PackedParameter, PackedTensor
from tpde.nn.slot import Slot
from tpde.streaming.experts import ExpertStore, expert_pieces, expert_ranges, expert_room
from tpde.streaming.streamed_source import Streamed
from tpde.streaming.streamer import Streamer

pytestmark = pytest.mark.usefixtures("bounded")


def fused_slot(experts: int, words: int, segment: int) -> Any:
    spec = TensorSpec("BF16", (experts, words))
    header = BlobHeader(spec, CODEC_PREFIX, segment, 8192)
    source = SimpleNamespace(header=header, nbytes=spec.nbytes)
    fused = SimpleNamespace(parts=[(source, 0)], nbytes=spec.nbytes, shape=spec.shape)
    fused.expert = lambda number: PackedTensor.expert(fused, number)
    return SimpleNamespace(packed=fused, offset=512)


@given(experts=st.integers(1, 6), words=st.integers(1, 50_000), number=st.integers(0, 5))
def test_experts_of_a_fused_blob(experts: int, words: int, number: int) -> None:
    """Chunks that start anew with each expert hold it alone; others, the words around it too."""
    number %= experts
    begin = 512 + 2 * number * words
    ((_, first, last, offset, stop),) = expert_ranges(fused_slot(experts, words, words), number)
    per = -(-words // 8192)
    assert (first, last) == (number * per, number * per + per - 1)
    assert (offset, stop) == (begin, begin + 2 * words)
    ((_, first, last, offset, stop),) = expert_ranges(fused_slot(experts, words, experts * words), number)
    assert offset <= begin
    assert begin + 2 * words <= stop
    assert (first, last) == (number * words // 8192, ((number + 1) * words - 1) // 8192)


def test_fetching(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 6, 3)
    try:
        it.experts.fetch([1, 4], it.out)
        assert not it.wrong([1, 4])
        assert it.wrong([0, 2, 3, 5]) == [0, 0, 2, 2, 3, 3, 5, 5]
        copied = len(it.device.copied)
        it.experts.fetch([1], it.out)
        assert len(it.device.copied) == copied
        it.experts.fetch([0, 2], it.out)  # puts 4 out, which is older than 1
        assert len(it.device.copied) == 2 * copied
        it.experts.fetch([1], it.out)
        assert len(it.device.copied) == 2 * copied
        assert it.store.stats()["expert_hits"] == 2
        assert it.store.stats()["expert_misses"] == 4
        it.out.fill_(0xFF)
        it.experts.fetch(range(6), it.out)  # more than there are places
        assert not it.wrong([*range(6)])
    finally:
        it.close()


def test_offsets_may_change(tmp_path: Path) -> None:
    """The slots are put into another group."""
    it = Fixture(tmp_path, 3, 3)
    try:
        it.experts.fetch([1], it.out)
        it.slots[1].offset = 200 << 10
        it.experts.fetch([1, 2], it.out)
        assert not it.wrong([1, 2])
    finally:
        it.close()


def test_a_store_tells_its_cache_of_turns(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 6, 3)
    try:
        modules = [it.experts, it.store.module(it.slots), it.store.module(it.slots)]
        for _ in range(5):
            for number, module in enumerate(modules):
                module.fetch([2 * number, 2 * number + 1], it.out)
        assert it.store.cache.hits > 0
        assert not it.wrong([*range(6)])
    finally:
        it.close()


def test_what_is_not_copied_is_decoded_beside_it(tmp_path: Path) -> None:
    """As what is packed with zstd: it needs no place, and is no miss."""
    it = Fixture(tmp_path, 4, 3)
    try:
        up, down = (slot.packed.sources for slot in it.slots)
        down[1].travels = up[2].travels = down[2].travels = False
        it.experts.fetch([1, 2, 3], it.out)
        assert not it.wrong([1, 2, 3])
        assert (it.store.cache.hits, it.store.cache.misses, len(it.store.cache)) == (0, 2, 2)
        assert {*it.device.copied} == {"e2", "e6", "e7"}
        it.out.fill_(0xFF)
        it.experts.fetch([2, 1], it.out)
        assert not it.wrong([1, 2])
        assert (it.store.cache.hits, it.store.cache.misses) == (1, 2)
    finally:
        it.close()


def test_an_expert_of_a_fused_blob_goes_to_its_place(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 2, 1)
    try:
        data = np.concatenate(it.data)
        packed = pack(TensorSpec("BF16", (4, 100, 200)), data.tobytes())
        assert packed is not None
        (tmp_path / "fused.bin").write_bytes(packed.blob.tobytes())
        source = FileSource(tmp_path / "fused.bin")
        streamer = Streamer(it.device, 0, 0)
        one = Streamed(Extent(source, 0, source.size, "fused"), streamer, CPU, it.feed)
        slots = [Slot("up", PackedParameter(PackedTensor([one], (4, 100, 200))))]
        slots[0].offset = 4096
        room = expert_room(slots, PIECE)
        module = ExpertStore(it.device, 0, 2 * room, room, PIECE).module(slots)
        for number in (2, 0, 3):
            it.out.fill_(0xFF)
            module.fetch([number], it.out)
            assert np.array_equal(
                it.out.numpy()[4096 + 40_000 * number :][:40_000], data[40_000 * number :][:40_000]
            )
        source.close()
    finally:
        it.close()


def test_places_hold_any_expert_and_begin_where_they_may(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 2, 1)
    try:
        rooms = [
            sum(-(-piece.extent.size // 256) * 256 for piece in expert_pieces(it.slots, number, PIECE))
            for number in range(2)
        ]
        room = max(rooms)
        assert expert_room(it.slots, PIECE) == room
        assert room % 256 == 0
        assert ExpertStore(it.device, 256, room, room - 255, PIECE).cache.insert(None) == 0  # type: ignore[arg-type]
        for start, size in ((256, room - 1), (128, room)):
            with pytest.raises(InvalidInput, match=f"from byte {start} on holds no expert of {room} bytes"):
                ExpertStore(it.device, start, size, room, PIECE)
        exact = ExpertStore(it.device, 0, 2 * room, room, PIECE).module(it.slots)
        exact.fetch([rooms.index(room)], it.out)
        assert not it.wrong([rooms.index(room)])
    finally:
        it.close()


def test_gaps_between_experts_are_not_copied(tmp_path: Path) -> None:
    """Between two tensors of one lie those of another."""
    it = Fixture(tmp_path, 2, 2)
    try:
        pieces = expert_pieces(it.slots, 0, 1 << 20)
        extents = [slot.packed.sources[0] for slot in it.slots]
        whole = sum(int(of.offsets[-1] - of.offsets[0]) for of in extents)  # type: ignore[attr-defined]
        assert sum(piece.extent.size for piece in pieces) == whole
    finally:
        it.close()


def test_what_was_closed_is_not_fetched(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 2, 1)
    try:
        it.experts.fetch([0], it.out)
        streamer = it.slots[1].packed.sources[0]._streams  # type: ignore[attr-defined]
        streamer._closed = True
        with pytest.raises(ReadError, match="was closed"):
            it.experts.fetch([0], it.out)
    finally:
        it.close()


def test_what_is_refused(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 2, 1)
    try:
        it.device.graph = True
        with pytest.raises(UnsupportedDevice, match="while a CUDA graph was recorded"):
            it.experts.fetch([0], it.out)
        it.device.graph = False
        with pytest.raises(InvalidInput, match="holds no expert of 60160 bytes"):
            ExpertStore(it.device, 0, 60_000, 60_000, PIECE)
        small = ExpertStore(it.device, 0, 1 << 20, 30_000, PIECE)
        with pytest.raises(InvalidInput, match="expert 1 of `e0` takes"):
            small.module(it.slots).fetch([1], it.out)
    finally:
        it.close()
