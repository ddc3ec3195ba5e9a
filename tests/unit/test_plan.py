"""Plans are functions of dtype, shape and sample alone, and worth their bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from support.contents import CONTENTS, fill, spec_of
from support.files import pack_bytes, safetensors_bytes, unpack_bytes

from tpde.codec import core_chunks, native, prefix_codes, reference, selection
from tpde.format.constants import ALIGN_BLOB, CODEC_PREFIX, CODEC_ZSTD, DTYPES, MAX_TABLES
from tpde.format.container import TensorSpec


def _plan(
    dtype: str, content: str, codec: selection.CodecName = "auto", words: int = 60_000
) -> selection.TensorPlan | None:
    spec = spec_of(dtype, words)
    return selection.plan_tensor(spec, np.frombuffer(fill(content, spec), np.uint8), codec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_sample_gives_the_same_plan(dtype: str, simd_restored: None) -> None:
    for content in CONTENTS:
        first = _plan(dtype, content)
        for path in native.simd_available():
            native.simd_select(path)
            assert _plan(dtype, content) == first, (content, path)


def test_random_bits_and_tiny_tensors_stay_plain() -> None:
    for dtype in DTYPES:
        assert _plan(dtype, "random") is None
        spec = spec_of(dtype, 100)
        assert selection.plan_tensor(spec, np.frombuffer(fill("normal", spec), np.uint8)) is None


def test_weights_get_prefix_codes_and_near_constants_shrink() -> None:
    for dtype in ("BF16", "F16", "F32", "F8_E4M3"):
        found = _plan(dtype, "normal")
        assert found is not None
        assert found.header.codec == CODEC_PREFIX
    for dtype in DTYPES:
        assert _plan(dtype, "nearly") is not None
    found = _plan("BF16", "normal", "zstd")
    assert found is not None
    assert found.header.codec == CODEC_ZSTD


def test_pruned_weights_get_all_the_values_that_pay() -> None:
    """A code of fp16's zero alone is better than one of two values, and one of many than both."""
    plan = _plan("F16", "pruned")
    assert plan is not None
    layout = selection.core_layout(plan.header)
    first, count = plan.header.planes[1]
    with_values = prefix_codes.PrefixCodec(layout, plan.section).tables()[first : first + count]
    assert with_values
    for table in with_values:
        assert len({int(it) >> 16 for it in table.entries if not it & 0x100}) > 32


def test_samples_are_whole_chunks_in_order_within_the_tensor() -> None:
    for dtype in DTYPES:
        for words in (0, 1, 8192, 64 * 8192, 64 * 8192 + 1, 1_000_003, 1 << 33):
            spec = spec_of(dtype, words)
            size = selection.PREFIX_CHUNK_WORDS * DTYPES[dtype].word_bytes
            ranges = list(selection.sample_ranges(spec))
            at = 0
            for begin, end in ranges:
                assert at <= begin <= end <= spec.nbytes
                assert begin % size == 0
                at = end
            assert sum(end - begin for begin, end in ranges) == min(
                spec.nbytes, selection.SAMPLE_CHUNKS * size
            )


def test_units_grow_with_the_blob() -> None:
    assert selection.unit_log2(0) == selection.unit_log2(60 << 30) == 4
    for unit in range(4, 12):
        # Headers, index map and padding take up to a 64th more than the tensor's bytes.
        most = (1 << (32 + unit)) * 64 // 65
        assert selection.unit_log2(most - 1) == unit
        assert selection.unit_log2(most + 1) == unit + 1


@pytest.mark.parametrize(
    ("shape", "segment"),
    [
        ((), 1),
        ((0,), 1),
        ((0, 4, 4), 1),
        ((1000, 1000), 1_000_000),
        ((4, 1 << 20), 4 << 20),  # rows as large as slices
        ((8, 1024, 1024), 1 << 20),
        ((8, 16, 16), 8 * 256),
        ((8, 2, 1024, 1024), 2 << 20),
        ((8, 512, 1024), 1 << 19),  # of exactly 1 MiB
        ((8, 1, (1 << 19) - 1), 8 * ((1 << 19) - 1)),
    ],
)
def test_large_slices_of_three_dimensions_are_segments(shape: tuple[int, ...], segment: int) -> None:
    assert selection.segment_words(TensorSpec("BF16", shape)) == segment


def test_slices_that_end_within_a_word_are_no_segments() -> None:
    for last, segment in (((1 << 21) + 2, (1 << 20) + 1), ((1 << 21) + 1, (1 << 21) + 1)):
        assert selection.segment_words(TensorSpec("F4", (2, 1, last))) == segment


