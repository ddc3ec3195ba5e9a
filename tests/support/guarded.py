"""Memory that ends at a page which nobody may touch: who reads or writes behind it crashes."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from tpde.codec.native import Bytes

_LIBC = ctypes.CDLL(None, use_errno=True)


def room(size: int) -> Bytes:
    """Give so many bytes, whatever lies before them, and nothing behind."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = np.frombuffer(mmap.mmap(-1, whole + mmap.PAGESIZE), np.uint8)
    mapped[:whole] = 0xA5
    behind = ctypes.c_void_p(mapped.ctypes.data + whole)
    if _LIBC.mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    return mapped[whole - size : whole]


def guarded(data: Any) -> Bytes:
    """Give a copy of some bytes with nothing behind."""
    given = np.frombuffer(data, np.uint8)
    made = room(given.size)
    made[:] = given
    return made
