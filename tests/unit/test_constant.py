"""Tensors of equal words: how they are found, and that their size in memory leaves no trace."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.craft import bounded

from tpde.codec.blob import repeat_word
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile
from tpde.files.tensor_writer import repeats
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

PIECE = 8 << 20


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F64"])
@pytest.mark.parametrize("begin", [0, 5])
def test_reading_takes_little_more_than_what_is_read(dtype: str, begin: int) -> None:
    b = {"U8": 1, "BF16": 2, "F64": 8}[dtype]
    word = np.arange(0x81, 0x81 + b, dtype=np.uint8)
    sink, data = BytesSink(), np.tile(word, PIECE // b)
    with FileWriter(sink, {"x": TensorSpec(dtype, (PIECE // b,))}) as writer:
        writer.write("x", data)
    assert len(sink.data) < 8192
    out = np.empty(PIECE - begin - 3, np.uint8)
    with PackedFile(bytes(sink.data)) as file, bounded(4 * PIECE / (1 << 20)):
        file.tensor("x").read(begin, PIECE - 3, out)
    assert np.array_equal(out, data[begin:-3])


@pytest.mark.parametrize("dtype", ["U8", "BF16"])
def test_a_late_other_word_costs_little_more_than_its_piece(dtype: str) -> None:
    b = {"U8": 1, "BF16": 2}[dtype]
    data = np.full(PIECE, 0x42, np.uint8)
    data[-1] = 0x43
    sink = BytesSink()
    writer = FileWriter(sink, {"x": TensorSpec(dtype, (PIECE // b,))}, threads=1)
    with bounded(6 * PIECE / (1 << 20)), writer:
        writer.write("x", data[: PIECE // 2])
        writer.write("x", data[PIECE // 2 :])
    with PackedFile(bytes(sink.data)) as file:
        assert np.array_equal(file.read("x"), data)


@given(
    word=st.binary(min_size=1, max_size=16).filter(lambda it: len(it) in (1, 2, 4, 8, 16)),
    size=st.integers(0, 300_000),
    start=st.integers(0, 7),
    other=st.integers(0, 300_000),
)
def test_how_far_a_word_is_repeated(word: bytes, size: int, start: int, other: int) -> None:
    """From any address, and up to the first byte that differs."""
    pattern = np.frombuffer(word, np.uint8)
    out = np.empty(start + size, np.uint8)[start:]
    repeat_word(pattern, out)
    assert out.tobytes() == (word * (size // len(word) + 1))[:size]
    assert repeats(out, pattern) == size
    if other < size:
        out[other] ^= 1
        assert repeats(out, pattern) == other


def test_no_pattern_is_made_for_a_tensor_that_is_not_constant() -> None:
    """Making one of 32 MiB took several times as long as encoding does."""
    pieces = np.random.default_rng(1).integers(0, 256, 1 << 25, np.uint8)
    tracemalloc.start()
    assert repeats(pieces, pieces[:2]) < 1000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    data = np.random.default_rng(1).normal(size=1 << 18).astype(np.float16)
    sink = BytesSink()
    with FileWriter(sink, {"x": TensorSpec("F16", data.shape)}) as writer:
        writer.write("x", data.view(np.uint8))
    with PackedFile(bytes(sink.data)) as file:
        assert file.packed_names() == ["x"]
        assert np.array_equal(file.read("x"), data.view(np.uint8))
