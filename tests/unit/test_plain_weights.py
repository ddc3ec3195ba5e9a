"""Weights that are kept plain: each batch is read while the one before is decoded, in the room there is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.files import pack_bytes, safetensors_bytes  # noqa: E402
from support.kernels import Card  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import tpde.torch as packed_torch  # noqa: E402
from tpde.errors import Corrupt, Truncated  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.io.sources import Extent, FileSource  # noqa: E402
from tpde.loading import plain_weights, reading  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.plain_weights import decode_runs  # noqa: E402
from tpde.loading.reading import Reader, Reading  # noqa: E402
from tpde.loading.runs import Run  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402

CPU = torch.device("cpu")
COUNT, ROWS = 9, 64
NAMES = [f"{i}.weight" for i in range(COUNT)]


@pytest.fixture
def weights() -> dict[str, Any]:
    """Nine matrices, the first three of them larger."""
    torch.manual_seed(0)
    widths = [256 if i < 3 else 128 for i in range(COUNT)]
    return {
        name: torch.randn(ROWS, width).to(torch.bfloat16) for name, width in zip(NAMES, widths, strict=True)
    }


@pytest.fixture
def checkpoint(weights: dict[str, Any], tmp_path: Path) -> Iterator[Checkpoint]:
    path = tmp_path / "model.safetensors"
    packed_torch.save_file(weights, path)
    with Checkpoint([path]) as found:
        yield found


def runs_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: Run(it.spec.shape, it.dtype, [it]) for name, it in checkpoint.packed.items()}


def model_of(weights: dict[str, Any]) -> Any:
    with torch.device("meta"):
        made = [torch.nn.Linear(it.shape[1], ROWS, bias=False, dtype=it.dtype) for it in weights.values()]
        return torch.nn.Sequential(*made)


def threads() -> list[str]:
    """Those that read."""
    return [it.name for it in threading.enumerate() if it.name.startswith("tpde-read")]


class NotedReader(Reader):
    """Tells what it is asked for."""

    def __init__(self, device: Any, note: Callable[[Sequence[Any], Sequence[Extent]], None]) -> None:
        super().__init__(device)
        self._note = note

    def begin(self, tensors: Sequence[Any], extents: Sequence[Extent]) -> Reading:
        self._note(tensors, extents)
        return super().begin(tensors, extents)


class Watched:
    """Notes what is read and decoded, and where in the room for blobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        self.rooms: list[int] = []
        self._held: dict[str, tuple[int, int]] = {}
        decoder = plain_weights.decoder

        def decoded(items: Any) -> Any:
            ((packed, _),) = items
            done = decoder(items)

            def decode(out: Any) -> None:
                done(out)
                self.log.append(("decoded", packed.name))
                del self._held[packed.name]

            return decode

        monkeypatch.setattr(plain_weights, "decoder", decoded)

    def reader(self, device: Any) -> Reader:
        """What reads."""
        return NotedReader(device, self._read)

    def _read(self, tensors: Sequence[Any], extents: Sequence[Extent]) -> None:
        for tensor, extent in zip(tensors, extents, strict=True):
            first, size = tensor.data_ptr(), tensor.numel()
            for other, (start, length) in self._held.items():
                assert first + size <= start or start + length <= first, f"{extent.name} over {other}"
            self._held[extent.name] = first, size
            self.log.append(("read", extent.name))
            self.rooms.append(tensor.untyped_storage().nbytes())

    def ahead(self) -> int:
        """How many tensors were being read, at most, when one was decoded."""
        reading = most = 0
        for what, _ in self.log:
            reading += 1 if what == "read" else -1
            most = max(most, reading)
        return most


def decode(
    model: Any, checkpoint: Checkpoint, room: int, make_reader: Callable[[Any], Reader] = Reader
) -> list[int]:
    told: list[int] = []
    decode_runs(model, runs_of(checkpoint), CPU, told.append, room, make_reader)
    return told


