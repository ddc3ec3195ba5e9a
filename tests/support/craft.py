"""Damage on purpose: blobs whose fields are edited and whose hash is made right again, files around them."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Iterator

import pytest

from support.contents import fill
from support.files import container, verify_bytes
from tpde.codec import reference
from tpde.errors import Corrupt, TpdeError
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec

# Where the header's fields lie, and their types (format.md 2).
FIELDS = {
    "magic": (0, "B"),
    "version": (8, "H"),
    "codec": (10, "B"),
    "layout": (11, "B"),
    "dtype": (12, "B"),
    "word_bytes": (13, "B"),
    "rotate": (14, "B"),
    "ndim": (15, "B"),
    "words": (16, "Q"),
    "segment_words": (24, "Q"),
    "chunks": (32, "Q"),
    "blob_bytes": (40, "Q"),
    "chunk_words": (48, "I"),
    "max_chunk_bytes": (52, "I"),
    "max_stream_bytes": (56, "I"),
    "tables": (60, "B"),
    "unit_log2": (61, "B"),
    "context": (62, "B"),
    "reserved": (63, "B"),
    "hash": (64, "B"),
    "base": (80, "B"),
    "constant": (96, "B"),
    "tables_bytes": (104, "I"),
    "reserved_2": (108, "B"),
    "meta_hash": (120, "Q"),
}
SPEC = TensorSpec("BF16", (3, 500))
DATA = fill("normal", SPEC)
TABLE = reference.Table.from_lengths(1, 3, 1, {0x3C: 1, 0x3B: 2, 0x3A: 3}, 3)


def prefix_blob(table: reference.Table = TABLE, **options: int) -> bytes:
    """Give a small blob of three chunks with one table, for the plane of exponents."""
    options.setdefault("chunk_words", 512)
    uses = [(0, 0), (0, 1)]
    return reference.encode_blob(DATA, SPEC.dtype, SPEC.shape, tables=[table], planes=uses, **options)


def zstd_blob() -> bytes:
    """Give a small zstd blob of one chunk, whose one plane is coded."""
    return reference.encode_blob(bytes(range(16)) * 32, "U8", (512,), codec="zstd", chunk_words=512)


def constant_blob() -> bytes:
    """Give a constant blob."""
    return reference.encode_blob(b"\x80\x3f" * 999, "BF16", (999,), codec="constant")


def patch(blob: bytes, at: int, data: bytes) -> bytes:
    """Replace some bytes."""
    return blob[:at] + data + blob[at + len(data) :]


def reseal(blob: bytes, chunks_at: int) -> bytes:
    """Make the hash of everything before the first chunk right again, as an attacker would."""
    return patch(blob, reference.META_HASH_AT, struct.pack("<Q", reference.meta_hash_of(blob[:chunks_at])))


def edited(blob: bytes, sealed: bool = True, **fields: int) -> bytes:
    """Set fields of a blob's header."""
    end = reference.parse_header(blob).chunks_at
    for name, value in fields.items():
        at, kind = FIELDS[name]
        blob = patch(blob, at, struct.pack(f"<{kind}", value))
    return reseal(blob, end) if sealed and "meta_hash" not in fields else blob


def edited_record(blob: bytes, chunk: int, **fields: int) -> bytes:
    """Set fields of a record in the index map (format.md 4.3)."""
    header = reference.parse_header(blob)
    at = header.index_at + reference.RECORD.size * chunk
    names = ("offset", "checksum", "modes", "table", "fill")
    old = dict(zip(names, reference.RECORD.unpack_from(blob, at), strict=True))
    assert fields.keys() <= old.keys()
    blob = patch(blob, at, reference.RECORD.pack(*(old | fields).values()))
    return reseal(blob, header.chunks_at)


def edited_section(blob: bytes, at: int, data: bytes) -> bytes:
    """Replace bytes of the table section."""
    header = reference.parse_header(blob)
    return reseal(patch(blob, header.tables_at + at, data), header.chunks_at)


def file_of(blob: bytes, name: str = "x") -> bytes:
    """Give a file with one blob, as another tool would save it: every blob describes itself."""
    entry = {"dtype": "U8", "shape": [len(blob)], "data_offsets": [0, len(blob)]}
    return container({name + "_tpde": entry}, blob)


def read_blob(blob: bytes) -> bytes:
    """Decode a blob as a file's only tensor."""
    with PackedFile(file_of(blob)) as file:
        return file.read("x").tobytes()


def refused(
    blob: bytes,
    error: type[TpdeError] = Corrupt,
    match: str | None = None,
    *,
    chunk: int | None = None,
    by_reference: bool = True,
) -> None:
    """Expect a blob to be refused by reader, verifier and reference, the tensor and the chunk named."""
    with pytest.raises(error, match=match) as caught:
        read_blob(blob)
    assert "`x`" in str(caught.value)
    if error is Corrupt:
        assert (caught.value.tensor, caught.value.chunk) == ("x", chunk)  # type: ignore[attr-defined]
    if by_reference:
        with pytest.raises(error):
            reference.decode_blob(blob)
    with contextlib.suppress(error):  # opening may refuse the file as a whole
        problems = verify_bytes(file_of(blob))
        assert [(p.tensor, p.chunk) for p in problems[:1]] == [("x", chunk)]


@contextlib.contextmanager
def bounded(mebibytes: float) -> Iterator[None]:
    """Expect the body to allocate no more than this at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mebibytes * (1 << 20), f"{peak} bytes were allocated at a time"
