"""What a delta file says of itself is read as it was written, and every part that cannot be is refused."""

from __future__ import annotations

import base64
import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from support.files import container

from tpde.errors import Corrupt, NotSafetensors, TpdeError, Truncated, UnsupportedDtype, UnsupportedVersion
from tpde.format import constants, delta_head
from tpde.format.container import TensorSpec
from tpde.format.delta_head import HEADER, Head, OtherEntry, TensorEntry, WeightsEntry, payloads, serialize
from tpde.format.delta_reader import read_head
from tpde.io.sources import BytesSource
from tpde.store.delta_file import DeltaFile

FINGERPRINTS = {name: bytes([number]) * 16 for number, name in enumerate("sSdDfpzmtTuU", 1)}
HASHES = {name: bytes([100 + number]) * 8 for number, name in enumerate("sdfpot", 1)}
# Those of each tensor, and of the file whose bytes are in the delta.
ORDER = [
    *(FINGERPRINTS["s"], FINGERPRINTS["S"], HASHES["s"]),
    *(FINGERPRINTS["d"], FINGERPRINTS["D"], HASHES["d"]),
    *(FINGERPRINTS["f"], HASHES["f"]),
    *(FINGERPRINTS["p"], HASHES["p"]),
    FINGERPRINTS["z"],
    FINGERPRINTS["m"],
    *(FINGERPRINTS["t"], FINGERPRINTS["T"], HASHES["t"]),
    *(FINGERPRINTS["u"], FINGERPRINTS["U"]),
    HASHES["o"],
]
FIELDS: dict[str, Any] = {
    "base": "../base",
    "files": [
        {
            "name": "a/b.safetensors",
            "header": None,
            "header_hash": "0123456789abcdef" * 2,
            "tensors": [
                ["s", "BF16", [70000], "sparse", 7, 1],
                ["d", "U8", [2], "dense", 5],
                ["f", "BF16", [9], "full", 6],
                ["p", "U8", [3], "plain", 3],
                ["z", "U8", [0, 4], "plain", 0],
                ["m", "U8", [4], "same", 0],
                ["t", "BF16", [9], "sparse", 2, 1],
                ["u", "BF16", [0], "sparse", 0, 1],
            ],
        },
        {"name": "o.txt", "hash": "f" * 32, "bytes": 4},
        {"name": "q.txt", "hash": "0" * 32, "bytes": 0},
    ],
    "models": [2, 4],
}
MODELS = b"mm!12?"  # m1 and m2!?, in planes of numbers of two bytes
DATA = bytes(27)
CHANGES, SIZES = [11, 1 << 24 | 2, 5], [3, 4, 2]
TENSORS = FIELDS["files"][0]["tensors"]


def planes(numbers: list[int]) -> bytes:
    """Split numbers into their bytes, all lowest ones first."""
    return np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4).T.tobytes()


def plain_of(text: bytes, models: bytes = MODELS, records: bytes = planes(CHANGES + SIZES)) -> bytes:
    """Give the contents before they are compressed."""
    return struct.pack("<3I", len(text), len(models), len(records)) + text + models + records


def sealed(
    contents: bytes,
    *,
    hashes: bytes = b"".join(ORDER),
    frame: bytes | None = None,
    data: bytes = DATA,
    **header: Any,
) -> bytes:
    """Give a delta of these parts, with the hash that fits."""
    if frame is None:
        frame = zstandard.ZstdCompressor(write_content_size=True).compress(contents)
    fields = {
        "magic": constants.DELTA_MAGIC,
        "version": 1,
        "zero": 0,
        "hashes": len(hashes),
        "contents": len(frame),
        "plain": len(contents),
        "data": len(data),
        "zeros": bytes(24),
    } | header
    front = HEADER.pack(*fields.values(), 0)
    digest = xxhash.xxh3_64_intdigest(front + hashes + frame)
    return front[:56] + digest.to_bytes(8, "little") + data + hashes + frame


def made(change: Callable[[dict[str, Any]], object] = lambda _: None, **parts: Any) -> bytes:
    """Give a delta whose fields were changed."""
    fields = copy.deepcopy(FIELDS)
    change(fields)
    plain = plain_of(
        json.dumps(fields).encode(), **{k: parts.pop(k) for k in ("models", "records") if k in parts}
    )
    return sealed(plain, **parts)


def refused(data: bytes, says: str, error: type[TpdeError] = Corrupt) -> None:
    """Expect a delta to be refused, in these words and by its name."""
    with pytest.raises(error, match=says) as caught:
        read_head(BytesSource(data, "some.delta"))
    assert "some.delta" in str(caught.value)
    assert caught.value.where == "some.delta"


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


def tensor(number: int, at: int, value: object) -> Callable[[dict[str, Any]], object]:
    """Change a field of a tensor."""
    return lambda it: it["files"][0]["tensors"][number].__setitem__(at, value)


def file(number: int, **fields: object) -> Callable[[dict[str, Any]], object]:
    """Change fields of a file."""
    return lambda it: it["files"][number].update(fields)


def without(number: int, field: str) -> Callable[[dict[str, Any]], object]:
    """Take a field of a file away."""
    return lambda it: it["files"][number].pop(field)


