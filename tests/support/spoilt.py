"""A weight file as it should not be, and the error by which whatever reads it tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support.contents import fill
from support.files import pack_bytes, safetensors_bytes
from tpde.errors import (
    Corrupt,
    InvalidInput,
    NotSafetensors,
    TpdeError,
    Truncated,
    UnsupportedDtype,
    UnsupportedVersion,
)
from tpde.format.container import TensorSpec

SPEC = TensorSpec("BF16", (20_000,))
SMALL = TensorSpec("U8", (9,))
PLAIN = safetensors_bytes({"w": (SPEC, fill("normal", SPEC)), "few": (SMALL, bytes(range(9)))})
PACKED = pack_bytes(PLAIN)


class Spoilt(NamedTuple):
    """What is done to a file that was whole.

    Attributes
    ----------
    error : type
        What reading it raises.
    change : callable
        The bytes that it has then; None if it is gone.
    """

    error: type[TpdeError]
    change: Callable[[bytes], bytes | None]


def _of_another_header(data: bytes) -> bytes:
    """Change a digit of the hash of the source's header."""
    key = b'"tpde.source_hash":"'
    at = data.index(key) + len(key)
    return data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :]


def _damaged(data: bytes) -> bytes:
    """Change a byte of a chunk of `w`, which lies in the middle."""
    at = len(data) * 3 // 4
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


WAYS = {
    "missing": Spoilt(InvalidInput, lambda _: None),
    "empty": Spoilt(Truncated, lambda _: b""),
    "text": Spoilt(NotSafetensors, lambda _: b"These are no weights, whatever they are called."),
    "not an object": Spoilt(NotSafetensors, lambda data: data[:8] + b"[" + data[9:]),
    "cut in the header": Spoilt(Truncated, lambda data: data[:20]),
    "cut in the data": Spoilt(Truncated, lambda data: data[:-40]),
    "longer": Spoilt(Corrupt, lambda data: data + b"\0"),
    "another dtype": Spoilt(UnsupportedDtype, lambda data: data.replace(b'"U8"', b'"X8"')),
}
"""Of a packed file or a plain one."""

PACKED_WAYS = WAYS | {
    "newer": Spoilt(UnsupportedVersion, lambda data: data.replace(b'"tpde":"1"', b'"tpde":"2"')),
    "another hash": Spoilt(Corrupt, _of_another_header),
    "damaged": Spoilt(Corrupt, _damaged),
}
"""Of a packed file."""


def write(path: Path, way: str, whole: bytes = PACKED) -> type[TpdeError]:
    """Write a file that is spoilt; returns what reading it raises."""
    spoilt = PACKED_WAYS[way]
    data = spoilt.change(whole)
    assert data != whole
    if data is not None:
        path.write_bytes(data)
    return spoilt.error
