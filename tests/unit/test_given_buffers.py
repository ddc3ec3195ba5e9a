"""`tpde.PackedWriter`: what has the buffer protocol."""

from __future__ import annotations

import array
import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpde
from tpde.errors import InvalidArgument


def test_buffers_of_numbers_are_taken_as_arrays_are(tmp_path: Path) -> None:
    """What has the buffer protocol may hold other numbers, or those of the other end."""
    values = np.linspace(-1, 1, 8, dtype=np.float32)
    good: list[Any] = [
        memoryview(values.reshape(2, 4)),
        memoryview(values.astype(">f4")),
        memoryview(values.view(np.uint32)),
        memoryview(values.view(np.uint32).astype(">u4")),
        memoryview(values).cast("b"),
        array.array("f", values.tolist()),
        (ctypes.c_float * 8)(*values.tolist()),
        (ctypes.c_char * 32).from_buffer_copy(values.tobytes()),
    ]
    for piece in good:
        with tpde.PackedWriter(tmp_path / "out", {"weight": values}, force=True) as writer:
            writer.write("weight", piece)
        assert tpde.numpy.load_file(tmp_path / "out")["weight"].tobytes() == values.tobytes()
    bad: list[Any] = [
        array.array("d", [1.0] * 4),
        array.array("i", [1] * 8),
        memoryview(np.zeros(16, np.float16)),
        memoryview(np.zeros(16, np.uint16)),
        (ctypes.c_double * 4)(),
    ]
    for piece in bad:
        writer = tpde.PackedWriter(tmp_path / "out", {"weight": values}, force=True)
        with pytest.raises(InvalidArgument, match=r"`weight` was announced as F32, and is given"):
            writer.write("weight", piece)
        writer.write("weight", values)  # nothing of the other was written
        writer.close()