def top(**fields: object) -> Callable[[dict[str, Any]], object]:
    """Change fields of the whole."""
    return lambda it: it.update(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (top(more=1), "other contents"),
        (lambda it: it.pop("base"), "other contents"),
        (top(base=7), "its base's place is no text"),
        (top(base="\ud800"), "its base's place is no text"),
        (top(files={}), "files or models are no list"),
        (top(models={}), "files or models are no list"),
        (top(models=[2, 3]), "the sizes of models"),
        (top(models=[2, 5]), "the sizes of models"),
        (top(models=[2, 4.0]), "the sizes of models"),
        (top(models=[7, -1]), "the sizes of models"),
        (top(models=[5, True]), "the sizes of models"),
        (lambda it: it["files"].append(7), "a file without a name"),
        (without(1, "name"), "a file without a name"),
        (file(1, name=7), "a file without a name"),
        (file(1, name="\ud800"), "a file without a name"),
        (file(1, name="q.txt"), "two files have one name"),
        (file(1, name="a/b.safetensors"), "two files have one name"),
        (file(1, hash="F" * 32), "the entry of `o.txt`"),
        (file(1, hash="f" * 31), "the entry of `o.txt`"),
        (file(1, hash="f" * 33), "the entry of `o.txt`"),
        (file(1, hash=7), "the entry of `o.txt`"),
        (file(1, bytes=-1), "the entry of `o.txt`"),
        (file(1, bytes=1 << 60), "the entry of `o.txt`"),
        (file(1, bytes=4.0), "the entry of `o.txt`"),
        (file(1, bytes=None), "the entry of `o.txt`"),
        (file(1, more=1), "the entry of `o.txt`"),
        (without(1, "hash"), "the entry of `o.txt`"),
        (without(0, "header"), "the entry of `a/b.safetensors`"),
        (file(0, more=1), "the entry of `a/b.safetensors`"),
        (file(0, header_hash="0" * 33), "the hash of the header of `a/b.safetensors`"),
        (file(0, header_hash=None), "the hash of the header of `a/b.safetensors`"),
        (file(0, tensors={}), "the tensors of `a/b.safetensors`"),
        (tensor(1, 0, "s"), "two tensors of a file have one name"),
        (tensor(1, 0, 7), "a tensor without a name"),
        (tensor(1, 0, "\ud800"), "a tensor without a name"),
        (lambda it: it["files"][0]["tensors"].append({}), "a tensor without a name"),
        (lambda it: it["files"][0]["tensors"].append("abcde"), "a tensor without a name"),
        (lambda it: it["files"][0]["tensors"].append(dict.fromkeys("abcde", 1)), "a tensor without a name"),
        (lambda it: it["files"][0]["tensors"].append(["x", "U8", [4], "same"]), "a tensor without a name"),
        (lambda it: it["files"][0]["tensors"][0].append(0), "a tensor without a name"),
        (tensor(1, 2, 2), "`d`: its shape or size"),
        (tensor(1, 2, {"2": 2}), "`d`: its shape or size"),
        (tensor(1, 2, [2.0]), "`d`: its shape or size"),
        (tensor(1, 2, [-2]), "`d`: its shape or size"),
        (tensor(1, 4, -5), "`d`: its shape or size"),
        (tensor(1, 4, 5.0), "`d`: its shape or size"),
        (tensor(1, 4, 1 << 60), "`d`: its shape or size"),
        (tensor(1, 3, "dens"), "`d`: its codec"),
        (tensor(1, 3, "sparse"), "`d`: its codec"),
        (lambda it: it["files"][0]["tensors"][1].append(0), "`d`: its codec"),
        (tensor(0, 3, "dense"), "`s`: its codec"),
        (lambda it: it["files"][0]["tensors"][0].pop(), "`s`: its codec"),
        (tensor(1, 1, 7), "`d`: its dtype"),
        (tensor(1, 1, None), "`d`: its dtype"),
        (tensor(1, 4, 0), "`d`: no payload"),
        (tensor(2, 4, 0), "`f`: no payload"),
        (tensor(5, 4, 1), "`m`: a payload"),
        (tensor(2, 2, [1] * 65), "`f`: a tensor cannot have the shape"),
        (tensor(3, 4, 4), "`p`: 4 bytes"),
        (tensor(3, 4, 2), "`p`: 2 bytes"),
        (tensor(4, 4, 1), "`z`: 1 bytes"),
        (tensor(0, 5, -1), "`s`: its model"),
        (tensor(0, 5, "1"), "`s`: its model"),
        (tensor(0, 5, True), "`s`: its model"),
        (tensor(0, 5, 2), "`s`: there is no model 2"),
        (tensor(0, 2, [65536]), "records of 24 bytes, not 16"),
        (tensor(0, 2, [65536 * 2 + 1]), "records of 24 bytes, not 32"),
        (tensor(0, 4, 8), "`s`: its chunks' sizes"),
        (tensor(0, 4, 6), "`s`: its chunks' sizes"),
        (tensor(1, 4, 6), "payloads of 28 bytes, not 27"),
        (file(1, bytes=3), "payloads of 26 bytes, not 27"),
        (file(1, bytes=0), "bytes of hashes, .* are needed"),
        (file(2, bytes=1), "bytes of hashes, .* are needed"),
    ],
)  # fmt: skip
def test_contents_that_cannot_be_say_what_is_wrong(
    change: Callable[[dict[str, Any]], object], says: str
) -> None:
    refused(made(change), says)


