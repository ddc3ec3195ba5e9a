"""Pieces, and the ring that they are copied to, on a simulated device: every byte, whatever the order."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")

from support.ring import ROOM, SIZES, Fixture, filled  # noqa: E402

from tpde.errors import Corrupt, InvalidInput, PackedWeight, UnsupportedDevice  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.streaming.pieces import TensorPart, cut  # noqa: E402
from tpde.streaming.retained import Retained  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.streaming.streamer import Streamer  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(3000, 120_000), min_size=1, max_size=5),
    st.integers(40_000, 200_000),
    st.sampled_from([0, 8, 16]),
)
def test_pieces_hold_every_chunk_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, apart: int
) -> None:
    with Fixture(tmp_path_factory.mktemp("cut"), sizes, apart=apart) as made:
        parts = [TensorPart(it, 0, 0, it.header.chunks - 1) for it in made.tensors]
        pieces = cut(parts, limit)
        seen: list[tuple[str, int]] = []
        for piece in pieces:
            assert piece.extent.size <= limit
            for span in piece.spans:
                blob = span.tensor.extent.offset
                seen += [(span.tensor.name, i) for i in range(span.chunks.first, span.chunks.last + 1)]
                assert span.at == blob - piece.extent.offset
                assert span.at % 16 == 0
                assert piece.extent.offset <= blob + span.chunks.low
                assert blob + span.chunks.high <= piece.extent.offset + piece.extent.size
        assert seen == [(it.name, i) for it in made.tensors for i in range(it.header.chunks)]


@pytest.mark.parametrize("apart", [0, 8, 16])
@pytest.mark.parametrize("offset", [0, 8])
def test_blobs_at_odd_offsets_are_put_at_even_places(offset: int, apart: int, tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, offset=offset, apart=apart) as made:
        (unit, expected) = made.units((0, 1, 2))[0]
        assert all(span.at % 16 == 0 for piece in unit.pieces for span in piece.spans)
        assert filled(unit, len(expected)) == expected


def test_a_piece_that_cannot_hold_a_chunk(tmp_path: Path) -> None:
    with Fixture(tmp_path, [50_000]) as made, pytest.raises(InvalidInput, match=r"chunk 0 of `t0` has \d+"):
        cut([TensorPart(made.tensors[0], 0, 0, 1)], 4096)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=20),
    st.sampled_from([2, 3, 8]),
    st.booleans(),
    st.integers(0, 900_000),
    st.sampled_from([1, 2, 5]),
)
def test_any_order_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[tuple[int, int]],
    places: int,
    late: bool,
    keep: int,
    more: int,
) -> None:
    with Fixture(tmp_path_factory.mktemp("order"), SIZES, places=places, keep=keep) as made:
        made.streamer.ring.retained = Retained(places * ROOM, keep, more * made.source.size)
        made.feed.late, made.feed.ahead = late, 512 << 10
        units = made.units((0, 1), (2,), (3, 4), (5,))
        for unit, expected in (units[i] for i, times in order for _ in range(times)):
            assert filled(unit, len(expected)) == expected


def test_chunks_of_a_tensor(tmp_path: Path) -> None:
    with Fixture(tmp_path, [100_000]) as made:
        tensor, data = made.tensors[0], made.data[0]
        for first, last in ((0, 0), (3, 7), (tensor.header.chunks - 1, tensor.header.chunks - 1)):
            begin, end = (2 * it for it in tensor.header.chunk_range(first, last))
            unit = made.streamer.chunks(tensor, first, last, 512)
            assert filled(unit, 512 + end - begin)[512:] == data[begin:end]
            assert made.streamer.chunks(tensor, first, last, 512) is unit


def stress(folder: Path, rounds: int, without: str = "", seed: int = 0, keep: int = 0) -> int:
    """Fill units again and again, checked behind the decodes in their own stream; how many were wrong."""
    late: dict[str, Any] = {"delay": 2e-4, "seed": seed, "without": without, "blocking": False}
    with Fixture(folder, SIZES, places=3, keep=keep, **late) as made:
        units = made.units((0, 1), (2,), (4, 5))
        for unit, _ in units:
            unit.verified = True  # the first use would wait for everything
        wrong: list[int] = []
        out = torch.empty(max(len(expected) for _, expected in units), dtype=torch.uint8)
        for turn in range(rounds):
            unit, expected = units[turn % 3]
            try:
                unit(out)
            except Corrupt:
                wrong.append(turn)
                continue

            def check(turn: int = turn, expected: bytes = expected) -> None:
                # The gaps between tensors are not written.
                found = out.numpy()[: len(expected)]
                good = np.frombuffer(expected, np.uint8)
                if not ((found == good) | (good == 0xA5)).all():
                    wrong.append(turn)

            made.device.compute.put(check)
        made.device.wait()
        return len(wrong)


@pytest.mark.parametrize("keep", [0, 500_000])
def test_delays_change_nothing(tmp_path: Path, keep: int) -> None:
    assert stress(tmp_path, 1000, keep=keep) == 0


@pytest.mark.parametrize("event", ["hold", "copied"])
def test_without_an_event_the_bytes_are_wrong(tmp_path: Path, event: str) -> None:
    """The stress test would notice if either wait were missing."""
    assert sum(stress(tmp_path, 60, without=event, seed=seed) for seed in range(3)) > 0


def test_recording_begins_between_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread is in the middle of one, for which it has noted no start."""
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]
        probe = made.probe
        copy, seen, trace = made.device.copy, [], object()

        def record() -> None:
            made.streamer.record(trace)
            probe.asked.set()  # had it not asked

        other = threading.Thread(target=record)

        def slow(*args: object) -> object:
            if not seen:
                other.start()
                assert probe.asked.wait(60)
            seen.append(made.device.trace)
            return copy(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(made.device, "copy", slow)
        made.streamer.ring.prefetch = False
        assert filled(unit, len(expected)) == expected
        other.join()
        assert set(seen) == {None}
        assert made.device.trace is trace


def test_threads_take_turns(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        units = made.units((0, 1), (2,), (4, 5))
        wrong: list[int] = []

        def work(number: int) -> None:
            for turn in range(20):
                unit, expected = units[(turn * number + number) % 3]
                if filled(unit, len(expected)) != expected:
                    wrong.append(turn)

        threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_graph_cannot_hold_streamed_weights(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        (unit, expected) = made.units((0,))[0]
        made.device.graph = True
        with pytest.raises(UnsupportedDevice, match="CUDA graph"):
            filled(unit, len(expected))


def test_a_ring_without_places_streams_rows_only(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        streamer = Streamer(made.device, 0, 0)
        with pytest.raises(PackedWeight, match="`t0` stays on the host"):
            streamer.unit([(made.tensors[0], 0)])
        made.tensors[0].travels = False
        rest = streamer.unit([(made.tensors[0], 512)])
        assert filled(rest, 512 + 10_000)[512:] == made.data[0]
        assert not made.device.copied


def test_a_streamed_tensor_stays_where_it_is(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        tensor = made.tensors[0]
        tensor.apply(lambda it: it.to("cpu"))
        with pytest.raises(PackedWeight, match=r"`t0` is streamed .* without `vram=` to move it"):
            tensor.apply(lambda it: it.to("meta"))
        weight = PackedTensor(tensor)
        with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
            pickle.dumps(weight)
        with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
            copy.deepcopy(weight)
        with pytest.raises(PackedWeight, match="to load a state dict"):
            weight.load(PackedTensor(tensor))
        with pytest.raises(PackedWeight, match="to save or copy it"):
            tensor.blob  # noqa: B018
        with pytest.raises(PackedWeight, match="which plain weights would break"):
            tensor.require_restorable()
        for refused in (tensor.stored, tensor.clone):
            with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
                refused()
        with pytest.raises(PackedWeight, match="to load a state dict into it"):
            tensor.check_load(tensor)


def test_tables_and_index_maps_are_put_on_the_device_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one copy for all that are not there, and never again."""
    from tpde.cuda.items import lookup_tables
    from tpde.streaming import streamed_source as tensors

    golden = Path(__file__).parent.parent / "golden" / "prefix_16.tpde.safetensors"
    uploads: list[int] = []
    empty = torch.empty

    def counted(size: int, **options: Any) -> torch.Tensor:
        uploads.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", counted)
    with Checkpoint([golden]) as checkpoint:
        stored = list(checkpoint.packed.values())
        found: list[Any] = [Streamed(it.extent, None, torch.device("cpu"), None) for it in stored]
    coded = [it for it in found if lookup_tables(it.header, it._section) is not None]
    assert len(coded) > 1
    tensors.put_on_device(coded[:1])
    tensors.put_on_device(found)
    tensors.put_on_device(found)
    assert len(uploads) == 2
    for it in coded:
        tables, image = it.device_tables()
        assert np.array_equal(image.numpy(), tables.image)
        assert np.array_equal(it._device_index.numpy(), it.host_reader().index)
        assert it._device_index.data_ptr() % 16 == 0
    assert len(uploads) == 2