@pytest.mark.parametrize("codec", ["prefix", "zstd"])
def test_what_a_header_takes_counts(codec: selection.CodecName) -> None:
    """Of 1200 bytes nearly a half is saved, and 480 are the dimensions of a header."""
    words = np.frombuffer(np.random.default_rng(0).bytes(1200), np.uint16) & 0x1FF  # upper bytes of 0 and 1
    for dims in (0, 60):
        spec = TensorSpec("U16", (600, *[1] * dims))
        assert (selection.plan_tensor(spec, words.view(np.uint8), codec) is None) == bool(dims), dims


def _estimated(
    spec: TensorSpec, size: int, patch: pytest.MonkeyPatch, codec: selection.CodecName = "prefix"
) -> bool:
    """Whether a tensor is packed whose blob is said to take so many bytes."""
    header = selection.base_header(spec, CODEC_PREFIX)
    patch.setattr(prefix_codes, "plan", lambda layout, sample: (b"", size - header.chunks_at))
    return selection.plan_tensor(spec, np.zeros(spec.nbytes, np.uint8), codec) is not None


def test_a_tensor_is_packed_if_that_saves_a_hundredth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what blobs and tensors take in a file, where they begin at multiples of so many bytes."""
    worth = 99 * ALIGN_BLOB
    spec = TensorSpec("BF16", (100 * ALIGN_BLOB // 2,))
    assert _estimated(spec, worth - ALIGN_BLOB + 1, monkeypatch)
    assert _estimated(spec, worth, monkeypatch)
    assert not _estimated(spec, worth + 1, monkeypatch)
    assert not _estimated(TensorSpec("BF16", (spec.shape[0] - 1,)), worth, monkeypatch)


def test_tensors_below_a_kibibyte_stay_plain() -> None:
    for words, packed in ((512, True), (511, False)):
        data = np.arange(words, dtype=np.uint16) // 64 * 256
        for codec in ("prefix", "zstd"):
            assert (
                selection.plan_tensor(TensorSpec("U16", (words,)), data.view(np.uint8), codec) is not None
            ) == packed
    assert selection.plan_tensor(TensorSpec("U16", (4096,)), np.empty(0, np.uint8)) is None


@pytest.mark.parametrize(
    ("dtype", "codec", "shrinks", "tried"),
    [
        ("BF16", "auto", True, "p"),  # weights whose prefix codes are worth it are not given to zstd
        ("BF16", "auto", False, "pz"),
        ("U16", "auto", True, "pz"),
        ("BF16", "prefix", False, "p"),
        ("U16", "prefix", True, "p"),
        ("BF16", "zstd", True, "z"),
        ("U16", "zstd", False, "z"),
    ],
)
def test_which_codecs_are_tried(
    dtype: str, codec: selection.CodecName, shrinks: bool, tried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, spec = [], TensorSpec(dtype, (50 * ALIGN_BLOB,))
    size = 99 * ALIGN_BLOB if shrinks else 99 * ALIGN_BLOB + 1
    header = selection.base_header(spec, CODEC_PREFIX)

    def prefix(layout: native.CoreLayout, sample: np.ndarray) -> tuple[bytes, int]:
        seen.append("p")
        return b"", size - header.chunks_at

    real = core_chunks.split

    def split(layout: native.CoreLayout, sample: np.ndarray) -> np.ndarray:
        seen.append("z")
        return real(layout, sample)

    monkeypatch.setattr(prefix_codes, "plan", prefix)
    monkeypatch.setattr(core_chunks, "split", split)
    noise = np.frombuffer(np.random.default_rng(0).bytes(spec.nbytes), np.uint8)
    made = selection.plan_tensor(spec, noise, codec)
    assert "".join(seen) == tried
    assert (made is not None) == (shrinks and "p" in tried)


def _shifting(words: int, planes: int) -> np.ndarray:
    """Give words of 8 bytes whose upper planes are of 6 bits, which begin elsewhere in every chunk."""
    chunk = np.arange(words) // selection.PREFIX_CHUNK_WORDS
    at = (32 * (chunk[:, None] % 4)).astype(np.uint8)
    draw = np.random.default_rng(planes)
    found = draw.integers(0, 256, (words, 8), np.uint8)
    found[:, 8 - planes :] = at + draw.integers(0, 64, (words, planes), np.uint8)
    return found.reshape(-1)


@pytest.mark.parametrize("planes", [1, 4, 5, 8])
def test_no_tensor_has_more_tables_than_a_reader_takes(planes: int) -> None:
    """Where planes want more, the upper ones have theirs, and the rest are raw."""
    spec = TensorSpec("U64", (40 * selection.PREFIX_CHUNK_WORDS,))
    words = _shifting(spec.shape[0], planes)
    made = selection.plan_tensor(spec, words, "prefix")
    assert made is not None
    wanted = [0] * (8 - planes) + [4] * planes
    assert [count for _, count in made.header.planes] == [0] * 4 + wanted[4:]
    assert made.header.tables == sum(wanted[4:]) <= MAX_TABLES
    source = safetensors_bytes({"x": (spec, words.tobytes())})
    assert unpack_bytes(pack_bytes(source, codec="prefix")) == source


def test_what_zstd_gives_is_that_of_the_whole_tensor() -> None:
    """Of eight times as much as its sample, which it does not shrink."""
    spec = TensorSpec("U8", (8 << 20,))
    sample = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
    assert selection.plan_tensor(spec, sample, "zstd") is None
    halves = np.where(np.arange(sample.size) % 2 == 0, sample, 7).astype(np.uint8)
    made = selection.plan_tensor(spec, halves, "zstd")
    assert made is not None
    assert 0.5 * spec.nbytes < made.estimate < 0.7 * spec.nbytes


# ---- how a plane is coded, from 64 chunks of 512 symbols ----

_SAMPLE = 64 * 512
_CHUNK = np.arange(_SAMPLE) // 512


def _draw(seed: int) -> np.ndarray:
    """Give numbers that no library's generator changes (SplitMix64)."""
    z = (np.arange(_SAMPLE, dtype=np.uint64) + np.uint64(1 + (seed << 32))) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _even(values: int, seed: int = 1) -> np.ndarray:
    return (_draw(seed) % np.uint64(values)).astype(np.int64)


