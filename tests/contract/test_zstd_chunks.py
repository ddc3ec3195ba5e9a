"""zstd chunks at the size that the planner gives them, 65536 words: the largest that the format allows."""

from __future__ import annotations

import pytest
from support.codecs import Case
from support.files import blobs, pack_bytes, safetensors_bytes, unpack_bytes

from tpde.codec import reference, selection
from tpde.format.constants import CODEC_ZSTD

CASE = Case(
    "zstd", CODEC_ZSTD, "zstd", selection.ZSTD_CHUNK_WORDS, ("normal", "nearly", "specials", "ascending")
)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U16", "I64"])
def test_the_largest_chunks_round_trip(dtype: str) -> None:
    assert selection.ZSTD_CHUNK_WORDS == 65536
    tensors = CASE.tensors(dtype)
    source = safetensors_bytes(tensors)
    packed = pack_bytes(source, codec="zstd", threads=2)
    assert unpack_bytes(packed) == source
    found = blobs(packed)
    assert any(reference.parse_header(blob).chunks > 1 for blob in found.values())
    smallest = min(found, key=lambda name: len(found[name]))
    assert reference.decode_blob(found[smallest]) == tensors[smallest][1]
