"""Any valid table, not only those that the planner makes, codes and decodes alike in core and reference."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contents import rng

from tpde.codec import core_chunks, native, prefix_codes, reference
from tpde.codec.blob import BlobReader
from tpde.codec.selection import core_layout
from tpde.io.sources import BytesSource

DTYPE_OF_BYTES = {1: "F8_E5M2", 2: "BF16", 4: "F32", 8: "U64"}


@st.composite
def tables(draw: st.DrawFn) -> reference.Table:
    """Any complete code: leaves split at random, values at random, one leaf perhaps the escape."""
    kind = draw(st.sampled_from([1, 2]))
    longest = draw(st.integers(1, 12))
    raw = draw(st.integers(0, min(7, 12 - longest))) if kind == 1 else 0
    limit = min(1 << (8 - raw if kind == 1 else 16), 300)
    leaves = [0]
    for _ in range(draw(st.integers(1, 80))):
        short = [i for i, bits in enumerate(leaves) if bits < longest]
        if not short or len(leaves) >= limit:
            break
        at = short[draw(st.integers(0, len(short) - 1))]
        leaves[at] += 1
        leaves.append(leaves[at])
    if leaves == [0]:
        leaves = [1, 1]
    random = rng(draw(st.integers(0, 1 << 30)))
    escape = leaves.pop(int(random.integers(len(leaves)))) if draw(st.booleans()) else 0
    values = random.choice(1 << (8 - raw if kind == 1 else 16), len(leaves), replace=False)
    lengths = dict(zip(map(int, values), leaves, strict=True))
    assert sum(Fraction(1, 1 << n) for n in [*leaves, *([escape] if escape else [])]) == 1
    return reference.Table.from_lengths(kind, max([*leaves, escape]), raw, lengths, escape)


@st.composite
def planes_of(draw: st.DrawFn, found: list[reference.Table], n: int) -> bytes:
    """Symbols that the tables code, with some that only an escape can."""
    random = rng(draw(st.integers(0, 1 << 30)))
    table = found[draw(st.integers(0, len(found) - 1))]
    stray = draw(st.sampled_from([0.0, 0.0, 0.02, 1.0]))
    if table.kind == 1:
        low = random.integers(0, 1 << table.raw_bits, n)
        plane = random.choice(table.values, n) << table.raw_bits | low
        plane = np.where(random.random(n) < stray, random.integers(0, 256, n), plane)
        return plane.astype(np.uint8).tobytes()
    pairs = random.choice(table.values, -(-n // 2))
    pairs = np.where(random.random(pairs.size) < stray, random.integers(0, 1 << 16, pairs.size), pairs)
    return pairs.astype("<u2").tobytes()[:n]


@st.composite
def blobs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    b = draw(st.sampled_from([1, 2, 4, 8]))
    dtype = DTYPE_OF_BYTES[b]
    n = draw(st.sampled_from([1, 2, 33, 127, 511, 512, 513, 1025, 1500]))
    found = draw(st.lists(tables(), min_size=1, max_size=4))
    planes, uses = [], []
    for _ in range(b):
        first = draw(st.integers(0, len(found) - 1))
        count = draw(st.integers(0, len(found) - first))
        uses.append((first, count))
        planes.append(draw(planes_of(found[first : first + count] or found, n)))
    data = reference.merge(planes, b, reference.DTYPES[dtype].rotate)
    segment = draw(st.sampled_from([n, max(1, n // 3)]))
    unit = draw(st.sampled_from([4, 5, 8, 12]))
    blob = reference.encode_blob(
        data, dtype, (n,), tables=found, planes=uses, segment_words=segment, chunk_words=512, unit_log2=unit
    )
    return blob, data


@given(blobs())
def test_the_core_decodes_and_encodes_what_the_reference_wrote(made: tuple[bytes, bytes]) -> None:
    blob, data = made
    can_encode = all(
        table.escape or len(table.values) == 1 << table.value_bits
        for table in reference.parse_tables(reference.parse_header(blob), blob)
    )
    assert reference.decode_blob(blob) == data
    reader = BlobReader(BytesSource(blob), 0, len(blob))
    header = reader.header
    before = native.simd()
    try:
        for path in native.simd_available():
            native.simd_select(path)
            out = np.full(len(data), 0xA5, np.uint8)
            reader.read(0, len(data), out)
            assert out.tobytes() == data, path
            if not can_encode:  # the core's encoder takes only tables that code every symbol
                continue
            codec = prefix_codes.PrefixCodec(
                core_layout(header), blob[header.tables_at : header.index_at], encode=True
            )
            room = np.full(codec.bound(header.words, header.chunks), 0xA5, np.uint8)
            words = np.frombuffer(data, np.uint8)
            again = codec.encode(words, 0, header.chunks, header.chunks_at, room)
            assert again.records.tobytes() == reader.index.tobytes(), path
            body = again.data.tobytes()
            assert body == blob[header.chunks_at : header.blob_bytes], path
            assert (again.max_chunk, again.max_stream) == (header.max_chunk_bytes, header.max_stream_bytes)
    finally:
        native.simd_select(before)


@pytest.mark.parametrize("best", range(4))
def test_a_plane_with_fewer_tables_takes_its_last(best: int) -> None:
    """Its table is that of the chunk's number, or the last that it has; so it is written and read."""
    low = [reference.Table.from_lengths(1, 3, 0, {v: 1, v + 1: 2, v + 2: 3}, 3) for v in (0, 10)]
    high = [reference.Table.from_lengths(1, 3, 0, {v: 1, v + 1: 2, v + 2: 3}, 3) for v in (40, 50, 60, 70)]
    draw, n = rng("fewer", best), 1400
    planes = [10 * min(best, 1) + draw.integers(0, 3, n), 40 + 10 * best + draw.integers(0, 3, n)]
    data = reference.merge([plane.astype(np.uint8).tobytes() for plane in planes], 2, 0)
    uses = [(0, 2), (2, 4)]
    blob = reference.encode_blob(data, "U16", (n,), tables=[*low, *high], planes=uses, chunk_words=512)
    reader = BlobReader(BytesSource(blob), 0, len(blob))
    assert set(reader.records["table"].tolist()) == {best}
    assert set(reader.records["modes"].tolist()) == {0b1010}
    header, out = reader.header, np.empty(len(data), np.uint8)
    reader.read(0, len(data), out)
    assert out.tobytes() == data
    codec = prefix_codes.PrefixCodec(core_layout(header), reader.section, encode=True)
    room = np.full(codec.bound(header.words, header.chunks), 0xA5, np.uint8)
    again = codec.encode(np.frombuffer(data, np.uint8), 0, header.chunks, header.chunks_at, room)
    assert again.records.tobytes() == reader.index.tobytes()
    assert again.data.tobytes() == blob[header.chunks_at :]


