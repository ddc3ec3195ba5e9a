"""Tensors of more than 2^31 elements: written in pieces, read in pieces, in bounded memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.contents import CONTENTS, rng

from tpde.files.file_writer import FileWriter, TensorSpec
from tpde.files.operations import verify
from tpde.files.reader import PackedFile

ELEMENTS = (1 << 31) + 12_345
PIECE = 24 << 20
MEMORY = 512 << 20  # what `pack` promises


def _pieces(base: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of a stream that repeats nowhere at a distance that zstd or a chunk sees."""
    for number, at in enumerate(range(0, ELEMENTS, PIECE)):
        yield np.roll(base, 7919 * number)[: min(PIECE, ELEMENTS - at)]


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


@pytest.mark.large
@pytest.mark.parametrize(
    ("codec", "name", "dtype", "content"),
    [
        ("prefix", "x", "F8_E4M3", "normal"),
        ("zstd", "x", "U8", "normal"),
        ("auto", "x", "U8", "zeros"),
        ("auto", "x_tpde", "U8", "random"),
    ],
    ids=["prefix", "zstd", "constant", "plain"],
)
def test_more_than_2_to_the_31_elements(
    codec: str, name: str, dtype: str, content: str, tmp_path: Path
) -> None:
    block = np.frombuffer(CONTENTS[content](dtype, PIECE >> 3), np.uint8)
    base = np.concatenate([np.roll(block, 131 * i) for i in range(8)])
    path, before = tmp_path / "large.safetensors", _peak()
    with FileWriter(path, {name: TensorSpec(dtype, (ELEMENTS,))}, codec=codec) as writer:
        for piece in _pieces(base):
            writer.write(name, piece)
    with PackedFile(path) as file:
        assert bool(file.packed_names()) == (name == "x")
        tensor, at, out = file.tensor(name), 0, np.empty(PIECE, np.uint8)
        for piece in _pieces(base):
            tensor.read(at, at + piece.size, out[: piece.size], 2)
            assert np.array_equal(out[: piece.size], piece), f"bytes {at} to {at + piece.size}"
            at += piece.size
        assert at == tensor.spec.nbytes == ELEMENTS
        for begin in rng(content).integers(0, ELEMENTS - 100, 20):
            tensor.read(int(begin), int(begin) + 100, out[:100])
            number, inside = divmod(int(begin), PIECE)
            if inside + 100 <= PIECE:
                assert np.array_equal(out[:100], np.roll(base, 7919 * number)[inside : inside + 100])
    assert verify(path) == []
    assert _peak() - before < MEMORY