def test_dtypes_that_are_not_known_are_told_as_such() -> None:
    with pytest.raises(UnsupportedDtype, match="X8"):
        read_head(BytesSource(made(tensor(1, 1, "X8"))))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"magic": b"\x89TPDE\r\n\x1a"}, "this is no delta"),
        ({"zero": 1}, "reserved bytes"),
        ({"zeros": bytes(23) + b"\1"}, "reserved bytes"),
        ({"zeros": b"\1" + bytes(23)}, "reserved bytes"),
        ({"hashes": b"".join(ORDER) + b"\0"}, "bytes of hashes, .* are needed"),
        ({"hashes": b"".join(ORDER)[:-1]}, "bytes of hashes, .* are needed"),
        ({"hashes": b""}, "0 bytes of hashes, .* are needed"),
        ({"data": DATA + b"\0"}, "payloads of 27 bytes, not 28"),
        ({"data": DATA[1:]}, "payloads of 27 bytes, not 26"),
        ({"models": MODELS + b"!"}, "the sizes of models"),
        ({"records": planes(CHANGES + SIZES) + b"\0"}, "records of 25 bytes, not 24"),
        ({"records": planes([*CHANGES, 3, 5, 2])}, "its chunks' sizes"),
        ({"records": planes([*CHANGES, 8, (1 << 32) - 1, 2])}, "its chunks' sizes"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(parts: dict[str, Any], says: str) -> None:
    refused(made(**parts), says)


def test_hash_of_the_head_and_version() -> None:
    good = made()
    refused(good[:56] + bytes([good[56] ^ 1]) + good[57:], "its head hashes to")
    for version in (0, 2, 256):
        refused(made(version=version), "upgrade tpde", UnsupportedVersion)


def test_another_size_than_the_header_says() -> None:
    good = made()
    for size in (0, 8, 63, 64, len(good) - 1):
        refused(good[:size], "fetch the rest", Truncated)
    refused(sealed(b"", hashes=b"", frame=b"", data=b""), "its contents are damaged")  # all of 64 bytes
    refused(good + b"\0", f"{len(good) + 1} bytes, its header says {len(good)}")


def test_frames_that_are_not_what_the_header_says() -> None:
    plain = plain_of(json.dumps(FIELDS).encode())
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(plain)
    sizeless = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    refused(sealed(plain, plain=len(plain) + 1), "another size")
    refused(sealed(plain, plain=len(plain) - 1), "another size")
    refused(sealed(plain, frame=sizeless), "another size")
    refused(sealed(plain, frame=frame + frame), "its contents are damaged")
    refused(sealed(plain, frame=b"no frame"), "its contents are damaged")
    refused(sealed(plain, frame=frame[:-3]), "its contents are damaged")
    # A frame that claims more than it holds, and one that holds more than it claims.
    for claims in (40, 3):
        lies = b"\x28\xb5\x2f\xfd\x20" + bytes([claims]) + (16 << 3 | 1).to_bytes(3, "little") + bytes(16)
        assert zstandard.frame_content_size(lies) == claims
        refused(sealed(bytes(claims), frame=lies), "contents")


@pytest.mark.parametrize("size", range(12))
def test_contents_that_end_inside_their_sizes(size: int) -> None:
    refused(sealed(bytes(size)), "end inside their sizes")


@pytest.mark.parametrize(
    "sizes", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0), ((1 << 32) - 1, 1, 0)], ids=str
)
def test_parts_of_other_sizes_than_the_contents(sizes: tuple[int, ...]) -> None:
    refused(sealed(struct.pack(f"<{len(sizes)}I", *sizes)), "parts of the contents have other sizes")


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"base":null} x', b"\xff", b"[" * 100_000, b'{"base":' + b"9" * 5000 + b"}"]
)
def test_texts_that_are_no_json(text: bytes) -> None:
    refused(sealed(plain_of(text)), "are not JSON")


@pytest.mark.parametrize("text", [b"[]", b"7", b"null", b'"base"'])
def test_json_of_another_kind(text: bytes) -> None:
    refused(sealed(plain_of(text)), "other contents")


# ---- limits (docs/delta.md 5.1 and 6)


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
    with pytest.raises(TpdeError, match="write a delta for each file") as caught:
        serialize(head)
    assert (caught.value.found, caught.value.needed) == (largest + 1, largest)


# ---- headers of the target's files


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


def test_head_of_a_file_without_tensors() -> None:
    front, tail = serialize(Head(None, [], []))
    assert read_head(BytesSource(front + tail)) == Head(None, [], [])
    entry = TensorEntry("x", TensorSpec("BF16", (65537,)), delta_head.FULL)
    assert entry.chunks == 2


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