@pytest.mark.parametrize("kind", [1, 2])
def test_a_code_of_two_codewords_and_one_of_4096_are_taken(kind: int) -> None:
    data = rng("extremes", kind).integers(0, 2, 600, np.uint8).tobytes()
    few = {0: 1, 1: 1} if kind == 1 else {0: 1, 256: 2, 1: 3, 257: 3}
    codes = [reference.Table.from_lengths(kind, max(few.values()), 0, few)]
    if kind == 2:
        codes.append(reference.Table.from_lengths(2, 12, 0, {v * 16: 12 for v in range(4095)}, 12))
    else:
        codes.append(reference.Table.from_lengths(1, 8, 0, dict.fromkeys(range(256), 8)))
    for number in range(len(codes)):
        use = (number, 1)
        blob = reference.encode_blob(data, "U8", (600,), tables=codes, planes=[use], chunk_words=512)
        out = np.empty(600, np.uint8)
        BlobReader(BytesSource(blob), 0, len(blob)).read(0, 600, out)
        assert out.tobytes() == data == reference.decode_blob(blob)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 511, 512, 513, 1024, 4097])
def test_checksums_are_those_of_the_document(size: int, simd_restored: None) -> None:
    data = rng("checksum", size).bytes(size)
    for path in native.simd_available():
        native.simd_select(path)
        assert core_chunks.checksum(data) == reference.checksum(data), path


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F16", "U16", "F32", "I32", "F64", "U64"])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 511, 1000])
def test_planes_are_those_of_the_document(dtype: str, n: int, simd_restored: None) -> None:
    _, b, rotate, _ = reference.DTYPES[dtype]
    words = rng("planes", dtype, n).bytes(n * b)
    layout = native.CoreLayout(
        words=n, segment_words=max(n, 1), chunk_words=512, word_bytes=b, rotate=rotate, unit_log2=4
    )
    needed = reference.split(words, b, rotate)
    for path in native.simd_available():
        native.simd_select(path)
        planes = core_chunks.split(layout, words)
        assert [p.tobytes() for p in planes] == needed, path
        out = np.empty(n * b, np.uint8)
        core_chunks.merge(layout, planes, out)
        assert out.tobytes() == words, path
