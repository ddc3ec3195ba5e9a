"""The kernels that pack tensors, run on the CPU: the bytes of the packer, of any tensor at any place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.contents import CONTENTS, fill, spec_of
from support.emulated import on_cpu  # noqa: F401
from support.encoding import Encoding, assert_same_blob, encoding_on_host, spread, uneven
from support.packed import pack
from support.window_encoding import guards, room

import tpde
from tpde.codec import selection
from tpde.codec.blob import RECORD, BlobReader
from tpde.codec.native import Bytes
from tpde.cuda import encode
from tpde.cuda.digest import Bytestring, Digests
from tpde.cuda.encode import PackEncoder
from tpde.errors import Corrupt
from tpde.files.tensor_writer import TensorWriter
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink
from tpde.io.sources import BytesSource

DTYPES = ("F16", "F32", "C64", "F64", "F8_E4M3", "F8_E8M0", "BOOL", "I8", "I16", "U32", "I64", "F4")
SIZES = (1021, 8191, 8192, 8193, 2 * 8192 + 517, 70 * 8192 + 3)

pytestmark = pytest.mark.usefixtures("on_cpu")


def check(spec: TensorSpec, data: bytes | Bytes, first: int = 0) -> Encoding | None:
    """Compare a tensor's blob with the packer's; None if there is none."""
    made, expected = encoding_on_host(spec, data, first), pack(spec, bytes(data))
    if made is None:
        word = expected and expected.header.word_bytes
        assert expected is None or bytes(data[word:]) == bytes(data[:-word])
        return None
    assert expected is not None
    assert_same_blob(made.blob, expected)
    return made


def packed(spec: TensorSpec, data: bytes | Bytes, first: int = 0) -> Encoding:
    made = check(spec, data, first)
    assert made is not None
    return made


@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("content", CONTENTS)
def test_the_bytes_of_the_packer(content: str, words: int) -> None:
    spec = spec_of("BF16", words)
    check(spec, fill(content, spec))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", ["normal", "nearly", "specials", "ascending"])
def test_every_kind_of_words(content: str, dtype: str) -> None:
    spec = spec_of(dtype, 3 * 8192 + 77)
    check(spec, fill(content, spec))


@pytest.mark.parametrize("first", range(2, 16, 2))
def test_words_at_any_address(first: int) -> None:
    spec = spec_of("BF16", 2 * 8192 + 100)
    packed(spec, fill("normal", spec), first)


@pytest.mark.parametrize("shape", [(3, 701, 751), (2, 700, 752), (4, 512, 1024)])
def test_slices_of_experts(shape: tuple[int, ...]) -> None:
    """Chunks start anew with each slice, at odd addresses if these are of odd sizes."""
    spec = TensorSpec("BF16", shape)
    made = packed(spec, fill("normal", spec))
    assert made.chosen.header.segment_words == shape[1] * shape[2]


def test_two_tables_of_pairs() -> None:
    made = packed(TensorSpec("BF16", (60 * 8192 + 21,)), spread(60 * 8192 + 21))
    assert made.chosen.header.planes[1] == (0, 2)
    assert set(made.found.records.view(RECORD)["table"]) == {0, 1}


def test_four_tables_of_symbols() -> None:
    scale = 2.0 ** (-3 * (np.arange(64) % 4))[:, None]
    words = (np.random.default_rng(3).standard_normal((64, 8192)) * scale).astype(np.float16)
    made = packed(TensorSpec("F16", (64 * 8192,)), words.reshape(-1).view(np.uint8))
    assert made.chosen.header.planes[1][1] == 4
    assert set(made.found.records.view(RECORD)["table"]) == {0, 1, 2, 3}


def test_lanes_that_are_rounded() -> None:
    made = packed(TensorSpec("BF16", (5 * 8192 + 300,)), uneven(5 * 8192 + 300))
    header = made.found.header
    lanes = made.blob[header.chunks_at + 8192 :]
    assert lanes[2] > 0  # the shift
    assert lanes[4 + 5] > 0


def test_larger_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tensor of 256 GiB has them."""
    monkeypatch.setattr(selection, "unit_log2", lambda nbytes: 7)
    spec = spec_of("BF16", 40 * 8192 + 1000)
    made = packed(spec, fill("normal", spec))
    assert made.found.header.unit_log2 == 7


