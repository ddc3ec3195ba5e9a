"""The cache of experts, where they lie in fused weights, and the events that keep its places safe."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packed import pack
from support.simulated import MemoryFeed, Probe, SimulatedDevice

torch = pytest.importorskip("torch", reason="needs torch")

from support.cuda import Cuda  # noqa: E402

from tpde.errors import Corrupt, InvalidInput, ReadError, UnsupportedDevice  # noqa: E402
from tpde.format.blob_header import BlobHeader  # noqa: E402
from tpde.format.constants import CODEC_PREFIX  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.io.sources import Extent, FileSource  # noqa: E402
from tpde.nn import PackedParameter, PackedTensor  # noqa: E402
from tpde.nn.slot import Slot  # noqa: E402
from tpde.streaming.cuda_device import CudaDevice  # noqa: E402
from tpde.streaming.expert_cache import ExpertCache  # noqa: E402
from tpde.streaming.experts import ExpertStore, expert_pieces, expert_ranges, expert_room  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.streaming.streamer import Streamer  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")

CPU = torch.device("cpu")
PIECE = 32 << 10


class Model:
    """What `ExpertCache` does, with a list: the least recently used first."""

    def __init__(self, places: int) -> None:
        self.places, self.order, self.held = places, [], {}

    def evicted(self) -> int | None:
        return next((key for key in self.order if not self.held.get(key)), None)


@given(
    places=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from(["want", "release", "clear"]), st.integers(0, 7)), max_size=80),
)
def test_least_recently_used(places: int, steps: list[tuple[str, int]]) -> None:
    cache, model = ExpertCache[int](places), Model(places)
    where: dict[int, int] = {}
    for step, key in steps:
        if step == "clear":
            if key == 0:
                cache.clear()
                model, where = Model(places), {}
        elif step == "release":
            if model.held.get(key):
                cache.release(key)
                model.held[key] -= 1
        elif key in model.order:
            assert cache.lookup(key) == where[key]
            model.order.remove(key)
            model.order.append(key)
            model.held[key] = model.held.get(key, 0) + 1
        else:
            assert cache.lookup(key) is None
            out = model.evicted() if len(model.order) == places else None
            place = cache.insert(key)
            if len(model.order) == places and out is None:
                assert place is None
                continue
            assert place is not None
            if out is not None:
                assert place == where.pop(out), "the least recently used that nobody holds makes room"
                model.order.remove(out)
            where[key] = place
            model.order.append(key)
            model.held[key] = 1
        assert len(cache) == len(model.order) <= places
        assert all(it in cache for it in model.order)
        assert len(set(where.values())) == len(where)
        assert all(0 <= it < places for it in where.values())


def routed(
    layers: int, experts: int, chosen: int, tokens: int, skew: float, again: float, seed: int
) -> list[list[tuple[int, int]]]:
    """What layers want in turn: experts drawn by Zipf's law, each layer's own; some chosen again."""
    draw = np.random.default_rng(seed)
    weights = [draw.permutation(1 / np.arange(1, experts + 1) ** skew) for _ in range(layers)]
    wanted: list[list[int]] = [[] for _ in range(layers)]
    calls = []
    for _ in range(tokens):
        for layer in range(layers):
            kept = [it for it in wanted[layer] if draw.random() < again]
            order = np.argsort(draw.exponential(size=experts) / weights[layer]).tolist()
            wanted[layer] = sorted(kept + [it for it in order if it not in kept][: chosen - len(kept)])
            calls.append([(layer, it) for it in wanted[layer]])
    return calls


def found(calls: list[list[tuple[int, int]]], places: int, *, turns: bool = True) -> int:
    """How many hits calls have; without telling of turns, the least recently used always makes room."""
    cache = ExpertCache[tuple[int, int]](places)
    for keys in calls:
        if turns:
            cache.turn(keys[0][0], len(keys))
        missing = [key for key in keys if cache.lookup(key) is None]
        for key in keys:
            if key in cache:
                cache.release(key)
        flying: list[tuple[int, int]] = []
        while missing or flying:
            while missing and cache.insert(missing[0]) is not None:
                flying.append(missing.pop(0))
            cache.release(flying.pop(0))
    return cache.hits


@given(
    layers=st.integers(1, 6),
    experts=st.integers(2, 12),
    chosen=st.integers(1, 4),
    places=st.integers(1, 72),
    skew=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    again=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_as_many_are_found_as_if_the_least_recently_used_made_room(
    layers: int, experts: int, chosen: int, places: int, skew: float, again: float, seed: int
) -> None:
    """Or fewer by as many as there are places, whatever the routing; with `again` of 1 it does not change."""
    calls = routed(layers, experts, min(chosen, experts), 30, skew, again, seed)
    assert found(calls, places) >= found(calls, places, turns=False) - places


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_some_are_found_in_a_cache_too_small_for_a_token(skew: float) -> None:
    """32 layers that choose 2 of 8 experts each, and places for half of that."""
    calls = routed(32, 8, 2, 60, skew, 0.0, 0)
    assert found(calls, 32, turns=False) == 0
    assert found(calls, 32) > 0.09 * 2 * len(calls)


def test_what_fits_is_found_each_time() -> None:
    assert found(routed(5, 6, 2, 20, 0.0, 1.0, 0), 10) == 2 * 5 * 19


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


def in_turn(places: int, wanted: list[int], keys: int) -> tuple[ExpertCache[int], list[int | None]]:
    """A cache that is told of turns, and the places of so many keys, each of which is held only a moment."""
    cache = ExpertCache[int](places)
    for who, count in enumerate(wanted):
        cache.turn(who, count)
    found = []
    for key in range(keys):
        found.append(cache.insert(key))
        cache.release(key)
    return cache, found


def test_a_new_entry_makes_room_for_the_next_where_not_all_fit() -> None:
    """From one on, two others having been wanted by then; the eighth stays in place of the oldest."""
    cache, found = in_turn(2, [1, 2, 1], 12)
    assert found == [0, 1, *[0] * 8, 1, 1]
    assert 9 in cache
    cache, found = in_turn(2, [1, 2], 6)
    assert found == [0, 1, 0, 1, 0, 1], "all that others want in between fits"
    cache.turn("one", 1)
    cache.turn("one", 0)
    assert cache.insert(9) == 0, "what counts is how many it wanted last"


def test_forgotten_entries_are_held_no_longer() -> None:
    cache = ExpertCache[str](2)
    cache.insert("a")
    cache.clear()
    assert not len(cache)
    assert {cache.insert("b"), cache.insert("a")} == {0, 1}
    cache.release("a")
    assert cache.insert("c") is not None


def test_inserting_twice() -> None:
    cache = ExpertCache[str](2)
    cache.insert("a")
    with pytest.raises(ValueError, match="has a place already"):
        cache.insert("a")


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


class Fixture:
    """Experts of two blobs each, in a file, and a store for them."""

    def __init__(
        self, folder: Path, experts: int, places: int, kind: Any = SimulatedDevice, **device: Any
    ) -> None:
        self.data, blobs, at = [], [], 0
        path = folder / "experts.bin"
        with path.open("wb") as file:
            for i in range(2 * experts):
                values = np.random.default_rng(i).normal(size=20_000).astype(np.float32)
                data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
                packed = pack(TensorSpec("BF16", (100, 200)), data)
                assert packed is not None
                file.seek(at)
                file.write(packed.blob.tobytes())
                self.data.append(np.frombuffer(data, np.uint8))
                blobs.append((at, packed.blob.size))
                at += -(-packed.blob.size // 256) * 256
        self.source, self.feed = FileSource(path), MemoryFeed()
        self.device = kind(4 << 20, **device)
        streamer = Streamer(self.device, 0, 0)  # brings nothing
        made = [
            Streamed(Extent(self.source, *place, f"e{i}"), streamer, CPU, self.feed)
            for i, place in enumerate(blobs)
        ]
        shape = (experts, 100, 200)
        self.slots = [
            Slot(name, PackedParameter(PackedTensor([made[2 * e + i] for e in range(experts)], shape)))
            for i, name in enumerate(("up", "down"))
        ]
        self.slots[1].offset = 1 << 20
        room = expert_room(self.slots, PIECE)
        self.store = ExpertStore(self.device, 512, places * room, room, PIECE)
        self.experts = self.store.module(self.slots)
        self.out = torch.full((2 << 20,), 0xFF, dtype=torch.uint8)

    def wrong(self, numbers: list[int]) -> list[int]:
        """Which of some experts are not in their places in the buffer."""
        found = self.out.numpy()
        return [
            e
            for e in numbers
            for i, slot in enumerate(self.slots)
            if not np.array_equal(found[slot.offset + 40_000 * e :][:40_000], self.data[2 * e + i])
        ]

    def close(self) -> None:
        self.device.close()
        self.source.close()


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


@pytest.mark.parametrize(("without", "differs"), [("", False), ("hold", True), ("copied", True)])
def test_events(without: str, differs: bool, tmp_path: Path) -> None:
    """With copies and decodes late at random; and it shows when either wait is left out."""
    wrong: list[int] = []
    for seed in range(8 if differs else 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        it = Fixture(folder, 6, 2, delay=2e-3, seed=seed, without=without, blocking=False)
        try:
            # What is not there yet may not even be decodable.
            with suppress(*((Corrupt,) if differs else ())):
                wrong.append(-1)
                wrong[-1:] = late(it, np.random.default_rng(seed))
        finally:
            it.close()
        if wrong:
            break
    assert bool(wrong) is differs


def late(it: Fixture, draw: np.random.Generator) -> list[int]:
    """Fetch experts at random, the host never waiting before they are wanted; gives those that are wrong."""
    it.experts.fetch([], it.out)
    for n in range(6):
        it.experts._experts[n] = it.store.expert(it.slots, n)
        it.experts._experts[n].verified = True
    wrong = []
    for _ in range(40):
        it.out.fill_(0xFF)
        numbers = sorted(draw.choice(6, 3, replace=False).tolist())
        it.experts.fetch(numbers, it.out)
        it.device.compute.record().wait(60)
        wrong += it.wrong(numbers)
    return wrong


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


@pytest.mark.parametrize("what", ["record", "check", "fetch"])
def test_a_fetch_is_not_disturbed_by_another_thread(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Fixture(tmp_path, 4, 2)
    try:
        probe = it.store._lock = Probe(it.store._lock)  # type: ignore[assignment]
        another = it.store.expert(it.slots, 2)
        trace, out, alive = object(), torch.full((2 << 20,), 0xFF, dtype=torch.uint8), list[bool]()
        calls = {
            "record": lambda: it.store.record(trace),  # type: ignore[arg-type]
            "check": it.store.check,
            "fetch": lambda: it.store.fetch(it.experts, [another], out),
        }

        def call() -> None:
            calls[what]()
            probe.asked.set()  # had it not asked

        other, copy = threading.Thread(target=call), it.device.copy

        def slow(*args: Any) -> Any:
            if not alive:
                other.start()
                assert probe.asked.wait(60)
                alive.append(other.is_alive())
                assert it.device.trace is None
            return copy(*args)

        monkeypatch.setattr(it.device, "copy", slow)
        it.experts.fetch([0, 1], it.out)
        other.join()
        assert alive == [True], "it waits"
        assert not it.wrong([0, 1])
        assert what != "record" or it.device.trace is trace
    finally:
        it.device.trace = None
        it.close()


def test_a_new_expert_is_waited_for_beside_known_ones(tmp_path: Path) -> None:
    """Else damage would be told at its second use."""
    it = Fixture(tmp_path, 2, 2)
    try:
        it.experts.fetch([0], it.out)
        of: Any = it.slots[1].packed.sources[1]
        it.feed.whole(of.extent)[of.extent.offset + int(of.offsets[0]) + 40] ^= 1
        with pytest.raises(Corrupt, match=r"`e3`, chunk 0: .* is damaged"):
            it.experts.fetch([0, 1], it.out)
        assert not it.store._asked
    finally:
        it.close()


def test_places_are_free_after_an_error_when_the_device_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Fixture(tmp_path, 4, 4, blocking=False)
    try:
        gate, decode, calls = threading.Event(), it.device.decode, list[int]()

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                it.device.compute.put(lambda: gate.wait(60) and None)
                threading.Timer(0.05, gate.set).start()
                raise KeyboardInterrupt
            return decode(*args)

        monkeypatch.setattr(it.device, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.experts.fetch([0, 1], it.out)
        assert gate.is_set(), "it was waited for"
    finally:
        it.close()


def test_copies_are_queued_before_what_is_there_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus is busy meanwhile."""
    it = Fixture(tmp_path, 2, 2)
    try:
        it.experts.fetch([0], it.out)
        log: list[str] = []
        for name in ("copy", "decode"):
            real = getattr(it.device, name)
            monkeypatch.setattr(
                it.device, name, lambda *args, name=name, real=real: log.append(name) or real(*args)
            )
        it.experts.fetch([0, 1], it.out)
        assert log == sorted(log)
        assert {*log} == {"copy", "decode"}
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


