"""How large the contents of a delta's head may be (docs/delta.md 5.1 and 6)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import zstandard
from support.delta_heads import DATA, FIELDS, MODELS, made, plain_of, refused, sealed, top

from tpde.errors import Corrupt, InvalidInput
from tpde.format import constants
from tpde.format.delta_head import HEADER, frame_of, serialize
from tpde.format.delta_reader import read_head
from tpde.format.json_values import values_in
from tpde.io.sources import BytesSource


def test_contents_are_at_most_so_many_times_as_large_as_their_frame() -> None:
    """Four MiB, and 128 times the frame's bytes."""

    def zeros(size: int) -> tuple[bytes, int]:
        plain = bytes(size)
        return plain, len(zstandard.ZstdCompressor(write_content_size=True).compress(plain))

    size = 0
    for _ in range(10):
        _, frame = zeros(size)
        size = (4 << 20) + 128 * frame
    assert zeros(size)[1] == zeros(size + 1)[1]
    refused(sealed(bytes(size)), "parts of the contents")
    refused(sealed(bytes(size + 1)), f"contents of {size + 1} bytes")


def test_contents_may_be_128_times_what_they_take_in_the_file() -> None:
    """And four MiB."""
    words = np.random.default_rng(1).bytes(100_000).hex()
    text = json.dumps(FIELDS | {"base": words}).encode()

    def filled(count: int) -> tuple[bytes, bytes]:
        plain = plain_of(text.replace(words.encode(), words.encode() + b"a" * count))
        return plain, zstandard.ZstdCompressor(write_content_size=True).compress(plain)

    def beyond(count: int) -> int:
        plain, frame = filled(count)
        return len(plain) - (4 << 20) - 128 * len(frame)

    count = 17 << 20
    for _ in range(5):  # to within a few bytes of the frame
        count -= beyond(count)
    for more in (-2000, 2000):
        assert (beyond(count + more) > 0) == (more > 0)
        plain, frame = filled(count + more)
        if more < 0:
            assert read_head(BytesSource(sealed(plain, frame=frame))).base == words + "a" * (count + more)
        else:
            refused(sealed(plain, frame=frame), f"contents of {len(plain)} bytes")


def test_contents_are_at_most_100_million_bytes() -> None:
    frame = bytes(800_000)  # 128 times as much is more
    refused(sealed(b"", frame=frame, plain=100_000_000), "another size|are damaged")
    refused(sealed(b"", frame=frame, plain=100_000_001), "contents of 100000001 bytes")


def test_frames_are_at_most_as_large_as_contents() -> None:
    refused(sealed(b"", frame=bytes(100_000_000), plain=50), "another size|are damaged")
    refused(sealed(b"", frame=bytes(100_000_001), plain=50), "contents of 50 bytes")


class Endless:
    """A file of a header, and more zeros behind it than could be read."""

    def __init__(self, header: bytes, size: int) -> None:
        self.name, self.size, self.header = "some.delta", size, header

    def read_into(self, offset: int, out: memoryview) -> None:
        assert offset + len(out) <= 64, "the limit is looked at before memory is taken"
        out[:] = self.header[offset : offset + len(out)]


def test_a_frame_beyond_the_limit_is_not_read() -> None:
    size = 100_000_001
    header = HEADER.pack(constants.DELTA_MAGIC, 1, 0, 0, size, 0, 0, bytes(24), 0)
    with pytest.raises(Corrupt, match="contents of 0 bytes"):
        read_head(Endless(header, 64 + size))  # type: ignore[arg-type]


def test_json_has_less_than_two_to_the_22_values() -> None:
    refused(sealed(plain_of(b"," * ((1 << 22) - 1))), "are not JSON")
    for text in (b",:[{" * (1 << 20), b"," * (1 << 22)):
        refused(sealed(plain_of(text)), "more than 4194304 values")


def test_there_are_at_most_64_models_of_at_most_256_kib() -> None:
    largest = 1 << 18
    for sizes in ([1] * 64, [largest, 0], [0, largest]):
        head = read_head(BytesSource(made(top(models=sizes), models=bytes(sum(sizes)))))
        assert [len(it) for it in head.models] == sizes
    refused(made(top(models=[2, 5]), models=MODELS + b"!"), "the sizes of models")  # half a number
    for sizes in ([1] * 66, [largest + 2, 0], [0, largest + 2]):
        refused(made(top(models=sizes), models=bytes(sum(sizes))), "the sizes of models")


def test_a_delta_whose_contents_are_too_large_is_not_written() -> None:
    largest = 100_000_000
    head = read_head(BytesSource(made()))
    head.base = ""
    head.base = "a" * (largest - HEADER.unpack(serialize(head)[0])[5])
    assert HEADER.unpack(serialize(head)[0])[5] == largest
    head.base += "a"
    with pytest.raises(InvalidInput, match="write a delta for each file") as caught:
        serialize(head)
    assert (caught.value.found, caught.value.needed) == (largest + 1, largest)


def test_a_delta_of_more_values_than_are_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_in(json.dumps(FIELDS))
    for module in ("delta_head", "delta_reader"):
        monkeypatch.setattr(f"tpde.format.{module}.MAX_VALUES", values + 1)
    head = read_head(BytesSource(made()))
    serialize(head)
    head.base = ","
    with pytest.raises(InvalidInput, match=f"have {values + 1} values.*join small tensors") as caught:
        serialize(head)
    assert (caught.value.found, caught.value.needed) == (values + 1, values)


def test_a_delta_whose_frame_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents that cannot be compressed take more bytes than they are."""
    head = read_head(BytesSource(made()))
    plain = HEADER.unpack(serialize(head)[0])[5]
    monkeypatch.setattr("tpde.format.delta_head.frame_of", lambda data: bytes(len(data) + 1))
    monkeypatch.setattr("tpde.format.delta_head.MAX_CONTENTS", plain + 1)
    serialize(head)
    monkeypatch.setattr("tpde.format.delta_head.MAX_CONTENTS", plain)
    with pytest.raises(InvalidInput, match=f"{plain + 1} bytes, compressed, at most {plain}"):
        serialize(head)


@pytest.mark.parametrize("size", [(4 << 20) - 1, 5 << 20, 8 << 20])
@pytest.mark.parametrize("piece", [b"\0", b"0.0,", bytes(range(256))])
def test_frames_are_large_enough_for_what_they_hold(piece: bytes, size: int) -> None:
    data = (piece * (size // len(piece) + 1))[:size]
    frame = frame_of(data)
    assert size <= (4 << 20) + 128 * len(frame)
    assert zstandard.frame_content_size(frame) == size
    found = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    assert found == data


def test_contents_that_can_be_compressed_well_are_read_as_they_were_written() -> None:
    head = read_head(BytesSource(made()))
    head.base = "a" * (8 << 20)
    front, tail = serialize(head)
    assert read_head(BytesSource(front + DATA + tail)).base == head.base
