"""Only the chunks that a range of bytes cuts are decoded beside its place."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from support.contents import fill, spec_of
from support.files import pack_bytes, safetensors_bytes

from tpde.codec.blob import BlobReader
from tpde.codec.native import Bytes
from tpde.codec.selection import PREFIX_CHUNK_WORDS
from tpde.files.reader import PackedFile
from tpde.files.tensor_reader import BlobTensor

CHUNK = 2 * PREFIX_CHUNK_WORDS  # bytes
SPEC = spec_of("BF16", 6 * PREFIX_CHUNK_WORDS + 100)


@pytest.mark.parametrize("threads", [1, 2])
def test_ranges_that_cut_chunks(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fill("normal", SPEC)
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack_bytes(safetensors_bytes({"w": (SPEC, data)})))
    real, beside = BlobReader.decode_bytes, list[int]()

    def seen(self: BlobReader, first: int, last: int, got: Bytes, out: Bytes, threads: int = 1) -> None:
        if not np.shares_memory(out, whole):
            beside.append(last - first + 1)
        real(self, first, last, got, out, threads)

    monkeypatch.setattr(BlobReader, "decode_bytes", seen)
    edges = [
        0,
        1,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        3 * CHUNK,
        5 * CHUNK + 7,
        6 * CHUNK,
        SPEC.nbytes - 1,
        SPEC.nbytes,
    ]
    with PackedFile(path) as file:
        tensor = file.tensor("w")
        assert isinstance(tensor, BlobTensor)
        for begin, end in itertools.combinations(edges, 2):
            whole, beside = np.empty(end - begin, np.uint8), []
            tensor.read(begin, end, whole, threads)
            assert whole.tobytes() == data[begin:end], (begin, end)
            cut = {at // CHUNK for at in (begin, end) if at % CHUNK and at != SPEC.nbytes}
            assert beside == [1] * len(cut), (begin, end)
