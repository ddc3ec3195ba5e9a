"""Decoding blobs on a device, whole and in chunks: codecs, frames, damage, graphs. Kernels are simulated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend
from support.contents import fill
from support.kernels import Card, OnCard, There
from support.nvcomp import FakeNvcomp, merge_kernel
from support.packed import pack

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.codec.blob import RECORD, digest, write_constant  # noqa: E402
from tpde.cuda.nvcomp import Nvcomp  # noqa: E402
from tpde.errors import Corrupt, UnsupportedDevice  # noqa: E402
from tpde.format.blob_header import align  # noqa: E402
from tpde.format.constants import MODE_RAW  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.io.sinks import BytesSink  # noqa: E402
from tpde.weights import source as source_of  # noqa: E402
from tpde.weights.decoder import ChunkDecoder, Materializer  # noqa: E402
from tpde.weights.launch import Launch  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> Card:
    return Card(monkeypatch, launch_on)


def _blobs(card: Card, *codecs: Any) -> list[tuple[OnCard, bytes]]:
    made = []
    for number, codec in enumerate(codecs):
        spec = TensorSpec("BF16", (3, 20_001 + number))
        data = fill("constant" if codec == "constant" else "normal", spec)
        if codec == "constant":
            sink = BytesSink()
            size = write_constant(spec, data[:2], digest(data), sink, 0)
            blob = np.frombuffer(bytearray(sink.data[:size]), np.uint8)
        else:
            packed = pack(spec, data, codec)
            assert packed is not None
            blob = packed.blob.copy()
        source = OnCard(torch.from_numpy(blob), f"w{number}", card)
        assert source.codec.name == codec
        made.append((source, data))
    return made


def _laid_out(blobs: list[tuple[OnCard, bytes]]) -> tuple[list[tuple[OnCard, int]], bytes]:
    items, expected = [], b""
    for packed, data in blobs:
        items.append((packed, len(expected)))
        expected += data.ljust(-(-len(data) // 512) * 512, b"\xa5")
    return items, expected


def _fresh(size: int) -> Any:
    return torch.full((size,), 0xA5, dtype=torch.uint8)


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


@pytest.fixture
def frames(card: Card, launch_on: Any) -> Callable[[FakeNvcomp], None]:
    """Let the card have an nvCOMP."""

    def kernel(source: str, *given: Any) -> Any:
        return merge_kernel(source, *given) if source == "merge.cu" else card.kernel(source, *given)

    def put(found: FakeNvcomp) -> None:
        launch_on(MadeBackend(kernel, nvcomp=Nvcomp(lambda: found)))

    return put


def _here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the names of what the processor decodes."""
    names: list[str] = []
    decode = OnCard.decode_on_host
    monkeypatch.setattr(
        OnCard, "decode_on_host", lambda self, *args: (names.append(self.name), decode(self, *args))[1]
    )
    return names


@pytest.mark.parametrize("there", [True, False])
def test_frames_that_the_device_decodes(
    there: bool, card: Card, frames: Callable[[FakeNvcomp], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it can; else the processor does."""
    fake = FakeNvcomp("6.0.0")
    if there:
        frames(fake)
    items, expected = _laid_out(_blobs(card, "zstd", "prefix"))
    here = _here(monkeypatch)
    run = Materializer(items, card)
    for _ in range(2):
        out = _fresh(len(expected))
        run(out)
        assert out.numpy().tobytes() == expected
    assert bool(fake.calls) == there
    assert here == ([] if there else ["w0", "w0"])
    assert {it["cuda_stream"] for it in fake.options} == ({70} if there else set())


def test_frames_that_the_device_fails_at(
    card: Card, frames: Callable[[FakeNvcomp], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor decodes them, each time; nothing is said of them but a warning."""
    fake = FakeNvcomp("6.0.0")
    fake.fail = True
    frames(fake)
    items, expected = _laid_out(_blobs(card, "zstd", "prefix"))
    here = _here(monkeypatch)
    run = Materializer(items, card)
    out = _fresh(len(expected))
    with pytest.warns(RuntimeWarning, match="nvCOMP failed"):
        run(out)
    assert out.numpy().tobytes() == expected
    run(out)
    assert here == ["w0", "w0"]
    assert len(fake.calls) == 1


def test_damage_of_frames_is_named(card: Card, frames: Callable[[FakeNvcomp], None]) -> None:
    frames(FakeNvcomp("6.0.0"))
    spec = TensorSpec("BF16", (200_000,))
    found = pack(spec, fill("normal", spec), "zstd")
    assert found is not None
    header, blob, last = found.header, found.blob.copy(), found.header.chunks - 1
    assert last
    packed = OnCard(torch.from_numpy(blob), "w0", card)
    record = blob[header.index_at + 12 * last :][:12].view(RECORD)[0]
    run = Materializer([(packed, 0)], card)
    record["checksum"] ^= 1
    with pytest.raises(Corrupt, match=f"`w0`, chunk {last}"):
        run(_fresh(spec.nbytes))
    begin, end = header.chunk_range(last, last)
    raw = [record["modes"] >> 2 * plane & 3 for plane in range(2)].count(MODE_RAW)
    at = (int(record["offset"]) << header.unit_log2) + raw * align(end - begin, 16)
    blob[at + 3] = 0xFF  # the size of its first frame
    with pytest.raises(Corrupt, match="ends inside a zstd frame") as caught:
        Materializer([(packed, 0)], card)
    assert (caught.value.tensor, caught.value.chunk) == ("w0", last)


def test_what_neither_kernels_nor_nvcomp_decode(
    card: Card, launch_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec that is to come: the processor decodes it, and nvCOMP is not looked for."""
    launch_on(MadeBackend(card.kernel, nvcomp=Nvcomp(lambda: pytest.fail("there are no frames"))))
    items, expected = _laid_out(_blobs(card, "zstd"))
    monkeypatch.setattr(OnCard, "codec", SimpleNamespace(gpu=None))
    here, out = _here(monkeypatch), _fresh(len(expected))
    Materializer(items, card)(out)
    assert out.numpy().tobytes() == expected
    assert here == ["w0"]


def test_constants_in_parts(card: Card) -> None:
    ((packed, data),) = _blobs(card, "constant")
    begin, end = (2 * it for it in packed.header.chunk_range(2, 5))
    out = _fresh(1024 + end - begin)
    ChunkDecoder(packed, 2, 5, 512)(out)
    assert out.numpy().tobytes() == b"\xa5" * 512 + data[begin:end] + b"\xa5" * 512
    assert not card.launches
    assert not card.uploads


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


def test_what_the_processor_decodes_for_a_device_is_put_there(card: Card) -> None:
    ((packed, data),) = _blobs(card, "zstd")
    begin, end = (2 * it for it in packed.header.chunk_range(0, 0))
    out = _fresh(1024 + end - begin)
    ChunkDecoder(packed, 0, 0, 512)(out.as_subclass(There))
    assert out.numpy().tobytes() == b"\xa5" * 512 + data[begin:end] + b"\xa5" * 512


@pytest.mark.parametrize("turned", [False, True])
def test_of_sources_that_are_decoded_together_one_leads(turned: bool) -> None:
    """What streams knows what is on the device, too."""
    low, high = (
        SimpleNamespace(lead=lead, device=None, together=lambda items, lead=lead: (lead, items))
        for lead in (0, 1)
    )
    items: Any = [(high, 0), (low, 512)] if turned else [(low, 0), (high, 512)]
    found: Any = source_of.decoder(items)
    assert found == (1, items)
