"""The kernels that encode windows, run on the CPU: the core's bytes, of any matrix at any place."""

from __future__ import annotations

import numpy as np
import pytest
from support.emulated import on_cpu  # noqa: F401
from support.window_encoding import assert_same_blob, encode_on_host
from support.windows import MATRICES, weights

from tpde.codec import windows
from tpde.cuda import window_encode
from tpde.cuda.window_encode import Matrix, WindowEncoder
from tpde.errors import InvalidInput

SHAPES = ((1, 1), (9, 40), (17, 5), (33, 70), (16, 256), (100, 384), (48, 1100), (1, 5000), (40, 264))

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda it: f"{it[0]}x{it[1]}")
@pytest.mark.parametrize("content", MATRICES)
def test_the_bytes_of_the_core(content: str, shape: tuple[int, int]) -> None:
    words = np.ascontiguousarray(MATRICES[content](*shape))
    assert_same_blob(encode_on_host(words), words)


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("stride", [512, 520, 515])
def test_views_at_any_word(first: int, stride: int) -> None:
    memory = weights(33, stride).reshape(-1)
    words = np.lib.stride_tricks.as_strided(memory[first:], (32, 490), (2 * stride, 2))
    assert_same_blob(encode_on_host(words), words)


def test_a_row_of_escapes() -> None:
    words = weights(40, 600)
    words[21] = np.arange(600) * 0x6D % 256 << 7
    blob = encode_on_host(words)
    assert_same_blob(blob, words)
    assert windows.validate(blob).entries > 500


@pytest.mark.parametrize("few", [0, 1 << 30])
def test_a_warp_a_row_or_a_block(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_encode, "_FEW_ROWS", few)
    monkeypatch.setattr(window_encode, "_MOST_BLOCKS", 3)  # which take several rows each
    for make in (weights, MATRICES["every_word"], MATRICES["edges"]):
        words = make(70, 3001)
        assert_same_blob(encode_on_host(words), words)


def test_the_sum_of_many_blocks() -> None:
    """More than 32 blocks: some look further back than a warp at once."""
    words = weights(16 * 300, 70)
    assert_same_blob(encode_on_host(words), words)


def test_what_no_matrix_is() -> None:
    with pytest.raises(InvalidInput, match="no window layout"):
        WindowEncoder(Matrix(256, 0, 5, 5), 0)
    for wrong in (Matrix(257, 2, 5, 5), Matrix(256, 2, 5, 4)):
        with pytest.raises(ValueError, match="no matrix"):
            WindowEncoder(wrong, 0)
    encoder = WindowEncoder(Matrix(256, 1, 5, 0), 0)
    with pytest.raises(ValueError, match="0x108"):
        encoder.plan(264, 0)
    chosen = encoder.choose(bytes(2048))
    with pytest.raises(ValueError, match="a blob at 0x40"):
        encoder.encode(chosen, 256, 64, 0)