def test_the_sum_of_many_blocks() -> None:
    """More than 32 blocks: some look further back than a warp at once."""
    spec = spec_of("F8_E5M2", 300 * 8192)
    packed(spec, fill("normal", spec))


@pytest.mark.parametrize("ends", [0, 3, 4, 5, 36])
def test_blocks_that_wait_for_many(ends: int) -> None:
    """The last of 38 blocks: those before have said what they have, block `ends` what all up to it have."""
    spec = spec_of("F8_E5M2", 300 * 8192)
    made = packed(spec, fill("normal", spec))
    encoder, chosen, scratch = made.encoder, made.chosen, made.scratch
    job = chosen.image[: encode._JOB.itemsize].view(encode._JOB)
    states = scratch[int(job["states"][0]) :][: 8 * 38].view(np.uint64)
    records = scratch[32 : chosen.found_bytes].view(RECORD)
    starts = (records["offset"][::8] - np.uint32(job["first"][0])).astype(np.uint64)
    assert ((states[:-1] & np.uint64(0xFFFFFFFF)) == starts[1:]).all()
    states[1:-1] = np.diff(starts)[1:] | np.uint64(1 << 32)
    states[ends] = starts[ends + 1] | np.uint64(2 << 32)
    states[-1] = 0
    scratch[12] = 37  # the ticket
    expected = records.copy()
    records[8 * 37 :] = 0
    given = encoder.at, scratch.ctypes.data, scratch.ctypes.data + chosen.image_at, 0
    encoder._launch("measure", chosen.defines, 1, 256, *given)
    assert (records == expected).all()


@pytest.mark.parametrize("content", ["normal", "ascending", "specials"])
def test_words_that_change_meanwhile(content: str) -> None:
    """Nothing outside the blob is written, though there is no room for what lanes take now."""
    spec = spec_of("BF16", 8192 * 4 + 99)
    made = packed(spec, fill(content, spec))
    made.words[:] = np.frombuffer(fill("random", spec), np.uint8)
    made.encoder.encode(made.chosen, made.scratch.ctypes.data, made.blob.ctypes.data, 0)
    assert (guards(made.blob) == 0xA5).all()
    assert (guards(made.scratch) == 0xA5).all()
    reader = BlobReader(BytesSource(made.blob.tobytes()), 0, made.blob.size)
    with pytest.raises(Corrupt):
        reader.read(0, spec.nbytes, np.empty(spec.nbytes, np.uint8))


def test_other_words_than_the_sample() -> None:
    """What is chosen for some words packs any."""
    spec = spec_of("BF16", 8192 * 4 + 99)
    for content in ("random", "zeros", "constant", "exponents"):
        made = packed(spec, fill("normal", spec))
        data = np.frombuffer(fill(content, spec), np.uint8)
        made.words[:] = data
        made.encoder.measure(made.chosen, made.scratch.ctypes.data, 0)
        found = made.encoder.found(made.chosen, made.scratch[: made.chosen.found_bytes])
        blob = room(found.nbytes, 16, 0xA5)
        made.encoder.encode(made.chosen, made.scratch.ctypes.data, blob.ctypes.data, 0)
        assert (guards(blob) == 0xA5).all()
        head = found.head(bytes(16))
        blob[: head.size] = head
        out = np.empty(spec.nbytes, np.uint8)
        BlobReader(BytesSource(blob.tobytes()), 0, blob.size).read(0, spec.nbytes, out)
        assert (out == data).all()


def test_the_blob_in_a_file(tmp_path: Path) -> None:
    """With its hash, the very bytes that packing files writes."""
    spec = TensorSpec("BF16", (900, 1100))
    data = np.frombuffer(fill("normal", spec), np.uint8)
    made = packed(spec, data)
    hashing = Digests([Bytestring(data.ctypes.data, data.size)], 0)
    items, scratch = room(hashing.items.size, 16, 0), room(hashing.scratch_bytes, 16, 0)
    items[:] = hashing.items
    hashing.sums(scratch.ctypes.data, 0)
    hashing.chain(items.ctypes.data, scratch.ctypes.data, 0)
    (digest,) = hashing.results(scratch[: hashing.found_bytes])
    head = made.found.head(digest)
    made.blob[: head.size] = head
    entry = {"dtype": "BF16", "shape": [900, 1100], "data_offsets": [0, data.size]}
    header = json.dumps({"weight": entry}).encode()
    source, target = tmp_path / "model.safetensors", tmp_path / "packed.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    tpde.pack(source, target)
    file = target.read_bytes()
    at = 8 + int.from_bytes(file[:8], "little")
    begin, end = json.loads(file[8:at])["weight_tpde"]["data_offsets"]
    assert file[at + begin : at + end] == made.blob.tobytes().ljust(end - begin, b"\0")


