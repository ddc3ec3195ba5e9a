"""Where tensors lie in a packed file: whole blocks of large models start at pages."""

from __future__ import annotations

import os

import pytest
from support.contents import fill
from support.files import pack_bytes, safetensors_bytes, unpack_bytes, verify_bytes

from tpde.errors import TpdeError
from tpde.files import file_writer, packed_header
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile
from tpde.files.thread_count import default_threads
from tpde.format.blob_header import align
from tpde.format.constants import ALIGN_BLOB, ALIGN_LARGE, LARGE_BYTES
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

LARGE = TensorSpec("BF16", (2, LARGE_BYTES // 2))
SMALL = TensorSpec("BF16", (2048,))


def test_blocks_that_are_large_end_at_pages() -> None:
    # Blocks of several sizes: one may end at a page by itself.
    tensors = {f"layers.{i}.{name}": LARGE for i in range(3) for name in ("up.weight", "down.weight")}
    tensors |= {f"layers.{i}.small{k}.weight": SMALL for i in range(3) for k in range(i)}
    tensors["head.weight"] = SMALL
    source = safetensors_bytes({name: (spec, fill("normal", spec)) for name, spec in tensors.items()})
    packed = pack_bytes(source)
    with PackedFile(packed) as file:
        start = file.container.data_start
        places = {name: (start + it.begin, start + it.end) for name, it in file.container.entries.items()}
        padding = {
            name: file.tensor(name).stored_bytes - align(file.tensor(name).blob.header.blob_bytes, ALIGN_BLOB)
            for name in file.packed_names()
        }
    assert unpack_bytes(packed) == source
    for i in range(3):
        block = [place for name, place in places.items() if name.startswith(f"layers.{i}.")]
        assert min(block)[0] % ALIGN_LARGE == 0
        assert max(block)[1] % ALIGN_LARGE == 0
        # Within a block, blobs follow each other as closely as they may.
        for (_, end), (begin, _) in zip(sorted(block), sorted(block)[1:], strict=False):
            assert begin == end
            assert begin % ALIGN_BLOB == 0
    assert all(0 <= size < ALIGN_LARGE for size in padding.values())
    assert any(padding.values())


def test_small_blocks_are_not_padded() -> None:
    tensors = {f"layers.{i}.weight": (SMALL, fill("normal", SMALL)) for i in range(9)}
    packed = pack_bytes(safetensors_bytes(tensors))
    with PackedFile(packed) as file:
        sizes = [it.end - it.begin for it in file.container.entries.values()]
    assert max(sizes) < 4096


# ---- with a bound that is smaller than that of the format

BOUND = 4 * ALIGN_LARGE


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let what is large begin at 16 KiB."""
    for module in (packed_header, file_writer):
        monkeypatch.setattr(module, "LARGE_BYTES", BOUND)
    return BOUND


def _random(nbytes: int) -> tuple[TensorSpec, bytes]:
    """Give a tensor that stays plain."""
    spec = TensorSpec("U8", (nbytes,))
    return spec, fill("random", spec)


def _constant(nbytes: int = 2048) -> tuple[TensorSpec, bytes]:
    """Give a tensor that takes 256 bytes, packed."""
    spec = TensorSpec("U8", (nbytes,))
    return spec, fill("zeros", spec)


def _places(packed: bytes) -> dict[str, tuple[int, int]]:
    with PackedFile(packed) as file:
        start = file.container.data_start
        return {name: (start + it.begin, start + it.end) for name, it in file.container.entries.items()}


@pytest.mark.parametrize("more", [-ALIGN_BLOB, 0, ALIGN_BLOB])
def test_a_block_is_large_from_the_bound_on(more: int, bound: int) -> None:
    """It starts behind 512 bytes here, so that none of them ends at a page by itself."""
    tensors = {
        "embed.weight": _random(2 * ALIGN_BLOB),
        "layers.0.a": _random(bound - ALIGN_BLOB + more),
        "layers.0.b": _constant(),
        "layers.1.a": _constant(),
    }
    source = safetensors_bytes(tensors)
    packed = pack_bytes(source)
    places = _places(packed)
    assert places["embed.weight"][0] % ALIGN_LARGE == 0
    end = places["layers.0.b_tpde"][1]
    assert end - places["layers.0.a"][0] >= bound + more
    assert (end % ALIGN_LARGE == 0) is (more >= 0)
    assert places["layers.1.a_tpde"][0] == end
    assert unpack_bytes(packed) == source
    assert verify_bytes(packed) == []


@pytest.mark.parametrize(
    ("total", "unit"),
    [
        (4 * ALIGN_BLOB - 1, 8),
        (4 * ALIGN_BLOB, ALIGN_BLOB),
        (BOUND - 1, ALIGN_BLOB),
        (BOUND, ALIGN_LARGE),
        (BOUND + 1, ALIGN_LARGE),
    ],
)
def test_where_the_data_starts(total: int, unit: int, bound: int) -> None:
    units = [8, ALIGN_BLOB, ALIGN_LARGE]
    starts = set()
    for metadata in ({}, {"x": "y" * 9}, {"x": "y" * 300}, {"x": "y" * 700}):
        packed = pack_bytes(safetensors_bytes({"x": _random(total)}, metadata))
        with PackedFile(packed) as file:
            starts.add(file.container.data_start)
    assert {start % unit for start in starts} == {0}
    for larger in units[units.index(unit) + 1 :]:
        assert {start % larger for start in starts} != {0}


def test_a_packed_tensor_ends_its_block_and_what_is_small_comes_last(bound: int) -> None:
    """Plain tensors of whole units are in their block; it is the last packed one that takes the padding."""
    tensors = {
        "embed.weight": _random(ALIGN_BLOB),
        "layers.0.a": _constant(),
        "layers.0.b": _random(bound),
        "layers.0.c": _constant(),
        "layers.0.d": _random(ALIGN_BLOB),
        "layers.0.e": _random(ALIGN_BLOB + 1),
        "layers.0.f": _random(100),
        "layers.1.a": _random(2 * ALIGN_BLOB),
        "head.weight": _random(3),
    }
    source = safetensors_bytes(tensors)
    packed = pack_bytes(source)
    places = _places(packed)
    assert list(places) == [
        "embed.weight", "layers.0.a_tpde", "layers.0.b", "layers.0.d", "layers.0.c_tpde", "layers.1.a",
        "layers.0.e", "layers.0.f", "head.weight",
    ]  # fmt: skip
    assert places["layers.1.a"][0] % ALIGN_LARGE == 0
    assert places["layers.0.a_tpde"][0] % ALIGN_LARGE == ALIGN_BLOB
    assert unpack_bytes(packed) == source
    assert verify_bytes(packed) == []


def test_a_block_whose_last_tensor_is_plain_is_not_aligned(bound: int) -> None:
    tensors = {"x.0.a": _constant(), "x.0.b": _random(bound), "x.1.a": _random(ALIGN_BLOB)}
    sink = BytesSink()
    with FileWriter(sink, {name: spec for name, (spec, _) in tensors.items()}, threads=1) as made:
        for name, (_, data) in tensors.items():
            made.write(name, data)
            if name == "x.0.b":
                made.align_block("x.0.a", "x.0.b")
                made.align_block("x.1.a", "x.0.a")  # whose first one is not written yet
    places = _places(bytes(sink.data))
    assert places["x.1.a"][0] == places["x.0.b"][1]
    assert places["x.1.a"][0] % ALIGN_LARGE == ALIGN_BLOB


@pytest.mark.parametrize("block", ["", "x.0."])
def test_blobs_start_at_whole_units_in_the_one_block_of_a_file_too(block: str) -> None:
    tensors = {f"{block}b": _random(1025), f"{block}c": _constant(), f"{block}d": _random(3)}
    tensors |= {f"{block}a": _constant(), f"{block}e": _random(ALIGN_BLOB)}
    source = safetensors_bytes(tensors)
    packed = pack_bytes(source)
    places = _places(packed)
    assert [name.removeprefix(block) for name in places] == ["a_tpde", "e", "c_tpde", "b", "d"]
    assert [places[f"{block}{name}"][0] % ALIGN_BLOB for name in ("a_tpde", "e", "c_tpde")] == [0, 0, 0]
    assert unpack_bytes(packed) == source


@pytest.mark.parametrize("planned", [False, True])
def test_what_is_smaller_than_a_kibibyte_stays_plain(planned: bool) -> None:
    tensors = {"x.0.a": _constant(1024), "x.1.b": _constant(1023)}
    sink = BytesSink()
    with FileWriter(sink, {name: spec for name, (spec, _) in tensors.items()}, threads=1) as made:
        for name, (_, data) in tensors.items():
            if planned:
                assert made.plan(name, data) is (name == "x.0.a")
            made.write(name, data)
        assert made.packed_names() == {"x.0.a"}
    assert list(_places(bytes(sink.data))) == ["x.0.a_tpde", "x.1.b"]
    assert list(_places(pack_bytes(safetensors_bytes(tensors)))) == ["x.0.a_tpde", "x.1.b"]


def test_a_header_may_have_as_many_bytes_as_readers_take() -> None:
    largest = 100_000_000

    def refused(names: list[str]) -> int:
        with pytest.raises(TpdeError, match=r"50 tensors need a header of \d+ bytes") as told:
            FileWriter(BytesSink(), dict.fromkeys(names, TensorSpec("U8", (1,))))
        assert told.value.needed == largest
        assert isinstance(told.value.found, int)
        return told.value.found

    names = [f"{i}".ljust(2_000_000, "x") for i in range(50)]
    names[0] = names[0][: largest - refused(names)]  # of ASCII, so that each letter is a byte
    FileWriter(BytesSink(), dict.fromkeys(names, TensorSpec("U8", (1,)))).abort()
    assert refused([names[0] + "x", *names[1:]]) == largest + 8


def test_processors_are_counted_where_a_process_cannot_say_which_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8})
        assert default_threads() == 3
        monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert default_threads() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads() == 1
