"""Weights that are kept plain: each batch is read while the one before is decoded, in the room there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.files import pack_bytes, safetensors_bytes  # noqa: E402
from support.kernels import Card  # noqa: E402
from support.noted_reading import NotedReader, decode, runs_of  # noqa: E402

import tpde.torch as packed_torch  # noqa: E402
from tpde.errors import Corrupt, Truncated  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.io.sources import Extent, FileSource  # noqa: E402
from tpde.loading import plain_weights  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.plain_weights import decode_runs  # noqa: E402
from tpde.loading.reading import Reader  # noqa: E402
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


def model_of(weights: dict[str, Any]) -> Any:
    with torch.device("meta"):
        made = [torch.nn.Linear(it.shape[1], ROWS, bias=False, dtype=it.dtype) for it in weights.values()]
        return torch.nn.Sequential(*made)


def threads() -> list[str]:
    """Those that read."""
    return [it.name for it in threading.enumerate() if it.name.startswith("tpde-read")]


class Watched:
    """Notes what is read and decoded, and where in the room for blobs."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.rooms: list[int] = []
        self.told: list[int] = []
        self._held: dict[str, tuple[int, int]] = {}

    def reader(self, device: Any, **options: Any) -> Reader:
        """What reads."""
        return NotedReader(device, note=self._read, **options)

    def decoded(self, size: int) -> None:
        """Those that come next are decoded, of so many bytes."""
        self.told.append(size)
        while size > 0:
            name = next(iter(self._held))
            size -= self._held.pop(name)[1]
            self.log.append(("decoded", name))
        assert not size

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


def room_for_two(checkpoint: Checkpoint) -> int:
    return 2 * max(it.extent.size + 256 for it in checkpoint.packed.values())


@pytest.mark.parametrize("fit", [0.0, 0.5, 1.0, 2.0, 2.5, 4.0, 6.0, 100.0])
def test_bits_and_room(fit: float, weights: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Bits, order and room, with room for so many of the smaller blobs."""
    sizes = {name: -(-it.extent.size // 256) * 256 for name, it in checkpoint.packed.items()}
    room = int(fit * max(sizes[name] for name in NAMES[3:]))
    watched, model = Watched(), model_of(weights)
    decode(model, checkpoint, room, watched.reader, watched.decoded)
    for name, it in model.named_parameters():
        assert torch.equal(it.detach().view(torch.int16), weights[name].view(torch.int16)), name
    for what in ("read", "decoded"):
        assert [name for it, name in watched.log if it == what] == NAMES
    assert sum(watched.told) == sum(it.extent.size for it in checkpoint.packed.values())
    largest = max(sizes.values())
    assert max(watched.rooms) <= (room if largest <= room else 2 * largest)
    assert (watched.ahead() > 1) == (fit >= 2)
    assert not threads()


def test_a_batch_is_read_while_the_one_before_is_decoded(
    weights: dict[str, Any], checkpoint: Checkpoint
) -> None:
    """Decoding the first waits here until the second is being read."""
    read = threading.Event()
    second = checkpoint.packed[NAMES[1]].extent

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        source.read_into(offset, out)
        if offset == second.offset:
            read.set()

    def complete() -> None:
        assert read.wait(60), "the second batch is not read before the first is decoded"

    reader = partial(NotedReader, read_into=read_into, complete=complete)
    decode(model_of(weights), checkpoint, room_for_two(checkpoint), reader)


@pytest.mark.parametrize("name", [NAMES[0], NAMES[4], NAMES[-1]])
def test_a_read_that_fails(name: str, weights: dict[str, Any], checkpoint: Checkpoint) -> None:
    """What was read before is decoded; what would be read after it is not."""
    at = checkpoint.packed[name].extent.offset

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        if offset == at:
            raise Truncated("the disk ends here")
        source.read_into(offset, out)

    watched = Watched()
    reader = partial(watched.reader, read_into=read_into)
    with pytest.raises(Truncated, match="ends here"):
        decode(model_of(weights), checkpoint, room_for_two(checkpoint), reader, watched.decoded)
    assert not threads()
    assert ("decoded", name) not in watched.log
    assert {it for what, it in watched.log if what == "decoded"} <= set(NAMES[: NAMES.index(name)])


class Stop(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("error", [Corrupt, Stop], ids=["damage", "interrupt"])
def test_decoding_that_fails(
    error: type[BaseException], weights: dict[str, Any], checkpoint: Checkpoint
) -> None:
    """Whatever ends it while others are read: no thread is left, and what nobody reads yet stays unread."""
    going, leaving, seen = threading.Event(), threading.Event(), list[int]()
    first, second = (checkpoint.packed[it].extent for it in NAMES[:2])

    def read_into(source: FileSource, offset: int, out: memoryview) -> None:
        source.read_into(offset, out)
        if error is Corrupt and offset == first.offset:
            out[:4] = b"none"
        if second.offset <= offset < second.offset + second.size:
            seen.append(offset)
            going.set()
            assert leaving.wait(60), "reading goes on"
            time.sleep(0.05)  # after which it is told to stop

    class Left(NotedReader):
        def __exit__(self, *error: object) -> None:
            leaving.set()
            super().__exit__(*error)

    def complete() -> None:
        assert going.wait(60)
        if error is Stop:
            raise Stop

    reader = partial(Left, read_into=read_into, complete=complete, piece=512, threads=1)
    with pytest.raises(error):
        decode(model_of(weights), checkpoint, room_for_two(checkpoint), reader)
    assert len(seen) < second.size // 512, "all of it is read"
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


def test_there_is_no_more_room_than_is_of_use(
    weights: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = room_for_two(checkpoint)
    monkeypatch.setattr(plain_weights, "SCRATCH_BYTES", room)
    watched = Watched()
    decode(model_of(weights), checkpoint, 1 << 30, watched.reader, watched.decoded)
    assert 0 < max(watched.rooms) <= room
