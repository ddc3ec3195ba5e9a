"""Bytes as callers hand them over: anything with the buffer protocol, in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from tpde.errors import InvalidArgument

if TYPE_CHECKING:
    from mmap import mmap

    import numpy as np
    import numpy.typing as npt

Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap | npt.NDArray[np.generic[object]]"


def byte_view(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, not copied.

    Raises
    ------
    InvalidArgument
        If there are gaps between them.
    """
    # NumPy's types say that arrays have the protocol from Python 3.12 on, when it got a type.
    view = memoryview(cast(memoryview, buffer))
    if not view.c_contiguous:
        raise InvalidArgument("a view of bytes has gaps", hint="give contiguous ones, such as `bytes(view)`")
    return view.cast("B")
