"""The core's encoder writes exactly what docs/format.md's rules give (reference.encode_blob)."""

from __future__ import annotations

import pytest
from support.codecs import pack_everything
from support.contents import CONTENTS, fill, spec_of
from support.files import blobs, pack_bytes, safetensors_bytes

from tpde.codec import reference, selection
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec


def _encoded_again(blob: bytes) -> bytes:
    """Encode a blob's content by the document, with the tables that the core chose."""
    header = reference.parse_header(blob)
    return reference.encode_blob(
        reference.decode_blob(blob),
        next(name for name, d in reference.DTYPES.items() if d.code == header.dtype),
        header.shape,
        codec={1: "prefix", 2: "zstd", 3: "constant"}[header.codec],
        tables=reference.parse_tables(header, blob) if header.codec == 1 else (),
        planes=header.planes if header.codec == 1 else (),
        segment_words=header.segment_words,
        chunk_words=header.chunk_words,
        unit_log2=header.unit_log2,
    )


def _check(blob: bytes, name: str) -> None:
    needed = _encoded_again(blob)
    assert not any(blob[len(needed) :]), f"{name}: padding"
    found = blob[: len(needed)]
    at = next((i for i, (a, b) in enumerate(zip(found, needed, strict=True)) if a != b), None)
    assert at is None, f"{name}: byte {at} is {found[at]}, the document gives {needed[at]}"


@pytest.mark.parametrize("codec", ["prefix", "zstd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tensors_are_coded_as_the_document_says(
    codec: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_everything(monkeypatch)
    specs = [spec_of(dtype, words) for words in (1, 31, 517, 1021)]
    tensors = {f"{c}.{i}": (s, fill(c, s)) for c in CONTENTS for i, s in enumerate(specs)}
    for name, blob in blobs(pack_bytes(safetensors_bytes(tensors), codec=codec)).items():
        _check(blob, name)


@pytest.mark.parametrize("content", ["normal", "ascending", "specials", "nearly"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "I8", "F64"])
def test_several_chunks_and_tables_are_coded_as_the_document_says(
    dtype: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_everything(monkeypatch)
    spec = spec_of(dtype, 2 * selection.PREFIX_CHUNK_WORDS + 700)
    found = blobs(pack_bytes(safetensors_bytes({"x": (spec, fill(content, spec))}), codec="prefix"))
    _check(found["x"], content)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_segments_are_cut_as_the_document_says(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    monkeypatch.setattr(selection, "SEGMENT_BYTES", 500)
    spec = TensorSpec(dtype, (4, 43, 23))
    found = blobs(pack_bytes(safetensors_bytes({"x": (spec, fill("normal", spec))}), codec="prefix"))
    assert reference.parse_header(found["x"]).chunks == 4
    _check(found["x"], dtype)
