"""What a delta file says of itself is read as it was written, and looked at as it is opened."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from support.delta_heads import CHANGES, DATA, FINGERPRINTS, HASHES, SIZES, TENSORS, file, made, tensor

from tpde.errors import Corrupt
from tpde.format import delta_head
from tpde.format.container import TensorSpec
from tpde.format.delta_head import HEADER, Head, OtherEntry, TensorEntry, WeightsEntry, payloads, serialize
from tpde.format.delta_reader import read_head
from tpde.io.sources import BytesSource
from tpde.store.delta_file import DeltaFile


def test_everything_is_read_as_it_was_written() -> None:
    head = read_head(BytesSource(made()))
    assert head.base == "../base"
    assert head.models == [b"m1", b"m2!?"]
    weights, *others = head.files
    assert isinstance(weights, WeightsEntry)
    assert (weights.name, weights.header, weights.header_hash) == (
        "a/b.safetensors",
        None,
        "0123456789abcdef" * 2,
    )
    found = [(it.name, it.spec, it.codec, it.size, it.model, it.chunks) for it in weights.tensors]
    assert found == [
        (
            name,
            TensorSpec(dtype, tuple(shape)),
            codec,
            size,
            *(model or [0]),
            (2 if name == "s" else 1 if shape[0] else 0),
        )
        for name, dtype, shape, codec, size, *model in TENSORS
    ]
    one, two = FINGERPRINTS, HASHES
    assert [(it.base, it.target, it.payload_hash) for it in weights.tensors] == [
        (one["s"], one["S"], int.from_bytes(two["s"], "little")),
        (one["d"], one["D"], int.from_bytes(two["d"], "little")),
        (b"", one["f"], int.from_bytes(two["f"], "little")),
        (b"", one["p"], int.from_bytes(two["p"], "little")),
        (b"", one["z"], 0),
        (one["m"], one["m"], 0),
        (one["t"], one["T"], int.from_bytes(two["t"], "little")),
        (one["u"], one["U"], 0),
    ]
    chunks = {it.name: (it.changes.tolist(), it.sizes.tolist()) for it in weights.tensors}
    assert chunks.pop("s") == (CHANGES[:2], SIZES[:2])
    assert chunks.pop("t") == (CHANGES[2:], SIZES[2:])
    assert set(map(repr, chunks.values())) == {"([], [])"}
    assert others == [
        OtherEntry("o.txt", "f" * 32, 4, int.from_bytes(two["o"], "little")),
        OtherEntry("q.txt", "0" * 32),
    ]
    places = [("s", 64, 7), ("d", 71, 5), ("f", 76, 6), ("p", 82, 3), ("z", 85, 0), ("m", 85, 0)]
    places += [("t", 85, 2), ("u", 87, 0), ("o.txt", 87, 4), ("q.txt", 91, 0)]
    assert [(it.name, place.offset, place.size) for it, place in payloads(head)] == places


def test_what_is_written_is_what_was_read() -> None:
    head = read_head(BytesSource(made()))
    front, tail = serialize(head)
    again = read_head(BytesSource(front + DATA + tail))
    assert repr(again) == repr(head)
    assert serialize(again) == (front, tail)


def test_head_of_a_file_without_tensors() -> None:
    front, tail = serialize(Head(None, [], []))
    assert read_head(BytesSource(front + tail)) == Head(None, [], [])
    entry = TensorEntry("x", TensorSpec("BF16", (65537,)), delta_head.FULL)
    assert entry.chunks == 2


@pytest.mark.parametrize("chunks", [1000, 60_000])
def test_few_and_many_records_are_read_as_they_were_written(chunks: int) -> None:
    """Contents below and above what is compressed slowly."""
    draw = np.random.default_rng(chunks)
    entry = TensorEntry(
        "w", TensorSpec("BF16", (chunks, 65536)), delta_head.SPARSE, base=bytes(16), target=bytes(16)
    )
    entry.changes = draw.integers(0, 65537, chunks, dtype=np.uint32)
    entry.sizes = draw.integers(0, 9, chunks, dtype=np.uint32)
    entry.size = int(entry.sizes.sum())
    header = b"{}      "
    weights = WeightsEntry("", None, xxhash.xxh3_128_hexdigest(header), [entry])
    head, tail = serialize(Head(None, [weights], [bytes(range(8))]))
    (found,) = read_head(BytesSource(head + bytes(entry.size) + tail)).tensors
    assert np.array_equal(found.changes, entry.changes)
    assert np.array_equal(found.sizes, entry.sizes)


def test_payloads_that_are_neighbours_are_read_at_once() -> None:
    names = "abcd"
    tensors = [
        TensorEntry(name, TensorSpec("U8", (3,)), delta_head.PLAIN, size=3, target=bytes(16))
        for name in names
    ]
    weights = WeightsEntry("", b"{}      ", xxhash.xxh3_128_hexdigest(b"{}      "), tensors)
    reads: list[tuple[int, int]] = []

    class Counted(BytesSource):
        def read_into(self, offset: int, out: memoryview) -> None:
            reads.append((offset, out.nbytes))
            super().read_into(offset, out)

    file = DeltaFile.__new__(DeltaFile)
    file._source = Counted(bytes(HEADER.size) + b"aaabbbcccddd")
    file._places = {id(it): place for it, place in payloads(Head(None, [weights], []))}
    for wanted, ranges in (
        ((0, 1, 2, 3), [(0, 12)]),
        ((1, 2), [(3, 6)]),
        ((0, 2, 3), [(0, 3), (6, 6)]),
        ((3, 0, 1), [(9, 3), (0, 6)]),
        ((), []),
    ):
        out = np.zeros(3 * len(wanted), np.uint8)
        reads.clear()
        file.read_payloads([tensors[i] for i in wanted], out)
        assert out.tobytes() == b"".join(names[i].encode() * 3 for i in wanted)
        assert [(at - HEADER.size, size) for at, size in reads if size] == ranges


# ---- names, and models for other words


class Closing(BytesSource):
    """Bytes that know whether they were let go."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("name", ["../o.txt", "/o.txt", "", "a", "a/b.safetensors/c/d"])
def test_files_that_cannot_be_where_they_say_are_refused_as_a_delta_is_opened(name: str) -> None:
    source = Closing(made(file(1, name=name)))
    with pytest.raises(Corrupt, match="no file of a directory"):
        DeltaFile(source)
    assert source.closed


@pytest.mark.parametrize(
    ("dtype", "model"), [("BF16", b"\2\0!?"), ("BF16", b"\1\1!?"), ("F16", b"\4\1!?"), ("I16", b"\2\1!?")]
)
def test_models_for_other_words_are_refused_as_a_delta_is_opened(dtype: str, model: bytes) -> None:
    source = Closing(made(tensor(0, 1, dtype), models=b"m" + model[::2] + b"1" + model[1::2]))
    with pytest.raises(Corrupt, match="`s` is under a model of other words") as caught:
        DeltaFile(source)
    assert caught.value.tensor == "s"
    assert source.closed
