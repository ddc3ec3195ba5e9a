"""Windows that a GPU encodes: the bytes of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from support.gpu import needs_cuda, torch
from support.window_encoding import GUARD, assert_same_blob
from support.windows import MATRICES, weights

from tpde.cuda.window_encode import COUNTS_BYTES, SAID_AT, Matrix, WindowEncoder

pytestmark = needs_cuda

SHAPES = ((1, 1), (9, 40), (17, 5), (33, 70), (100, 384), (48, 1100), (1000, 1024), (2100, 777), (3, 300_001))


def encode(matrix: torch.Tensor) -> torch.Tensor:
    """Encode a matrix where it is, on the current stream; nothing but the blob is written."""
    at = Matrix(matrix.data_ptr(), *matrix.shape, matrix.stride(0))
    encoder, stream = WindowEncoder(at, 0), torch.cuda.current_stream().cuda_stream
    scratch = torch.zeros(encoder.scratch_bytes + GUARD, dtype=torch.uint8, device="cuda")
    encoder.plan(scratch.data_ptr(), stream)
    chosen = encoder.choose(scratch[:COUNTS_BYTES].cpu().numpy())
    scratch[SAID_AT : SAID_AT + chosen.said.size] = torch.from_numpy(chosen.said).cuda()
    out = torch.full((chosen.window.nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8, device="cuda")
    encoder.encode(chosen, scratch.data_ptr(), out.data_ptr() + GUARD, stream)
    assert not scratch[encoder.scratch_bytes :].any()
    assert (out[:GUARD] == 0xA5).all()
    assert (out[-GUARD:] == 0xA5).all()
    return out[GUARD:-GUARD]


def check(words: np.ndarray, matrix: torch.Tensor) -> None:
    assert_same_blob(encode(matrix).cpu().numpy(), words)


def upload(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16).copy()).cuda()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda it: f"{it[0]}x{it[1]}")
@pytest.mark.parametrize("content", MATRICES)
def test_the_bytes_of_the_core(content: str, shape: tuple[int, int]) -> None:
    words = MATRICES[content](*shape)
    check(words, upload(words))


@pytest.mark.parametrize("content", ["weights", "pruned", "every_word", "escapes"])
@pytest.mark.parametrize("shape", [(2048, 4096), (5000, 1050), (300, 30_000)], ids=str)
def test_many_blocks(content: str, shape: tuple[int, int]) -> None:
    """Blocks wait for those before them, again and again in other orders."""
    words = MATRICES[content](*shape)
    matrix = upload(words)
    blob = encode(matrix)
    assert_same_blob(blob.cpu().numpy(), words)
    for _ in range(20):
        assert torch.equal(encode(matrix), blob)


@pytest.mark.parametrize("first", [0, 1, 4, 8, 13])
@pytest.mark.parametrize("stride", [2048, 2050, 2055])
def test_strided_views(first: int, stride: int) -> None:
    words = weights(300, stride)
    check(words[:, first : first + 2000], upload(words)[:, first : first + 2000])


def test_a_stream_of_its_own() -> None:
    words = weights(2000, 1000)
    matrix = upload(words)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        blob = encode(matrix).cpu()
    assert_same_blob(blob.numpy(), words)