def _falling(seed: int = 2) -> np.ndarray:
    """Give numbers of which each is half as frequent as the one before."""
    z = _draw(seed) | np.uint64(1 << 12)
    return np.log2((z & (~z + np.uint64(1))).astype(np.float64)).astype(np.int64)


def _section(plane: np.ndarray, times: int = 1000) -> bytes:
    """Give the tables of a plane of which these symbols are a sample."""
    words = plane.size * times
    layout = native.CoreLayout(words=words, segment_words=words, chunk_words=512, word_bytes=1, unit_log2=4)
    return prefix_codes.plan(layout, plane.astype(np.uint8))[0]


def _kinds(plane: np.ndarray) -> list[int]:
    section, at, found = _section(plane), 0, []
    while any(section[at:]):
        table, at = reference.Table.parse(section, at)
        found.append(table.kind)
    return found


def test_a_plane_is_coded_if_it_shrinks_by_three_hundredths() -> None:
    assert _kinds(_even(208))
    assert not _kinds(_even(212))


def test_symbols_are_coded_in_pairs_where_that_takes_no_more() -> None:
    """Two look-ups are worth half a percent; above 9 bits a pair has too many values for a table."""
    assert _kinds(_even(16)) == [2]
    assert set(_kinds(_even(22))) == {1}


@pytest.mark.parametrize(
    ("chunks", "two", "four"), [(2, 1, 1), (3, 1, 1), (4, 2, 2), (7, 2, 2), (8, 2, 4), (64, 2, 4)]
)
def test_a_table_has_two_chunks_at_least(chunks: int, two: int, four: int) -> None:
    """Pairs have up to two tables, single symbols four."""
    pairs, single = _falling() + _CHUNK % 2 * 80, _even(40) + 50 * (_CHUNK % 4)
    assert _kinds(pairs[: 512 * chunks]) == [2] * two
    assert _kinds(single[: 512 * chunks]) == [1] * four


def test_more_tables_must_save_half_a_percent_of_pairs_and_a_tenth_of_single_symbols() -> None:
    def mixed(of: int) -> np.ndarray:
        other = (_CHUNK % 2 == 1) & (_even(1000, 6) < of)
        return np.where(other, 20 + _falling() % 3, _falling())

    assert _kinds(mixed(5)) == [2, 2]
    assert _kinds(mixed(4)) == [2]
    assert _kinds(_even(40, 5)) == [1] * 4, "which the chances of the sample are enough for"


def test_the_same_symbols_have_the_same_tables_in_every_release() -> None:
    """Chunks of three kinds with one mean, which take some rounds to be told apart."""
    found = hashlib.sha256()
    for seed in range(6):
        spread = np.array([3, 9, 33, 65])[(_draw(7)[::512] % np.uint64(4)).astype(np.int64).repeat(512)]
        plane = 120 - spread // 2 + (_draw(seed) % spread.astype(np.uint64)).astype(np.int64)
        for times in (1, 1000):
            found.update(_section(plane, times))
        found.update(_section(_falling(seed) * 3 % 40 + 7 * (_CHUNK % 3)))
    assert found.hexdigest()[:12] == "12af0e74a04b"


def test_what_a_table_costs_is_nothing_in_the_largest_tensors() -> None:
    for plane in (_even(40), _falling() + _CHUNK % 2 * 80):
        assert _section(plane, 1 << 24) == _section(plane, 1 << 43) != _section(plane, 1)
