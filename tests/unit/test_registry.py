"""The registry of codecs: complete, and all that a new codec needs beside the format's own facts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.contents import fill
from support.kernels import Card, OnCard

from tpde.codec import prefix_codes, registry
from tpde.codec.blob import BlobReader, BlobWriter, digest
from tpde.codec.core_chunks import EncodedChunks
from tpde.codec.native import Bytes
from tpde.codec.reference import CODECS as DOCUMENTED
from tpde.codec.registry import CODECS, Codec, Gpu, codec_of
from tpde.codec.selection import TensorPlan, core_layout, plan_tensor
from tpde.format.blob_header import MAX_FIXED_BYTES, BlobHeader, parse_blob_header
from tpde.format.constants import CODEC_FACTS, CodecFacts
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink
from tpde.io.sources import BytesSource

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.weights.decoder import ChunkDecoder, Materializer  # noqa: E402

SPEC = TensorSpec("BF16", (40, 1000))
DATA = fill("normal", SPEC)
NEW = 9


def test_every_codec_of_the_format_has_a_record() -> None:
    assert {it.name: number for number, it in CODECS.items()} == DOCUMENTED
    assert CODECS.keys() == CODEC_FACTS.keys()
    for number, it in CODECS.items():
        assert it.number == number
        assert (it.chunks is not None) == CODEC_FACTS[number].chunks
        assert not it.in_pieces or it.gpu is Gpu.KERNELS
        assert it.stays == (it.name == "zstd")


class Turned:
    """Prefix codes with all bits turned."""

    def __init__(self, header: BlobHeader, section: bytes, encode: bool) -> None:
        self._codec = prefix_codes.PrefixCodec(core_layout(header), section, encode=encode)

    def bound(self, words: int, chunks: int) -> int:
        return self._codec.bound(words, chunks)

    def encode(
        self, words: Bytes, first: int, count: int, offset: int, out: Bytes, threads: int = 1
    ) -> EncodedChunks:
        made = self._codec.encode(words, first, count, offset, out, threads)
        made.data[:] = ~made.data
        return made

    def decode(
        self, index: Bytes, first: int, data: Bytes, begin: int, end: int, out: Bytes, threads: int = 1
    ) -> None:
        self._codec.decode(index, first, ~data, begin, end, out, threads)


@pytest.fixture
def blob(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A blob of a codec that is registered only here, and that no GPU decodes."""
    monkeypatch.setitem(CODEC_FACTS, NEW, CodecFacts("turned", True, True, 32768))
    monkeypatch.setitem(registry.CODECS, NEW, Codec(NEW, Turned, Gpu.NONE))
    plan = plan_tensor(SPEC, np.frombuffer(DATA, np.uint8), "prefix")
    assert plan is not None
    plan = TensorPlan(dataclasses.replace(plan.header, codec=NEW), plan.section, plan.estimate)
    sink = BytesSink()
    writer = BlobWriter(plan, sink, 0, 1)
    writer.write(np.frombuffer(DATA, np.uint8))
    writer.finish(digest(DATA))
    return np.frombuffer(bytearray(sink.data), np.uint8)


def test_a_new_codec_is_read(blob: Any) -> None:
    header = parse_blob_header(blob[:MAX_FIXED_BYTES].tobytes(), blob.size)
    assert codec_of(header).name == "turned"
    assert codec_of(header).stays
    out = np.empty(SPEC.nbytes, np.uint8)
    BlobReader(BytesSource(blob), 0, blob.size).read(0, out.size, out)
    assert out.tobytes() == DATA


def test_what_no_gpu_decodes_the_cpu_does(blob: Any, monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> None:
    card = Card(monkeypatch, launch_on)
    packed = OnCard(torch.from_numpy(blob), "w", card)
    out = torch.full((512 + SPEC.nbytes,), 0xA5, dtype=torch.uint8)
    Materializer([(packed, 512)], card)(out)
    assert out.numpy().tobytes() == b"\xa5" * 512 + DATA
    begin, end = (2 * it for it in packed.header.chunk_range(1, 2))
    out = torch.empty(end - begin, dtype=torch.uint8)
    ChunkDecoder(packed, 1, 2, 0)(out)
    assert out.numpy().tobytes() == DATA[begin:end]
    assert not card.launches
