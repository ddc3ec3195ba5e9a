"""Stacks: window blobs of matrices of one shape, one after the other in one memory (docs/windows.md 11).

A stack is the experts of a weight of three dimensions, as it is on a device, and in a pickle.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from tpde.codec import windows
from tpde.codec.native import Bytes, as_bytes
from tpde.codec.windows import Window
from tpde.errors import Corrupt, InvalidInput, Truncated, UnsupportedVersion
from tpde.io.buffers import Buffer

MAGIC = bytes.fromhex("89 54 50 44 58 0D 0A 1A")  # windows.md 11
HEAD_BYTES = 128
_TURNED = 1
_HEAD = struct.Struct("<8sHHIQ")
_BLOB = struct.Struct("<QQQ")  # rows, columns and entries of a window blob, windows.md 5.1
_BLOB_AT = 16
_LEAST_BYTES = 3 * 128 + 1408  # of a window blob: header, a record, an offset, a body


class Stack(NamedTuple):
    """What a stack holds, and where.

    Attributes
    ----------
    turned : bool
        Whether the experts are the matrices with rows and columns exchanged.
    windows : tuple of Window
        What each blob holds.
    starts : tuple of int
        Where each begins.
    """

    turned: bool
    windows: tuple[Window, ...]
    starts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the weight."""
        first = self.windows[0]
        sizes = (first.columns, first.rows) if self.turned else (first.rows, first.columns)
        return len(self.windows), *sizes

    def blob(self, data: Bytes, number: int) -> Bytes:
        """One of the blobs."""
        at = self.starts[number]
        return data[at : at + self.windows[number].nbytes]


def head(count: int, turned: bool) -> Bytes:
    """The first `HEAD_BYTES` of a stack of so many blobs."""
    made = np.zeros(HEAD_BYTES, np.uint8)
    made[: _HEAD.size] = np.frombuffer(_HEAD.pack(MAGIC, 1, _TURNED * turned, 0, count), np.uint8)
    return made


def stacked(found: list[Window], turned: bool) -> Stack:
    """What a stack of blobs holds that were encoded one after the other."""
    ends = np.cumsum([HEAD_BYTES, *(it.nbytes for it in found)])
    return Stack(turned, tuple(found), tuple(int(it) for it in ends[:-1]))


def validate(blob: Buffer, threads: int = 1) -> Stack:
    """Check all of a stack but the bodies of its blobs, which may hold any bytes.

    Parameters
    ----------
    blob : bytes-like or ndarray
        Contiguous.
    threads : int
        How many threads check.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If it is no stack.
    """
    data = as_bytes(blob)
    if data.size < HEAD_BYTES:
        raise Truncated(f"a stack of windows has {HEAD_BYTES} bytes or more, here are {data.size}")
    magic, version, flags, reserved, count = _HEAD.unpack(data[: _HEAD.size].tobytes())
    if magic != MAGIC:
        raise Corrupt(f"a stack of windows begins with {MAGIC.hex()}, this with {magic.hex()}")
    if version != 1:
        raise UnsupportedVersion(f"a stack of windows of version {version}, 1 is known")
    if flags & ~_TURNED or reserved or data[_HEAD.size : HEAD_BYTES].any():
        raise Corrupt("reserved bytes of a stack of windows are not zero")
    if not 1 <= count <= (data.size - HEAD_BYTES) // _LEAST_BYTES:
        raise Corrupt(f"a stack of {data.size} bytes holds no {count} blobs")
    found: list[Window] = []
    at = HEAD_BYTES
    for number in range(count):
        size = _size_at(data, at, number)
        found.append(windows.validate(data[at : at + size], threads))
        if found[-1].rows != found[0].rows or found[-1].columns != found[0].columns:
            raise Corrupt(f"blob {number} of a stack of windows has another shape than the first")
        at += size
    if at != data.size:
        raise Corrupt(f"{data.size - at} bytes follow the last blob of a stack of windows")
    return stacked(found, bool(flags & _TURNED))


def _size_at(data: Bytes, at: int, number: int) -> int:
    """How large the blob at a place is, by its header."""
    part = data[at + _BLOB_AT : at + _BLOB_AT + _BLOB.size].tobytes()
    if len(part) < _BLOB.size:
        raise Truncated(f"a stack of windows ends before blob {number}")
    try:
        size = windows.sections(*_BLOB.unpack(part)).nbytes
    except InvalidInput as error:
        raise Corrupt(f"blob {number} of a stack of windows: {error.message}") from None
    if at + size > data.size:
        raise Truncated(f"a stack of windows ends within blob {number}")
    return size
