"""The head of a delta file, whole or with a part that was changed, and how readers refuse it."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from tpde.errors import Corrupt, TpdeError
from tpde.format import constants
from tpde.format.delta_head import HEADER
from tpde.format.delta_reader import read_head
from tpde.io.sources import BytesSource

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


# ---- changes


def tensor(number: int, at: int, value: object) -> Callable[[dict[str, Any]], object]:
    """Change a field of a tensor."""
    return lambda it: it["files"][0]["tensors"][number].__setitem__(at, value)


def file(number: int, **fields: object) -> Callable[[dict[str, Any]], object]:
    """Change fields of a file."""
    return lambda it: it["files"][number].update(fields)


def top(**fields: object) -> Callable[[dict[str, Any]], object]:
    """Change fields of the whole."""
    return lambda it: it.update(fields)
