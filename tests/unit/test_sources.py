"""Reading what is packed: samples, pieces, and where the bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import spoilt
from support.contents import fill, spec_of
from support.files import MemorySource, safetensors_bytes

from tpde.codec.selection import PREFIX_CHUNK_WORDS, SAMPLE_CHUNKS, sample_ranges
from tpde.errors import NotSafetensors
from tpde.files.inputs import open_source, read_pieces, read_sample
from tpde.format.container import TensorSpec

TENSORS = {
    "few": (TensorSpec("U8", (9,)), bytes(range(9))),
    "w": (spec_of("BF16", 1500), fill("random", spec_of("BF16", 1500))),
    "none": (TensorSpec("F32", (0, 3)), b""),
}


class Pattern:
    """A tensor whose bytes are known by their places."""

    name = "<pattern>"
    container: Any = None

    def __init__(self, spec: TensorSpec) -> None:
        self.specs = {"x": spec}

    def read(self, name: str, begin: int, end: int, out: Any) -> None:
        assert out.size == end - begin
        out[:] = np.arange(begin, end) % 251

    def read_small(self, names: Any) -> list[memoryview]:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.mark.parametrize("words", [0, 1, PREFIX_CHUNK_WORDS + 7, (SAMPLE_CHUNKS + 9) * PREFIX_CHUNK_WORDS])
def test_a_sample_has_the_bytes_of_its_ranges(words: int) -> None:
    spec = spec_of("U8", words)
    ranges = list(sample_ranges(spec))
    assert len(ranges) > 1 or words < SAMPLE_CHUNKS * PREFIX_CHUNK_WORDS
    needed = np.concatenate([np.zeros(0), *(np.arange(begin, end) % 251 for begin, end in ranges)])
    assert np.array_equal(read_sample(Pattern(spec), "x"), needed)


PIECE = 8 << 20


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 50])
def test_pieces_cover_a_tensor(size: int) -> None:
    spec, sizes, whole = TensorSpec("U8", (size,)), [], b""
    for piece in read_pieces(Pattern(spec), "x"):
        assert piece.base is None or piece.base.size <= min(size, PIECE)
        sizes.append(piece.size)
        whole += piece.tobytes()
    assert sizes == [PIECE] * (size // PIECE) + [size % PIECE] * (size % PIECE > 0)
    assert whole == np.resize(np.arange(251, dtype=np.uint8), size).tobytes()


def test_any_part_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(TENSORS, {"format": "pt"}))
    source = open_source(path)
    try:
        assert source.name == str(path)
        assert source.specs == {name: spec for name, (spec, _) in TENSORS.items()}
        assert source.container.metadata == {"format": "pt"}
        for name, (spec, data) in TENSORS.items():
            for begin, end in {(0, spec.nbytes), (spec.nbytes // 3, spec.nbytes // 2), (0, 0)}:
                out = np.empty(end - begin, np.uint8)
                source.read(name, begin, end, out)
                assert out.tobytes() == data[begin:end]
    finally:
        source.close()
    memory = MemorySource(path.read_bytes())
    assert b"".join(piece.tobytes() for piece in read_pieces(memory, "w")) == TENSORS["w"][1]


def test_what_is_no_weights_says_what_may_be_named(tmp_path: Path) -> None:
    spoilt.write(tmp_path / "x.safetensors", "text")
    with pytest.raises(NotSafetensors) as told:
        open_source(tmp_path / "x.safetensors")
    for ending in (".bin", ".pt", ".pth", ".ckpt"):
        assert ending in told.value.hint
