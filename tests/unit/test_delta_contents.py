"""Every part of a delta's head that cannot be is refused, and says what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from support.delta_heads import (
    CHANGES,
    DATA,
    FIELDS,
    MODELS,
    ORDER,
    SIZES,
    file,
    made,
    plain_of,
    planes,
    refused,
    sealed,
    tensor,
    top,
)

from tpde.errors import Truncated, UnsupportedDtype, UnsupportedVersion
from tpde.format.delta_reader import read_head
from tpde.io.sources import BytesSource


def without(number: int, field: str) -> Callable[[dict[str, Any]], object]:
    """Take a field of a file away."""
    return lambda it: it["files"][number].pop(field)


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
