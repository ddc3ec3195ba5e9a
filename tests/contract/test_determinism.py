"""The packed bytes depend on the source alone: not on threads, not on the instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from support.codecs import Case, every_codec, pack_everything
from support.contents import CONTENTS, fill, rng, spec_of
from support.files import pack_bytes, safetensors_bytes, unpack_bytes

from tpde.codec import native, prefix_codes
from tpde.codec.native import Bytes
from tpde.codec.selection import PREFIX_CHUNK_WORDS, core_layout, plan_tensor
from tpde.errors import Corrupt
from tpde.format.constants import DTYPES, RECORD_BYTES
from tpde.format.container import TensorSpec


@pytest.fixture(autouse=True)
def _pack_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)


def _source(case: Case, dtype: str) -> bytes:
    specs = [spec_of(dtype, words) for words in (1021, 7 * 8192 + 3)]
    return safetensors_bytes(
        {f"{c}.{i}{case.suffix}": (spec, fill(c, spec)) for c in CONTENTS for i, spec in enumerate(specs)}
    )


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_writes_and_reads_the_same_bytes(
    case: Case, dtype: str, simd_restored: None
) -> None:
    source = _source(case, dtype)
    packed = set()
    for path in native.simd_available():
        native.simd_select(path)
        packed.add(pack_bytes(source, codec=case.codec))
    assert len(packed) == 1
    (one,) = packed
    for path in native.simd_available():
        native.simd_select(path)
        assert unpack_bytes(one) == source, path


@every_codec
@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64", "I32", "C64", "F4"])
def test_threads_do_not_change_the_bytes(case: Case, dtype: str) -> None:
    source = _source(case, dtype)
    one = pack_bytes(source, codec=case.codec, threads=1)
    for threads in (2, 5):
        assert pack_bytes(source, codec=case.codec, threads=threads) == one
        assert unpack_bytes(one, threads=threads) == source


def _encoded(dtype: str, chunks: int) -> tuple[prefix_codes.PrefixCodec, Bytes, Bytes, Bytes]:
    """Chunks of weights, their index map and the words; the last chunk is a short one."""
    random, spec = rng("weights", dtype), TensorSpec(dtype, (chunks * PREFIX_CHUNK_WORDS - 100,))
    # Words whose upper halves differ as those of weights do, with some that only an escape codes.
    words = (random.normal(0, 0.02, spec.nbytes // 2).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    words[:: words.size // 97] = random.integers(0, 1 << 16, words[:: words.size // 97].size)
    data = words.view(np.uint8)
    plan = plan_tensor(spec, data[: 8 * PREFIX_CHUNK_WORDS], "prefix")
    assert plan is not None
    codec = prefix_codes.PrefixCodec(core_layout(plan.header), plan.section, encode=True)
    room = np.empty(codec.bound(plan.header.words, plan.header.chunks), np.uint8)
    made = codec.encode(data, 0, plan.header.chunks, 0, room)
    return codec, made.records, made.data, data


@pytest.mark.parametrize("dtype", ["BF16", "F16", "U16", "F8_E5M2", "F32"])
def test_every_instruction_set_reports_the_same_damage(dtype: str, simd_restored: None) -> None:
    codec, records, coded, data = _encoded(dtype, 3)
    random, found = rng("damage", dtype), set()
    for _ in range(150):
        damaged, reports = coded.copy(), set()
        damaged[random.integers(0, coded.size, 2)] ^= np.uint8(1 << random.integers(0, 8))
        for path in native.simd_available():
            native.simd_select(path)
            out = np.empty(data.size, np.uint8)
            with pytest.raises(Corrupt) as caught:
                codec.decode(records, 0, damaged, 0, damaged.size, out)
            reports.add((str(caught.value), caught.value.chunk))
        assert len(reports) == 1, reports
        found.add(reports.pop()[0].partition(":")[0])
    assert len(found) > 1  # lanes that run past their bits, as well as checksums


@pytest.mark.parametrize("path", ["avx2", "avx512"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "U16", "F8_E5M2", "F32", "F64"])
def test_vectors_find_a_cut_where_the_portable_path_does(dtype: str, path: str, simd_restored: None) -> None:
    if path not in native.simd_available():
        pytest.skip(f"this build or this machine has no {path}; it has {', '.join(native.simd_available())}")
    codec, records, coded, data = _encoded(dtype, 2)  # all of a chunk's words at once, and as planes
    reports: dict[str, list[str]] = {}
    for name in ("portable", path):
        native.simd_select(name)
        reports[name] = []
        for size in [*range(0, coded.size, 41), *range(coded.size - 64, coded.size + 1)]:
            cut, out = coded[:size].copy(), np.full(data.size, 0xA5, np.uint8)  # memory ends there too
            try:
                codec.decode(records, 0, cut, 0, size, out)
            except Corrupt as error:
                reports[name].append(str(error))
                continue
            assert np.array_equal(out, data), (name, size)  # nothing but padding is missing
            assert size > coded.size - 16, (name, size)
    assert reports[path] == reports["portable"]
    assert len(set(reports[path])) > 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_fill_an_output_of_many_huge_pages(threads: int) -> None:
    codec, records, coded, data = _encoded("BF16", 900)  # 14 MiB
    page = 2 << 20
    room = np.full(data.size + 2 * page, 0xA5, np.uint8)
    first = -room.ctypes.data % page
    for after in (0, 1, 8192, page - 1):  # of a page's first byte: chunks of 16 KiB reach over, or do not
        at = first + after
        out = room[at : at + data.size]
        out[:] = 0xA5
        codec.decode(records, 0, coded, 0, coded.size, out, threads)
        assert np.array_equal(out, data)
        assert (room[:at] == 0xA5).all()
        assert (room[at + data.size :] == 0xA5).all()
        room[at : at + data.size] = 0xA5


@pytest.mark.parametrize("path", native.simd_available())
@pytest.mark.parametrize("dtype", ["BF16", "F8_E5M2", "F64"])
def test_any_number_of_threads_encodes_the_same_bytes(dtype: str, path: str, simd_restored: None) -> None:
    native.simd_select(path)
    codec, records, coded, data = _encoded(dtype, 600)  # more than two threads hold at once
    first, words = 3, data[3 * PREFIX_CHUNK_WORDS * DTYPES[dtype].word_bytes :]
    starts = records.view("<u4")[::3].astype(np.int64) << codec.layout.unit_log2
    size = codec.bound(words.size // DTYPES[dtype].word_bytes, 600 - first)
    one = codec.encode(words, first, 600 - first, int(starts[first]), np.empty(size, np.uint8))
    assert np.array_equal(one.records, records[first * RECORD_BYTES :])
    assert np.array_equal(one.data, coded[starts[first] :])
    for threads in (*range(2, 9), 300):
        room = np.full(size + 64, 0xA5, np.uint8)
        made = codec.encode(words, first, 600 - first, int(starts[first]), room[:size], threads)
        assert np.array_equal(made.data, one.data), threads
        assert np.array_equal(made.records, one.records), threads
        assert made[2:] == one[2:], threads
        assert made.data.ctypes.data == room.ctypes.data
        assert (room[made.data.size :] == 0xA5).all()  # each batch is copied to its place, no more


def test_a_path_that_is_not_there_is_refused(simd_restored: None) -> None:
    with pytest.raises(ValueError, match="available: "):
        native.simd_select("z80")
    assert native.simd() in native.simd_available()
    assert native.simd_available()[-1] == "portable"