@pytest.mark.parametrize("fit", [0.0, 0.5, 1.0, 2.0, 2.5, 4.0, 6.0, 100.0])
def test_bits_and_room(
    fit: float, weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits, order and room, with room for so many of the smaller blobs."""
    monkeypatch.setattr(plain_weights, "SCRATCH_LEAST", 0)
    sizes = {name: -(-it.extent.size // 256) * 256 for name, it in checkpoint.packed.items()}
    room = int(fit * max(sizes[name] for name in NAMES[3:]))
    watched, model = Watched(monkeypatch), model_of(weights)
    told = decode(model, checkpoint, room, watched.reader)
    for name, it in model.named_parameters():
        assert torch.equal(it.detach().view(torch.int16), weights[name].view(torch.int16)), name
    for what in ("read", "decoded"):
        assert [name for it, name in watched.log if it == what] == NAMES
    assert sum(told) == sum(it.extent.size for it in checkpoint.packed.values())
    for i, have in enumerate(watched.rooms):
        largest = max(sizes[name] for name in NAMES[i:])
        assert have <= (room if largest <= room else 2 * largest)
    assert (watched.ahead() > 1) == (fit >= 2)
    assert not threads()


def test_a_batch_is_read_while_the_one_before_is_decoded(
    weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding the first waits here until the second is being read."""
    read = threading.Event()
    real, second = FileSource.read_into, checkpoint.packed[NAMES[1]].extent

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        real(source, offset, out)
        if offset == second.offset and threading.current_thread().name.startswith("tpde-read"):
            read.set()

    monkeypatch.setattr(FileSource, "read_into", read_into)
    decoder = plain_weights.decoder

    def decoded(items: Any) -> Any:
        assert read.wait(60), "the second batch is not read before the first is decoded"
        return decoder(items)

    monkeypatch.setattr(plain_weights, "decoder", decoded)
    decode(model_of(weights), checkpoint, 2 * max(it.extent.size + 256 for it in checkpoint.packed.values()))


@pytest.mark.parametrize("name", [NAMES[0], NAMES[4], NAMES[-1]])
def test_a_read_that_fails(
    name: str, weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before is decoded; what would be read after it is not."""
    real, at = FileSource.read_into, checkpoint.packed[name].extent.offset

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        if offset == at and threading.current_thread().name.startswith("tpde-read"):
            raise Truncated("the disk ends here")
        real(source, offset, out)

    monkeypatch.setattr(FileSource, "read_into", read_into)
    watched = Watched(monkeypatch)
    room = 2 * max(it.extent.size + 256 for it in checkpoint.packed.values())
    with pytest.raises(Truncated, match="ends here"):
        decode(model_of(weights), checkpoint, room, watched.reader)
    assert not threads()
    assert ("decoded", name) not in watched.log
    assert {it for what, it in watched.log if what == "decoded"} <= set(NAMES[: NAMES.index(name)])


class Stop(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("error", [Corrupt("damaged"), Stop()], ids=["damage", "interrupt"])
def test_decoding_that_fails(
    error: BaseException,
    weights: dict[str, Any],
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ends it while others are read: no thread is left, and what nobody reads yet stays unread."""
    going, stopped, seen = threading.Event(), threading.Event(), list[int]()
    second, real = checkpoint.packed[NAMES[1]].extent, FileSource.read_into
    stop, stops = reading._Work.stop, list[Any]()

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        real(source, offset, out)
        if second.offset <= offset < second.offset + second.size and out.nbytes == 512:
            seen.append(offset)
            going.set()
            assert stopped.wait(60), "reading is not told to stop"

    def decoded(*_: Any) -> Any:
        assert going.wait(60)
        raise error

    def stop_(work: Any) -> None:
        stop(work)
        stops.append(work)
        if len(stops) == 2:  # of the batch that failed, and of the next
            stopped.set()

    monkeypatch.setattr(reading._Work, "stop", stop_)
    monkeypatch.setattr(FileSource, "read_into", read_into)
    monkeypatch.setattr(plain_weights, "decoder", decoded)
    room = 2 * max(it.extent.size + 256 for it in checkpoint.packed.values())
    with pytest.raises(type(error)):
        decode(model_of(weights), checkpoint, room, partial(Reader, piece=512, threads=1))
    assert len(seen) == 1
    assert not threads()


# ---- on a GPU ----


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> Card:
    """A GPU whose memory is the host's."""
    made, empty = Card(monkeypatch, launch_on), torch.empty

    def placed(*args: Any, device: Any = None, **options: Any) -> Any:
        return empty(*args, device=CPU if device is made else device, **options)

    monkeypatch.setattr(torch, "empty", placed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return made


def on_card(card: Card, model: Any, checkpoint: Checkpoint, room: int) -> None:
    decode_runs(model, runs_of(checkpoint), card, None, room, lambda _: Reader(CPU))  # type: ignore[arg-type]


def test_a_gpu_decodes_each_batch_with_one_launch(
    card: Card, weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(card.uploads))
    size = max(it.extent.size + 256 for it in checkpoint.packed.values())
    for room, launches in ((0, COUNT), (100 * size, 1)):
        card.uploads = 0
        model = model_of(weights)
        on_card(card, model, checkpoint, room)
        for name, it in model.named_parameters():
            assert torch.equal(it.detach().view(torch.int16), weights[name].view(torch.int16)), name
            assert not it.is_inference()
        assert card.uploads == launches
        assert all(it["CHECK"] for it in card.launches)
        assert given.pop() == launches, "what blobs were read to is given back"


def test_what_a_gpu_cannot_decode_is_decoded_alone(
    card: Card, weights: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    spec = {name: (TensorSpec("BF16", tuple(it.shape)), it.view(torch.int16)) for name, it in weights.items()}
    data = safetensors_bytes({name: (one, it.numpy().tobytes()) for name, (one, it) in spec.items()})
    path.write_bytes(pack_bytes(data, codec="zstd"))
    with Checkpoint([path]) as checkpoint:
        model = model_of(weights)
        on_card(card, model, checkpoint, 1 << 20)
    for name, it in model.named_parameters():
        assert torch.equal(it.detach().view(torch.int16), weights[name].view(torch.int16)), name
    assert not card.launches


def test_a_gpu_tells_damage(card: Card, weights: dict[str, Any], checkpoint: Checkpoint) -> None:
    stored = checkpoint.packed[NAMES[3]]
    at = stored.extent.offset + Streamed(stored.extent, None, CPU, None).header.chunks_at + 99
    path = Path(stored.extent.source.name)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=NAMES[3]) as caught:
        on_card(card, model_of(weights), checkpoint, 1 << 20)
    assert caught.value.tensor == NAMES[3]
    assert not threads()


# ---- the room for blobs ----


class Rooms:
    """Notes the room that blobs are read to: how large, and that the one before is gone by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.before: list[StorageWeakRef] = []
        allocate = plain_weights.allocate

        def allocated(size: int, device: Any, what: str) -> Any:
            if what != "the room that plain weights are decoded from":
                return allocate(size, device, what)
            assert all(it.expired() for it in self.before), "the room before is still there"
            made = allocate(size, device, what)
            self.sizes.append(size)
            self.before.append(StorageWeakRef(made.untyped_storage()))
            return made

        monkeypatch.setattr(plain_weights, "allocate", allocated)


def test_the_room_before_is_given_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_weights, "SCRATCH_LEAST", 0)
    rooms = Rooms(monkeypatch)
    scratch = plain_weights._Scratch([1000, 100, 100], 50, CPU)
    for number in range(3):
        scratch.place(number, [])
    assert rooms.sizes == [1000, 100], "twice as much as is needed would stay"
    scratch.free()
    assert rooms.before[-1].expired()


def test_blobs_are_gone_when_the_next_room_is_taken(
    weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three are so much larger that their room is too large for the others."""
    monkeypatch.setattr(plain_weights, "SCRATCH_LEAST", 0)
    rooms = Rooms(monkeypatch)
    real = plain_weights._Scratch
    monkeypatch.setattr(
        plain_weights,
        "_Scratch",
        lambda sizes, room, device: real(
            [8 * it if i < 3 else it for i, it in enumerate(sizes)], room, device
        ),
    )
    decode(model_of(weights), checkpoint, 0)
    assert len(rooms.sizes) == 2


def test_a_small_room_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares a segment of the allocator with others, and would not go back."""
    rooms = Rooms(monkeypatch)
    monkeypatch.setattr(plain_weights, "SCRATCH_LEAST", 1000)
    scratch = plain_weights._Scratch([1000, 100, 50], 0, CPU)
    for number in range(3):
        scratch.place(number, [])
    assert rooms.sizes == [1000]


def test_there_is_no_more_room_than_is_of_use(
    weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = max(it.extent.size + 256 for it in checkpoint.packed.values())
    monkeypatch.setattr(plain_weights, "SCRATCH_BYTES", 2 * size)
    rooms = Rooms(monkeypatch)
    decode(model_of(weights), checkpoint, 1 << 30)
    assert 0 < max(rooms.sizes) <= 2 * size
