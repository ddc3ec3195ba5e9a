"""Launches: what they put on a device, which stream they go to, what they report. Kernels are simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.contents import fill
from support.kernels import Card, OnCard, memory
from support.packed import pack

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.errors import Corrupt, UnsupportedDevice  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.weights.decoder import ChunkDecoder, Materializer  # noqa: E402
from tpde.weights.launch import Damage, Launch  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


class Work:
    """Notes how it is launched, and what it finds at the addresses; reports what it is told to."""

    def __init__(self, name: bytes, report: tuple[int, int, int, int] = (0, 0, 0, 0)) -> None:
        self.descriptors = np.frombuffer(name, np.uint8)
        self.report, self.given = report, list[Any]()

    def launch(self, descriptors: int, status: int, stream: int, *rest: Any, **named: Any) -> str:
        assert descriptors % 16 == 0
        assert status % 16 == 0
        found = memory(descriptors, self.descriptors.size).tobytes()
        self.given.append((found, stream, rest, named))
        if any(self.report):
            memory(status, 16).view("<u4")[:] = self.report
        return found.decode()


def reports(count: int) -> torch.Tensor:
    """Stand in for page-locked memory."""
    return torch.zeros(count, 4, dtype=torch.int32)


@pytest.mark.parametrize("locked", [False, True])
def test_works_share_one_copy_and_report_side_by_side(locked: bool, card: Card) -> None:
    works = [Work(b"one"), Work(b"", (1, 0, 7, 0)), Work(b"a longer list of things", (1, 2, 5, 3))]
    there = Launch(works, card, reports(3) if locked else None)
    assert card.uploads == 1
    assert [there(number, 10, b=number) for number in (2, 0, 1)] == ["a longer list of things", "one", ""]
    assert works[0].given == [(b"one", 70, (10,), {"b": 0})]
    assert card.uploads == 1
    assert there.damage() == Damage(1, 0, 7)
    assert there.damage() == Damage(2, 2, 3 << 32 | 5)
    assert there.damage() is None


def test_a_launch_of_nothing(card: Card) -> None:
    assert Launch[..., None]([], card, reports(0)).damage() is None
    assert Launch[..., None]([], card).damage() is None


def test_the_other_device_is_current_meanwhile(card: Card) -> None:
    seen = []
    work = SimpleNamespace(descriptors=np.zeros(0, np.uint8), launch=lambda *_: seen.append(card.current))
    there = Launch([work], card)
    card.current = 3
    there(0)
    assert (seen, card.current) == ([0], 3)


@pytest.mark.parametrize("locked", [False, True])
def test_a_report_that_is_being_written_is_not_read(locked: bool, card: Card) -> None:
    """A kernel puts it into memory that the host may look at meanwhile."""
    work = Work(b"", (2, 0, 7, 0))
    there = Launch([work], card, reports(1) if locked else None)
    there(0)
    there.report(["w"])
    assert there._reports.tolist() == [[2, 0, 7, 0]]
    work.report = (1, 0, 7, 0)
    there(0)
    with pytest.raises(Corrupt, match="`w`, chunk 7: its checksum does not match") as caught:
        there.report(["w"])
    assert (caught.value.tensor, caught.value.chunk) == ("w", 7)
    assert there._reports.tolist() == [[0, 0, 0, 0]]
    there.report(["w"])


# ---- what launches ----


def _blobs(card: Card, *codecs: str) -> list[tuple[OnCard, bytes]]:
    made = []
    for number, codec in enumerate(codecs):
        spec = TensorSpec("BF16", (3, 20_001 + number))
        data = fill("zeros" if codec == "constant" else "normal", spec)
        packed = pack(spec, data, "auto" if codec == "constant" else codec)
        assert packed is not None
        made.append((OnCard(torch.from_numpy(packed.blob.copy()), f"w{number}", card), data))
    return made


def _laid_out(blobs: list[tuple[OnCard, bytes]]) -> tuple[list[tuple[OnCard, int]], bytes]:
    items, expected = [], b""
    for packed, data in blobs:
        items.append((packed, len(expected)))
        expected += data.ljust(-(-len(data) // 512) * 512, b"\xa5")
    return items, expected


def _fresh(size: int) -> Any:
    return torch.full((size,), 0xA5, dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # nvCOMP is missing
def test_every_codec_in_one_buffer(card: Card) -> None:
    items, expected = _laid_out(_blobs(card, "prefix", "constant", "zstd", "prefix"))
    decode = Materializer(items, card)
    for check in (None, None, True):
        out = _fresh(len(expected))
        decode(out, check)
        assert out.numpy().tobytes() == expected
    checks = [it["CHECK"] for it in card.launches]
    kinds = len(checks) // 3  # of kernels
    assert checks == [1] * kinds + [0] * kinds + [1] * kinds
    assert {it["stream"] for it in card.launches} == {70}
    card.recording = True
    with pytest.raises(UnsupportedDevice, match="`w2` is packed with zstd"):
        decode(_fresh(len(expected)))


def test_damage_is_named_and_found_once(card: Card) -> None:
    blobs = _blobs(card, "prefix", "prefix")
    items, expected = _laid_out(blobs)
    decode, packed = Materializer(items, card), blobs[1][0]
    out = _fresh(len(expected))
    decode(out)
    uploads = card.uploads
    packed.blob[packed.header.blob_bytes - 3000] ^= 8
    decode(out)  # is not looked at again
    with pytest.raises(Corrupt, match="`w1`, chunk 7") as caught:
        decode(out, True)
    assert (caught.value.tensor, caught.value.chunk) == ("w1", 7)
    packed.blob[packed.header.blob_bytes - 3000] ^= 8
    decode(out, True)
    assert out.numpy().tobytes() == expected
    assert card.uploads == uploads


@pytest.mark.parametrize("part", [False, True])
def test_damage_that_is_found_at_first_is_looked_for_again(part: bool, card: Card) -> None:
    """Whoever goes on after the error is told again, until what is there is not damaged."""
    ((packed, data),) = blobs = _blobs(card, "prefix")
    decode: Any = Materializer(_laid_out(blobs)[0], card)
    if part:
        decode = ChunkDecoder(packed, 0, 7, 0)
    out = _fresh(len(data))
    packed.blob[packed.header.blob_bytes - 3000] ^= 8
    for _ in range(3):
        with pytest.raises(Corrupt, match="`w0`, chunk 7"):
            decode(out)
    packed.blob[packed.header.blob_bytes - 3000] ^= 8
    for _ in range(2):
        decode(out)
        assert out.numpy().tobytes() == data
    assert [it["CHECK"] for it in card.launches] == [1] * 4 + [0]


def test_while_a_graph_is_recorded_nobody_waits(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    items, expected = _laid_out(_blobs(card, "prefix"))
    decode, part = Materializer(items, card), ChunkDecoder(items[0][0], 0, 1, 0)
    waited: list[None] = []
    monkeypatch.setattr(Launch, "damage", lambda _: waited.append(None))
    card.recording = True
    for _ in range(2):
        decode(_fresh(len(expected)))
        part(_fresh(len(expected)))
    assert not waited
    card.recording = False
    decode(_fresh(len(expected)))
    part(_fresh(len(expected)))
    assert len(waited) == 2
    assert [it["CHECK"] for it in card.launches] == [1] * 6


def test_chunks(card: Card) -> None:
    ((packed, data),) = _blobs(card, "prefix")
    begin, end = (2 * it for it in packed.header.chunk_range(2, 5))
    decode = ChunkDecoder(packed, 2, 5, 512)
    for _ in range(2):
        out = _fresh(1024 + end - begin)
        decode(out)
        assert out.numpy().tobytes() == b"\xa5" * 512 + data[begin:end] + b"\xa5" * 512
    assert [it["CHECK"] for it in card.launches] == [1, 0]
    packed.blob[packed.header.blob_bytes - 3000] ^= 8  # in another chunk
    ChunkDecoder(packed, 2, 5, 512)(out)
    with pytest.raises(Corrupt, match="`w0`, chunk 7"):
        ChunkDecoder(packed, 5, 7, 0)(torch.empty(3 << 14, dtype=torch.uint8))
