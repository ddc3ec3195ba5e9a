"""Every kernel compiles for every architecture without spills, and fits cards with little shared memory."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
from support.weights import LAYOUTS, LEAST_SHARED, WARPS, item, weights

from tpde.io.temporary import temporary_name

pytest.importorskip("cuda.core", reason="needs cuda-core, of `tpde[cuda]`")
pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings, of `tpde[cuda]`")

from tpde.codec.windows import FLAG_ZERO, sections
from tpde.cuda import (
    decode,
    delta_kernels,
    digest,
    encode,
    expert_ways,
    geometry,
    items,
    many_experts,
    many_rows,
    product_ways,
    window_encode,
    zstd_blob,
)
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.compile import Cubins, Nvrtc
from tpde.errors import CompileError, MissingDependency

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Where a block may have no more than `LEAST_SHARED`.
LEAST_ARCHITECTURES = ("sm_86", "sm_89", "sm_120")
WARPS_OF_F64 = 16  # eight planes take more registers
# Planes that are coded, and those whose tables hold pairs, as the packer chooses them for weights.
KINDS = {
    "BF16": (2, 1, 0b10, 0b10),
    "F16": (2, 1, 0b10, 0),  # and small tensors in BF16
    "F32": (4, 1, 0b1000, 0b1000),
    "BF16 in F32": (4, 1, 0b1100, 0b1000),
    "F64": (8, 1, 0b11000000, 0b10000000),
    "F8": (1, 1, 1, 0),
    "I8": (1, 0, 1, 0),
    "I8 pairs": (1, 0, 1, 1),
    "I16": (2, 0, 0b11, 0),
    "BF16 pruned": (2, 1, 0b11, 0b10),
    "F16 pruned": (2, 1, 0b11, 0),
    "F32 pruned": (4, 1, 0b1111, 0b1000),
    "I8 pruned": (1, 0, 1, 0),
}
# Of those, planes with the shortest codewords.
SHORT = {"BF16 pruned": 0b01, "F16 pruned": 0b01, "F32 pruned": 0b111, "I8 pruned": 1}
# Bytes of a ring's piece: the least that `need` gives for the planes.
PIECES = {"F32": 8, "F64": 8}
NVRTC = Nvrtc()


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        NVRTC.version()
    except MissingDependency as error:
        pytest.skip(f"needs the library of NVRTC: {error}")


def registers(log: str) -> int:
    """The most that a thread of any kernel takes."""
    return max(map(int, re.findall(r"Used (\d+) registers", log)))


def assert_no_spills(log: str, most: int = 0) -> None:
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert found, f"the assembler says nothing of spills: {log!r}"
    assert all(int(bytes_) <= most for pair in found for bytes_ in pair), log


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_compiles_without_spills(kind: str, arch: str) -> None:
    word, rotate, coded, pairs = KINDS[kind]
    ways = [(0, 0), (1, 0)]
    if arch in LEAST_ARCHITECTURES:  # without checksums below, as they are chosen
        ways.append((1, PIECES.get(kind, 16)))
    for check, piece in ways:
        defines = {"WORD": word, "ROTATE": rotate, "CODED": coded, "PAIRS": pairs, "PIECE": piece}
        warps = geometry.max_warps(defines, bool(check))
        defines |= {
            "SHORT": SHORT.get(kind, 0),
            "CHECK": check,
            "WINDOW": 1 if arch == "sm_120" else 8,
            "THREADS": 32 * warps,
        }
        code, log = NVRTC.cubin(decode.SOURCE, defines, arch)
        assert code[:4] == b"\x7fELF"
        assert_no_spills(log)
        assert registers(log) * 32 * warps <= 65536


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_merging_and_deltas_compile_without_spills(word: int, arch: str) -> None:
    kinds = []
    for rotate in (0, 1):
        kinds.append((zstd_blob.SOURCE, {"WORD": word, "ROTATE": rotate}))
        kinds.append(
            (delta_kernels.SOURCE, {"WORD": word, "ROTATE": rotate, "THREADS": delta_kernels.THREADS})
        )
    for source, defines in kinds:
        log = NVRTC.cubin(source, defines, arch)[1]
        assert_no_spills(log)
        assert max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0) <= 48 << 10  # static: no more


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_encoding_compiles_without_spills(kind: str, arch: str) -> None:
    word, rotate, coded, pairs = KINDS[kind]
    defines = {"WORD": word, "ROTATE": rotate, "CODED": coded, "PAIRS": pairs}
    log = NVRTC.cubin(encode.SOURCE, defines, arch)[1]
    assert_no_spills(log, most=32 if coded == 0b1111 else 0)
    assert max(map(int, re.findall(r"(\d+) bytes smem", log))) <= 48 << 10


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_hashing_compiles_without_spills(arch: str) -> None:
    assert_no_spills(NVRTC.cubin(digest.SOURCE, {}, arch)[1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("defines", [{}, {"FLAG": 0}, {"FLAG": 1}], ids=str)
def test_encoding_windows_compiles_without_spills(defines: dict[str, int], arch: str) -> None:
    log = NVRTC.cubin(window_encode.SOURCE, defines, arch)[1]
    assert_no_spills(log)
    assert registers(log) * 256 * 3 <= 65536  # three blocks, of the rarer kernel
    assert max(map(int, re.findall(r"(\d+) bytes smem", log))) <= 48 << 10


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [384, 4096, 14336, 14400])
@pytest.mark.parametrize("zero", [0, FLAG_ZERO])
def test_windows_compile_without_spills(zero: int, columns: int, arch: str) -> None:
    matrix = sections(4096, columns)._replace(flags=zero)
    least = LEAST_SHARED if arch in LEAST_ARCHITECTURES else 227 << 10
    found, groups = {}, arch == "sm_90"
    have = DeviceFacts(arch, (9, 0) if groups else (8, 0), 132, least)
    for count in range(1, product_ways.MOST_ROWS + 1):
        ways = product_ways.ways_of(have, matrix, count)
        assert ways
        for how in ways:
            assert how.shared <= least
            assert how.rows >= min(count, 16)
            found[how.source, tuple(how.defines.items())] = how
    grouped = [it for it in found.values() if it.grouped]
    assert {(it.rows, it.warps) for it in grouped} == (
        {(16, 16), (16, 12), (32, 16), (32, 12), (64, 12), (64, 16)} if groups and columns > 384 else set()
    )
    if groups and columns > 384:
        defines = product_ways.matrix_defines(matrix)
        for count, rows, warps in ((1000, 256, 8), (100, 128, 8), (100, 128, 12)):
            it = many_rows.many_way(have, matrix, count)
            it = it._replace(warps=warps + 4, defines=defines | {"NB": rows, "WIDE": warps})
            found["many", tuple(it.defines.items())] = it
    for how in found.values():
        if how.own or columns < 14336:  # those of others do not depend on how many there are
            log = NVRTC.cubin(how.source, how.defines, arch + "a" * how.own)[1]
            assert_no_spills(log)
            assert registers(log) * 32 * how.warps * how.blocks <= 65536
            if how.warps == 16:  # what these give each other of what they have at first
                assert registers(log) == 128


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [768, 2880])
def test_experts_compile_with_hardly_a_spill(columns: int, arch: str) -> None:
    shared = LEAST_SHARED if arch in LEAST_ARCHITECTURES else (163 if arch == "sm_80" else 227) << 10
    have = DeviceFacts("any", (8, 0), 100, shared)
    rows_of_most = set()
    for how in expert_ways.expert_products(columns, 96, 128, expert_ways.MOST_ROUTED, have):
        log = NVRTC.cubin(expert_ways.SOURCE, how.defines, arch)[1]
        # Of 128 registers, some of those that change once a stripe are spilled; of 255, two.
        assert_no_spills(log, 8 if how.alone else 48)
        assert registers(log) * 32 * how.warps * how.blocks <= 65536
        rows_of_most.add(how.rows)
    assert rows_of_most == ({8} if arch in LEAST_ARCHITECTURES else {8, 16, 32})
    if arch == "sm_90":
        for many in many_experts.WAYS:
            log = NVRTC.cubin(many_experts.SOURCE, many.defines(columns), arch + "a")[1]
            assert_no_spills(log, 48 if many.rows == 256 else 0)  # of 232 registers, a few outside the loop
            assert registers(log) * many.threads <= 65536
        assert_no_spills(NVRTC.cubin(many_experts.LISTED_SOURCE, {}, arch + "a")[1])
    log = NVRTC.cubin(expert_ways.SOURCE, {"TAIL": int(columns % 256 != 0)}, arch)[1]
    assert_no_spills(log)
    taken = dict(
        zip(re.findall(r"function '(\w+)'", log), re.findall(r"Used (\d+) registers", log), strict=True)
    )
    assert int(taken["experts_rows"]) * 256 * 2 <= 65536


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cards_with_little_shared_memory_keep_24_warps(layout: str) -> None:
    """Registers and shared memory of the very kernel that a packed tensor is decoded with."""
    one = item(weights(layout))
    chosen = geometry.geometry(geometry.need([one]), LEAST_SHARED)
    warps = WARPS_OF_F64 if layout == "F64" else WARPS
    assert chosen.warps >= warps
    assert chosen.table_room
    defines = geometry.kernel_defines(items.kind_defines(one.header, one.tables), chosen, check=False)
    assert defines["THREADS"] >= 32 * warps
    for arch in LEAST_ARCHITECTURES:
        log = NVRTC.cubin(decode.SOURCE, defines, arch)[1]
        assert_no_spills(log)
        assert registers(log) * 32 * chosen.warps <= 65536
        static = max(map(int, re.findall(r"(\d+) bytes smem", log)))
        assert chosen.shared + static <= LEAST_SHARED


def test_errors_of_the_compiler_are_shown() -> None:
    with pytest.raises(CompileError, match="WORD"):
        NVRTC.cubin(decode.SOURCE, {}, "sm_90")


class Never(Nvrtc):
    """Compiles nothing."""

    def cubin(self, *_: Any) -> Any:
        pytest.fail("compiled again")


class TestCache:
    """A compiled kernel comes from the disk; any fault there is a miss."""

    DEFINES: ClassVar = {
        "WORD": 1,
        "ROTATE": 0,
        "CODED": 1,
        "PAIRS": 1,
        "SHORT": 0,
        "CHECK": 0,
        "WINDOW": 1,
        "PIECE": 0,
    } | {"THREADS": 256}

    @pytest.fixture(autouse=True)
    def place(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path))
        self.root, self.patch, self.kept = tmp_path, monkeypatch, Cubins(NVRTC)

    def get(self) -> bytes:
        return self.kept.get(decode.SOURCE, self.DEFINES, "sm_90")

    def test_hit_and_faults(self) -> None:
        code = self.get()
        [entry] = (self.root / "kernels").iterdir()
        assert Cubins(Never()).get(decode.SOURCE, self.DEFINES, "sm_90") == code
        for damage in (b"", b"short", entry.read_bytes()[:-1], entry.read_bytes()[:100] + b"x" * 5000):
            entry.write_bytes(damage)
            assert self.get() == code
            assert entry.read_bytes()[32:] == code
        assert [entry] == list((self.root / "kernels").iterdir())

    def test_what_a_killed_process_left_is_removed(self) -> None:
        folder = self.root / "kernels"
        folder.mkdir()
        temporary_name(folder / "entry.cubin").write_bytes(b"half")
        self.get()
        [entry] = folder.iterdir()
        assert entry.suffix == ".cubin"

    def test_another_architecture_is_another_entry(self) -> None:
        self.get()
        self.kept.get(decode.SOURCE, self.DEFINES, "sm_80")
        assert len(list((self.root / "kernels").iterdir())) == 2

    def test_a_place_that_cannot_be_written_costs_one_warning(self) -> None:
        (self.root / "file").touch()
        self.patch.setenv("TPDE_CACHE_DIR", str(self.root / "file"))
        with pytest.warns(RuntimeWarning, match="TPDE_CACHE_DIR") as caught:
            assert self.get() == self.get()
        assert len(caught) == 1
