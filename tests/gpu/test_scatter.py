"""Sparse changes on the GPU: bits, bounds, parts of a chunk map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.contents import rng
from support.gpu import needs_cuda, torch

from tpde.cuda.scatter import Chunk, ChunkMap

pytestmark = needs_cuda

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Case:
    """A tensor with changes in chunks of the sizes that are asked for."""

    def __init__(self, word_bytes: int, words: int, sizes: list[int]) -> None:
        draw, b, total = rng("scatter", word_bytes, words, *sizes), word_bytes, sum(sizes)
        self.b, self.words = b, words
        self.base = draw.integers(0, 256, words * b, np.uint8).view(WORDS[b])
        self.positions = np.sort(draw.choice(words, total, replace=False))
        self.values = draw.integers(0, 256, total * b, np.uint8).view(WORDS[b])
        pieces: list[np.ndarray] = []
        self.chunks, at, first = list[Chunk](), 0, 0
        for size in sizes:
            own = slice(first, first + size)
            first += size
            origin = int(self.positions[own][0]) if size else words
            positions = (self.positions[own] - origin).astype("<u4").view(np.uint8)
            start = at + -(-positions.size // 16) * 16
            self.chunks.append(Chunk(at, start, origin, size))
            for piece in (positions, self.values[own].view(np.uint8)):
                pieces.append(np.pad(piece, (0, -piece.size % 16)))
                at += pieces[-1].size
        self.data = np.concatenate([*pieces, np.zeros(16, np.uint8)])

    def run(self, **part: Any) -> tuple[np.ndarray, list[int]]:
        """Write the changes on the device; returns the tensor and the status."""
        made = ChunkMap(self.chunks, word_bytes=self.b, words=self.words, data_bytes=self.data.size, device=0)
        guard = np.full(64, 0xA5, np.uint8)
        out = torch.from_numpy(np.concatenate([self.base.view(np.uint8), guard])).cuda()
        data, records = torch.from_numpy(self.data).cuda(), torch.from_numpy(made.descriptors).cuda()
        status = torch.zeros(4, dtype=torch.int32, device="cuda")
        where = records.data_ptr(), status.data_ptr(), torch.cuda.current_stream().cuda_stream
        made.launch(*where, data.data_ptr(), out.data_ptr(), **part)
        found = out.cpu().numpy()
        assert (found[-64:] == 0xA5).all()
        return found[:-64].view(WORDS[self.b]), status.tolist()

    def expected(self, begin: int, end: int) -> np.ndarray:
        """Give the tensor with the changes from one number to another."""
        out = self.base.copy()
        out[self.positions[begin:end]] = self.values[begin:end]
        return out


@pytest.mark.parametrize("word_bytes", WORDS)
@pytest.mark.parametrize("sizes", [[1], [0, 5, 0], [1024, 1025, 1, 4000], [700] * 64])
def test_words_are_written(word_bytes: int, sizes: list[int]) -> None:
    case = Case(word_bytes, 100_003, sizes)
    found, status = case.run()
    assert np.array_equal(found, case.expected(0, sum(sizes)))
    assert status == [0, 0, 0, 0]


def test_every_word_of_a_tensor() -> None:
    case = Case(4, 300_000, [100_000] * 3)
    found, _ = case.run()
    assert np.array_equal(found, case.values)


def test_a_part_of_the_map() -> None:
    case = Case(4, 100_003, [100, 200, 300, 400])
    found, _ = case.run(first=1, count=2)
    assert np.array_equal(found, case.expected(100, 600))


@pytest.mark.parametrize("word_bytes", WORDS)
def test_positions_outside_are_reported_and_never_written(word_bytes: int) -> None:
    case = Case(word_bytes, 100_003, [1000, 2000, 3000])
    at = case.chunks[2].positions // 4 + 1234
    case.data.view("<u4")[[at, at + 1]] = 100_003, 0xFFFFFFFF
    found, status = case.run()
    expected = case.expected(0, 6000)
    expected[case.positions[[4234, 4235]]] = case.base[case.positions[[4234, 4235]]]
    assert np.array_equal(found, expected)
    assert status == [1, 0, 2, 0]


def test_in_a_cuda_graph() -> None:
    case = Case(4, 100_003, [500] * 8)
    made = ChunkMap(case.chunks, word_bytes=4, words=case.words, data_bytes=case.data.size, device=0)
    out = torch.from_numpy(case.base.view(np.int32)).cuda()
    data, records = torch.from_numpy(case.data).cuda(), torch.from_numpy(made.descriptors).cuda()
    status = torch.zeros(4, dtype=torch.int32, device="cuda")

    def launch() -> None:
        where = records.data_ptr(), status.data_ptr(), torch.cuda.current_stream().cuda_stream
        made.launch(*where, data.data_ptr(), out.data_ptr())

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    out.copy_(torch.from_numpy(case.base.view(np.int32)))
    graph.replay()
    assert np.array_equal(out.cpu().numpy().view(np.uint32), case.expected(0, 4000))