@pytest.mark.parametrize("eager", ["copies", "computes"])
def test_the_bytes_are_right_in_whatever_order_streams_run(
    eager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    cuda = Cuda(monkeypatch, launch_on, eager)
    it = Fixture(tmp_path, 6, 2, kind=lambda ring: CudaDevice(cuda, ring))  # type: ignore[arg-type]
    try:
        cuda.tensors += [source for slot in it.slots for source in slot.packed.sources]  # type: ignore[misc]
        it.experts.fetch([], it.out)
        for n in range(6):
            it.experts._experts[n] = it.store.expert(it.slots, n)
            it.experts._experts[n].verified = True
        found: list[list[int]] = []
        for numbers in ([0, 1], [1, 2, 3], [3, 4, 0], [0, 5], [5, 0]):
            it.out.fill_(0xFF)
            it.experts.fetch(numbers, it.out)
            cuda.streams[0].put(lambda numbers=numbers: found.append(it.wrong(numbers)))
            cuda.streams[0].put(it.out.zero_)
        assert not found, "nobody has waited yet"
        it.store.check()
        assert found == [[]] * 5
        assert it.store.cache.hits > 0
        assert it.store.copied_bytes == sum(size for *_, size in cuda.copied)
    finally:
        it.close()


def test_checking_tells_of_damage_at_once(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 3, 1)
    try:
        it.store.check()
        it.experts.fetch([0, 1], it.out)
        it.store.check()
        extent = it.slots[0].packed.sources[1].extent
        whole = it.feed.whole(extent)
        whole[extent.offset + int(it.slots[0].packed.sources[1].offsets[1]) + 40] ^= 1
        it.experts.fetch([0], it.out)
        it.store.check()
        it.experts.fetch([1], it.out)
        it.experts.fetch([2], it.out)
        with pytest.raises(Corrupt, match=r"`e2`, chunk 1: .* was damaged since it was first read"):
            it.store.check()
        it.store.check()
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


def test_interrupted_again_while_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    it = Fixture(tmp_path, 6, 3)
    for expert in range(6):  # verified: nobody waits for checksums from now on
        it.experts.fetch([expert], it.out)
    it.store._forget()
    with monkeypatch.context() as patch:
        patch.setattr(it.feed, "wait", interrupted)
        patch.setattr(it.device, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.experts.fetch([0, 1], it.out)
    it.out.fill_(0xFF)
    it.experts.fetch([2, 3], it.out)
    assert not it.wrong([2, 3])
    it.close()


@pytest.mark.parametrize("kind", ["wait", "copy", "decode"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_a_failed_fetch_has_requested_is_given_back(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed with few buffers would have none left otherwise."""
    it, calls = Fixture(tmp_path, 6, 3), list[None]()
    of = it.feed if kind == "wait" else it.device
    real, copied = getattr(of, kind), list[Extent]()

    def fails(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > number:
            raise OSError("it failed")
        return real(*args)

    monkeypatch.setattr(it.feed, "copied", lambda extent, event: copied.append(extent))
    with monkeypatch.context() as patch:
        patch.setattr(of, kind, fails)
        with pytest.raises(OSError, match="it failed"):
            it.experts.fetch([*range(6)], it.out)
    assert it.feed.requested
    assert len(it.feed.requested) == len(copied) + it.feed.cancelled
    it.experts.fetch([*range(6)], it.out)
    assert not it.wrong([*range(6)])
    assert len(it.feed.requested) == len(copied) + it.feed.cancelled
    it.close()
