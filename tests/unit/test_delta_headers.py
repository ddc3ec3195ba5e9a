"""Headers of the target's files that a delta brings, where they differ from the base's."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import xxhash
import zstandard
from support.delta_heads import DATA, TENSORS, file, made, refused
from support.files import container

from tpde.errors import Corrupt, InvalidInput, NotSafetensors
from tpde.format.container import TensorSpec
from tpde.format.delta_head import WeightsEntry, serialize
from tpde.format.delta_reader import read_head
from tpde.io.sources import BytesSource


def with_header(text: bytes, *, digest: str | None = None, frame: bytes | str | None = None) -> bytes:
    """Give a delta whose file brings its safetensors header."""
    if frame is None:
        frame = zstandard.ZstdCompressor(write_content_size=True).compress(text)
    coded = base64.b64encode(frame).decode() if isinstance(frame, bytes) else frame
    return made(file(0, header=coded, header_hash=digest or xxhash.xxh3_128_hexdigest(text)))


def header_of(changes: dict[str, Any] | None = None) -> bytes:
    """Give the header of a file of all the tensors."""
    at, entries = 0, {}
    for name, dtype, shape, *_ in TENSORS:
        end = at + TensorSpec(dtype, tuple(shape)).nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return container(entries | (changes or {}), b"")[8:]


def test_headers_that_can_be_compressed_well_are_read_as_they_were_written() -> None:
    """Of 8 MB of padding, and of 6 MB of metadata."""
    for header in (header_of() + b" " * 8_000_000, header_of({"__metadata__": {"a": "b" * 6_000_000}})):
        head = read_head(BytesSource(with_header(header_of())))
        weights = head.files[0]
        assert isinstance(weights, WeightsEntry)
        weights.header, weights.header_hash = header, xxhash.xxh3_128_hexdigest(header)
        front, tail = serialize(head)
        found = read_head(BytesSource(front + DATA + tail)).files[0]
        assert isinstance(found, WeightsEntry)
        assert found.header == header


def test_a_header_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    head = read_head(BytesSource(with_header(header_of())))
    size = len(header_of())
    for module in ("delta_head", "delta_reader"):
        monkeypatch.setattr(f"tpde.format.{module}.MAX_CONTAINER_HEADER", size)
    serialize(head)
    monkeypatch.setattr("tpde.format.delta_head.MAX_CONTAINER_HEADER", size - 1)
    with pytest.raises(InvalidInput, match=rf"header of `a/b.safetensors` takes {size} bytes.*shorten"):
        serialize(head)


def test_headers_that_differ_from_the_bases_are_in_the_delta() -> None:
    (weights, *_) = read_head(BytesSource(with_header(header_of()))).files
    assert isinstance(weights, WeightsEntry)
    assert weights.header == header_of()


def test_headers_of_other_tensors_are_refused() -> None:
    for changes in (
        {"m": {"dtype": "I8", "shape": [4], "data_offsets": [140023, 140027]}},
        {"m": {"dtype": "U8", "shape": [2, 2], "data_offsets": [140023, 140027]}},
        {"n": {"dtype": "U8", "shape": [0], "data_offsets": [140045, 140045]}},
    ):
        with pytest.raises(Corrupt, match="has other tensors in its header"):
            read_head(BytesSource(with_header(header_of(changes))))
    with pytest.raises(Corrupt, match="has another hash"):
        read_head(BytesSource(with_header(header_of(), digest="0" * 32)))
    with pytest.raises(NotSafetensors, match=r"the header of `a/b\.safetensors`"):
        read_head(BytesSource(with_header(b"{")))
    with pytest.raises(NotSafetensors, match=r"the header of `a/b\.safetensors`"):
        read_head(BytesSource(with_header(b"")))


@pytest.mark.parametrize(
    "frame",
    [
        "?",
        "AAAA",
        "AAA",
        "é",
        7,
        [],
        b"",
        zstandard.ZstdCompressor(write_content_size=False).compress(header_of()),
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little"),
        zstandard.compress(header_of())[:-2],
        base64.b64encode(zstandard.compress(header_of())).decode() + "!",
    ],
)
def test_headers_that_cannot_be_unpacked_are_refused(frame: Any) -> None:
    refused(with_header(header_of(), frame=frame), r"the header of `a/b\.safetensors` is damaged")


def test_headers_are_at_most_what_any_may_have() -> None:
    """Whatever their frame takes."""
    largest = 100_000_000
    for size, fits in ((largest, True), (largest + 1, False)):
        frame = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + bytes(800_000)
        said = "" if fits else f"it claims {size} bytes"
        with pytest.raises(Corrupt, match=f"is damaged .*{said}") as caught:
            read_head(BytesSource(with_header(header_of(), frame=frame)))
        assert ("it claims" in str(caught.value)) is not fits


def test_headers_are_at_most_so_many_times_as_large_as_their_frame() -> None:
    """Four MiB, and 128 times the frame's bytes."""

    def padded(size: int) -> tuple[bytes, bytes]:
        text = header_of().rstrip().ljust(size)
        return text, zstandard.ZstdCompressor(write_content_size=True).compress(text)

    size = 4 << 20
    for _ in range(10):
        size = (4 << 20) + 128 * len(padded(size)[1])
    text, frame = padded(size)
    assert read_head(BytesSource(with_header(text, frame=frame))).files[0].header == text  # type: ignore[union-attr]
    text, more = padded(size + 1)
    assert len(more) == len(frame)
    refused(with_header(text, frame=more), f"it claims {size + 1} bytes")