@pytest.mark.parametrize("words", [70 * 8192 + 3, 30 * 8192 + 5, 1021])
def test_first_bytes_for_a_sample(words: int) -> None:
    """As tensors in memory are packed: of these runs of weights, those of the first MiB give the tables."""
    data = spread(words)
    data[: min(words, 50 * 8192)] = data[0]
    data[:2] ^= 0x55
    spec = TensorSpec("BF16", (words,))
    made = encoding_on_host(spec, data, spread=False)
    assert made is not None
    sink = BytesSink(spec.nbytes + (1 << 16))
    writer = TensorWriter(spec, sink, 0, threads=2, codec="prefix", may_pack=True, background=None)
    writer.write(data)
    stored = writer.finish()
    assert stored.packed
    head = made.found.head(stored.digest)
    made.blob[: head.size] = head
    assert made.blob.tobytes() == bytes(sink.data[: stored.size])


def test_a_sample_that_begins_with_one_word() -> None:
    spec = TensorSpec("BF16", (70 * 8192,))
    data = spread(70 * 8192)
    data[: 2 * 8192] = 0
    assert encoding_on_host(spec, data, spread=False) is None
    assert encoding_on_host(spec, data) is not None
    data[5] = 1
    assert encoding_on_host(spec, data, spread=False) is not None


def test_a_head_has_the_digest() -> None:
    spec = spec_of("BF16", 8192)
    made = packed(spec, fill("normal", spec))
    digest = bytes(range(16))
    blob = made.blob.copy()
    head = made.found.head(digest)
    blob[: head.size] = head
    assert BlobReader(BytesSource(blob.tobytes()), 0, blob.size).header.hash == digest
    assert head.size == made.found.header.chunks_at


@pytest.mark.parametrize(
    ("content", "words", "codec"),
    [("zeros", 9000, "auto"), ("random", 9000, "auto"), ("normal", 100, "auto"), ("normal", 9000, "zstd")],
)
def test_what_the_cpu_packs(content: str, words: int, codec: selection.CodecName) -> None:
    spec = spec_of("BF16", words)
    data = np.frombuffer(fill(content, spec), np.uint8)
    assert PackEncoder(256, spec, 0).choose(data, codec) is None


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3"])
def test_weights_take_the_usual_kernels(dtype: str) -> None:
    spec = spec_of(dtype, 70 * 8192)
    chosen = PackEncoder(256, spec, 0).choose(fill("normal", spec)[: 64 * 8192 * spec.nbytes // (70 * 8192)])
    assert chosen is not None
    assert chosen.defines == encode.usual(spec)


def test_an_empty_tensor() -> None:
    encoder = PackEncoder(0, TensorSpec("BF16", (0, 5)), 0)
    encoder.gather(0, 0)
    assert encoder.choose(b"") is None


def test_what_cannot_be() -> None:
    spec = spec_of("BF16", 9000)
    with pytest.raises(ValueError, match="no multiple of 2"):
        PackEncoder(257, spec, 0)
    encoder = PackEncoder(256, spec, 0)
    with pytest.raises(ValueError, match="18000 bytes, here are 5"):
        encoder.choose(bytes(5))
    chosen = encoder.choose(fill("normal", spec))
    assert chosen is not None
    for call in (
        lambda: encoder.gather(264, 0),
        lambda: encoder.measure(chosen, 264, 0),
        lambda: encoder.encode(chosen, 264, 0, 0),
        lambda: encoder.encode(chosen, 256, 264, 0),
    ):
        with pytest.raises(ValueError, match="0x108"):
            call()


def test_scratch_memory_that_others_write() -> None:
    spec = spec_of("BF16", 9000)
    made = packed(spec, fill("normal", spec))
    data = made.scratch[: made.chosen.found_bytes]
    for at, value in ((1, 0), (3, 0x7F), (32, 0), (32 + 9, 0x55)):
        wrong = data.copy()
        wrong[at] = value
        with pytest.raises(Corrupt):
            made.encoder.found(made.chosen, wrong)
