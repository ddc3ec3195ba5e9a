"""How products from windows are launched: by which kernel, how often, and from where to where."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.backends import MadeBackend, MadeKernel

from tpde.codec.windows import Window, sections
from tpde.cuda import window_products
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import MOST_ROWS, most_rows_of, ways_of
from tpde.cuda.window_experts import DeviceExperts
from tpde.cuda.window_products import DeviceWindow, compile_ahead
from tpde.errors import CompileError, UnsupportedDevice

H200, AMPERE, ADA = 227 << 10, 163 << 10, 99 << 10


def device(shared: int, groups: bool) -> DeviceFacts:
    """One whose blocks have so many bytes, and whose groups of warps can multiply or not."""
    return DeviceFacts("H200", (9, 0) if groups else (8, 9), 132, shared)


@pytest.mark.parametrize("columns", [8, 384, 1792, 2048, 4096, 4160, 8192, 14336, 28672, 1 << 20])
@pytest.mark.parametrize("shared", [H200, AMPERE, ADA])
@pytest.mark.parametrize("groups", [False, True])
def test_every_way_fits(columns: int, shared: int, groups: bool) -> None:
    matrix = sections(4096, columns)
    for count in range(1, MOST_ROWS + 1):
        ways = ways_of(device(shared, groups), matrix, count)
        assert ways
        for how in ways:
            assert how.shared <= shared
            assert how.defines["NB"] >= min(how.rows, count)
            assert how.rows >= min(count, 16)
            assert groups or not how.grouped
            assert how.warps % 4 == 0
            if how.blocks > 1 and not how.defines["SHARED"]:
                assert how.blocks * (how.shared + 1024) <= shared + 1024, "they are there at a time"


@pytest.mark.parametrize(
    ("columns", "count", "name", "rows"),
    [
        (4096, 1, "product", 1),
        (4096, 8, "product", 8),
        (4096, 9, "group_product", 16),
        (4096, 17, "group_product", 32),
        (4096, 33, "group_product", 64),
        (14336, 16, "group_product", 16),
        (6144, 64, "group_product", 64),
        (6400, 64, "wide_product", 64),  # x does not stay in shared memory
        (1 << 20, 33, "wide_product", 64),
        (4096, 65, "wide_product", 128),
        (14336, 128, "wide_product", 128),
        (1024, 64, "product", 16),  # blocks of a cluster would have no part
    ],
)
def test_which_one(columns: int, count: int, name: str, rows: int) -> None:
    how = ways_of(device(H200, True), sections(4096, columns), count)[0]
    assert (how.name, how.rows) == (name, rows)
    assert ways_of(device(H200, False), sections(4096, columns), count)[0].name == "product"


@pytest.mark.parametrize(
    ("rows", "columns", "count", "name"),
    [
        (5120, 4096, 1, "group_product"),  # 320 stripes, 264 blocks at a time
        (5120, 2048, 8, "group_product"),
        (6144, 4096, 4, "product"),  # 384
        (6144, 4096, 5, "group_product"),
        (28672, 4096, 4, "product"),  # 1792: seven full turns, but for 56 blocks in the last
        (28672, 4096, 8, "group_product"),
        (28672, 2048, 8, "product"),  # a chunk for each part
        (8448, 4096, 8, "product"),  # 528: two full turns
        (4096, 4096, 8, "product"),  # one turn
        (1024, 4096, 1, "product"),
    ],
)
def test_groups_take_few_rows_where_blocks_would_idle(rows: int, columns: int, count: int, name: str) -> None:
    ways = ways_of(device(H200, True), sections(rows, columns), count)
    assert ways[0].name == name
    assert {it.name for it in ways} == {"product", "group_product"}


@pytest.mark.parametrize(
    ("columns", "count", "names"),
    [
        (4096, 64, ["group 64", "wide 64", "group 32", "group 32"]),
        (6144, 64, ["group 64", "wide 64", "group 64", "group 32", "group 32"]),
        (14336, 64, ["wide 64", "group 64", "group 32", "group 32", "group 32"]),
        (4096, 128, ["wide 128", "group 64", "wide 64"]),
        (14336, 128, ["wide 128", "wide 64", "group 64"]),
    ],
)
def test_others_follow(columns: int, count: int, names: list[str]) -> None:
    """Those that take half as many rows at a time among them."""
    ways = ways_of(device(H200, True), sections(4096, columns), count)
    assert [f"{it.name.split('_')[0]} {it.rows}" for it in ways if it.grouped] == names
    assert {it.name for it in ways[len(names) :]} == {"product"}


@pytest.mark.parametrize(
    ("columns", "count", "shared", "copies"),
    [
        (4096, 1, H200, [1, 0]),  # 8 KiB of x: copying is first
        (8192, 1, H200, [0, 1]),
        (4096, 8, H200, [0, 1]),
        (4096, 8, ADA, [0]),  # 65 KiB beside 84 KiB
        (2048, 1, ADA, [1, 0]),
        (4096, 64, H200, [0, 1]),  # 16 rows at a time
        (8192, 64, H200, [0]),
        (1 << 20, 1, H200, [0]),
    ],
)
def test_x_is_copied_or_not_where_there_is_room(
    columns: int, count: int, shared: int, copies: list[int]
) -> None:
    ways = ways_of(device(shared, False), sections(4096, columns), count)
    assert [it.defines["SHARED"] for it in ways] == copies
    assert all(it.shared <= shared for it in ways)


@pytest.mark.parametrize("count", [0, -1, MOST_ROWS + 1])
def test_other_numbers_of_rows_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        ways_of(device(ADA, True), sections(32, 64), count)


@pytest.mark.parametrize(("shared", "blocks"), [(H200, 2), (AMPERE, 1), (ADA, 1)])
def test_blocks_of_a_multiprocessor(launch_on: Any, shared: int, blocks: int) -> None:
    """Two are there at a time only where shared memory has room for them: none begins when others end."""
    found, matrix = Launches(launch_on, (8, 0), shared=shared), sections(100_000, 4096)
    there(matrix).product(0, 4096, 8, 0, 100_000, 0, 0)
    there(matrix).rows(1 << 16, 4096, 5)
    assert found.made[0][1] == blocks * 132
    assert found.made[1][1] == (1 if shared == ADA else 2) * 132  # which takes 76 KiB, not 84


class Launches(list[tuple[Any, ...]]):
    """What would have been launched on an H200, and how."""

    def __init__(
        self, launch_on: Any, capability: tuple[int, int], clusters: int = 15, shared: int = H200
    ) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self._clusters = clusters
        launch_on(MadeBackend(self._kernel, DeviceFacts("GPU", capability, 132, shared)))

    def _kernel(self, source: str, name: str, *_: Any, **__: Any) -> MadeKernel:
        return MadeKernel(functools.partial(self._make, name), self._clusters)

    def _make(self, *given: Any, **more: Any) -> Any:
        self.made.append((*given, more))
        return lambda *arguments: self.append((given[0], *map(int, arguments)))


def test_parts_of_a_few_chunks_keep_all_of_x() -> None:
    shapes = [(16, 14336), (16, 28672), (32, 8192), (32, 14336), (64, 6144), (64, 6145)]
    found = [
        [it.defines for it in ways_of(device(H200, True), sections(64, columns), rows) if it.width == rows]
        for rows, columns in shapes
    ]
    assert [next(it["STREAMS"] for it in ways if "STREAMS" in it) for ways in found] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("rows", [64, 128])
def test_parts_of_one_or_two_chunks_keep_x_in_registers(rows: int) -> None:
    found = []
    for columns in (2048, 2049, 4096, 4097, 1 << 20):
        ways = ways_of(device(H200, True), sections(64, columns), rows)
        found += [it.defines["OWN"] for it in ways if it.name == "wide_product" and it.rows == rows]
    assert found == [1, 2, 2, 0, 0]


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("chunks", [8, 9, 16, 17, 24, 25, 56, 112, 1000])
def test_room_for_x_and_for_partial_sums(rows: int, chunks: int) -> None:
    """A warp's stripes in one pass over x wait for room only where another pass makes it."""
    found = ways_of(device(H200, True), sections(64, 256 * chunks), rows)
    ways = [it.defines for it in found if it.name == "group_product"]
    assert ways
    for it in ways:
        most = -(-chunks // 8)
        assert it["STREAMS"] == (it["STAGES"] < most)
        assert it["STAGES"] <= most
        assert it["EACH"] <= it["INBOXES"]


def there(matrix: Window) -> DeviceWindow:
    return DeviceWindow(matrix, 1 << 20, 0)


@pytest.mark.parametrize(("shared", "blocks"), [(H200, 2), (AMPERE, 2), (ADA, 1)])
def test_experts_are_decoded_by_as_many_blocks_as_have_room(launch_on: Any, shared: int, blocks: int) -> None:
    found, matrix = Launches(launch_on, (8, 0), shared=shared), sections(48, 512)
    DeviceExperts([(matrix, 1 << 20), (matrix, 1 << 21)], 2, False, 0).prepare()
    ((_, grid, *_),) = (it for it in found.made if it[0] == "experts_rows")
    assert grid == blocks * 132


def test_a_group_takes_them_all(launch_on: Any) -> None:
    found, matrix = Launches(launch_on, (9, 0)), sections(100, 14336)
    there(matrix).product(4096, 14336, 20, 1 << 16, 128, 77, 5)
    # Behind the stream and the matrix's eight arguments: x, its stride and rows; y, its stride, and the bias.
    assert [(it[0], it[1], *it[-6:]) for it in found] == [
        ("group_product", 5, 4096, 14336, 20, 1 << 16, 128, 77)
    ]
    ((_, grid, threads, shared, more),) = found.made
    assert (grid, threads, more) == (8, 512, {"cluster": 8, "early": True})  # seven stripes: one cluster
    assert shared <= H200


def test_launches_follow_each_other(launch_on: Any) -> None:
    found, matrix = Launches(launch_on, (9, 0)), sections(100, 1024)
    there(matrix).product(4096, 1024, 40, 1 << 16, 128, 77, 5)
    assert [it[-6:] for it in found] == [
        (4096 + 2 * first * 1024, 1024, count, (1 << 16) + 2 * first * 128, 128, 77)
        for first, count in ((0, 16), (16, 16), (32, 8))
    ]


def test_a_part_of_a_device_may_run_no_cluster(launch_on: Any) -> None:
    found, matrix = Launches(launch_on, (9, 0), clusters=0), sections(100, 4096)
    made = there(matrix)
    made.product(4096, 4096, 16, 1 << 16, 128, 77, 5)
    assert [it[0] for it in found] == ["product"]
    with pytest.raises(UnsupportedDevice, match="no room"):
        made.choose(16, made.ways(16)[0])


@pytest.mark.parametrize(
    ("capability", "columns", "most"),
    [((9, 0), 2048, 128), ((9, 0), 1792, 64), ((8, 0), 2048, 64), ((10, 0), 2048, 64)],
)
def test_more_rows_are_decoded(capability: tuple[int, int], columns: int, most: int) -> None:
    assert most_rows_of(DeviceFacts("GPU", capability, 132, H200), sections(64, columns)) == most


@pytest.mark.parametrize("count", [65, 100, 128])
def test_many_rows_take_one_launch(launch_on: Any, count: int) -> None:
    found = Launches(launch_on, (9, 0))
    there(sections(1000, 4096)).product(0, 4096, count, 0, 4096, 0, 0)
    assert [(it[0], it[-4]) for it in found] == [("wide_product", count)]
    ((_, grid, threads, shared, more),) = found.made
    assert (grid, threads, more) == (8 * 15, 512, {"cluster": 8, "early": True})  # 16 times four stripes
    assert shared <= H200


def test_many_rows_where_no_cluster_has_room(launch_on: Any) -> None:
    found = Launches(launch_on, (9, 0), clusters=0)
    there(sections(1000, 4096)).product(0, 4096, 100, 0, 4096, 0, 0)
    assert [(it[0], it[-4]) for it in found] == [("product", 16)] * 6 + [("product", 4)]


def test_without_groups(launch_on: Any) -> None:
    found = Launches(launch_on, (8, 9))
    there(sections(100_000, 4096)).product(0, 4096, 40, 0, 100_000, 0, 0)
    assert [it[0] for it in found] == ["product"] * 3
    assert [it[-4] for it in found] == [16, 16, 8]
    assert found.made == [("product", 132, 256, found.made[0][3], {"early": False})]


def test_matrices_of_one_shape_share_launches(launch_on: Any) -> None:
    found, matrix = Launches(launch_on, (9, 0)), sections(4096, 4096)
    for made in (there(matrix), there(matrix), there(matrix._replace(flags=1))):
        made.prepare()
        made.product(0, 4096, 20, 0, 4096, 0, 0)
    products = [it for it in found.made if "product" in it[0]]
    assert len(products) == 2 * MOST_ROWS
    how = there(matrix).ways(20)[1]
    chosen = there(matrix)
    chosen.choose(20, how)
    assert len([it for it in found.made if "product" in it[0]]) == 2 * MOST_ROWS + 1


def test_kernels_of_a_shape_are_asked_for_at_a_time(launch_on: Any) -> None:
    """By other threads, each once, before this one asks."""
    asked: list[tuple[str, str]] = []
    here, two = threading.current_thread(), threading.Event()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        what = name, repr(sorted(defines.items()))
        if threading.current_thread() is here:
            assert what in asked
        else:
            assert what not in asked
            asked.append(what)
            if len(asked) == 2:
                two.set()
            assert two.wait(20)  # one at a time, it would wait in vain
        return MadeKernel(lambda *_, **__: None, 15)

    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    there(sections(4096, 4096)).prepare()
    assert {name for name, _ in asked} == {"rows", "lookup", "product", "group_product", "wide_product"}


def test_a_kernel_that_is_refused_ends_compiling(launch_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised, not that of the kernel asked for first; what has not begun is left."""
    numbers, four, ended = itertools.count(1), threading.Barrier(4), threading.Event()

    class Pool(ThreadPoolExecutor):
        """Says when it has taken back what it was asked to, before it waits for what has begun."""

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait)

    def kernel(*_: Any, **__: Any) -> MadeKernel:
        number = next(numbers)
        if number <= 4:
            four.wait(20)
        if number == 4:
            raise CompileError("the first")
        assert ended.wait(20)
        raise CompileError("another")

    monkeypatch.setattr(window_products, "ThreadPoolExecutor", Pool)
    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    with pytest.raises(CompileError, match="the first"):
        there(sections(4096, 4096)).prepare()
    assert next(numbers) <= 6, "the thread of the one that failed may have begun another"


def test_kernels_are_compiled_ahead(launch_on: Any) -> None:
    """Without waiting for any: those of encoding and of a shape; `prepare` asks for no other."""
    asked: queue.Queue[tuple[str, str]] = queue.Queue()
    may = threading.Event()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        assert may.wait(20)
        asked.put((name, repr(sorted(defines.items()))))
        return MadeKernel(lambda *_, **__: None, 15)

    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    compile_ahead(4096, 5120, 0)
    assert asked.empty()
    may.set()
    assert asked.get(timeout=20)[0] == "plan"
    matrix = there(sections(4096, 5120))
    products = {matrix.ways(count)[0].label for count in range(1, MOST_ROWS + 1)}
    found = {asked.get(timeout=20) for _ in range(2 + len(products))}
    assert {"rows", "lookup", "product", "group_product", "wide_product"} == {name for name, _ in found}
    matrix.prepare()
    assert {asked.get() for _ in range(asked.qsize())} <= found


def test_what_fails_ahead_is_told_later(launch_on: Any) -> None:
    """It is tried once for all layers of a shape."""
    asked: queue.Queue[tuple[str, int]] = queue.Queue()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        asked.put((name, defines.get("TAIL", 0)))
        raise CompileError("refused")

    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    for columns in (6144, 6144, 6144, 6200):
        compile_ahead(4096, columns, 0)
    encoding = 0
    while (it := asked.get(timeout=20))[1] == 0:  # the last shape's chunks are not all full
        encoding += it[0] == "plan"
    assert encoding == 2
    with pytest.raises(CompileError, match="refused"):
        there(sections(4096, 6144)).prepare()
    launch_on(MadeBackend(facts=UnsupportedDevice("too old")))
    with pytest.raises(UnsupportedDevice, match="too old"):
        compile_ahead(4096, 6144, 0)


def test_stripes_are_decoded_where_they_lie(launch_on: Any) -> None:
    found, matrix = Launches(launch_on, (9, 0)), sections(100, 600, 1000)
    made = there(matrix)
    made.rows(1 << 16, 600, 5, 2, 4)
    made.rows(1 << 16, 601, 5, 6)
    made.lookup(1 << 17, 3, 1 << 18, 5)
    base = 1 << 20
    bodies, offsets = base + matrix.bodies_at, base + matrix.offsets_at
    (_, stream, *some), (_, _, *last), (_, _, *looked) = found
    assert stream == 5
    assert some[:4] == [base + 128 + 32, offsets + 2 * 3 * 4, base + matrix.entries_at, bodies + 2 * 14080]
    assert some[6:] == [32, 600, 1 << 16, 600, 1]
    assert last[0] == base + 128 + 96
    assert last[6:] == [4, 600, 1 << 16, 601, 0]  # the last stripe has four rows
    assert looked[6:] == [100, 600, 1 << 17, 3, 1 << 18]


def test_decoding_again_makes_no_launch(launch_on: Any) -> None:
    found = Launches(launch_on, (9, 0))
    made = there(sections(4096, 4096))
    made.prepare()
    before = len(found.made)
    for out in (1 << 16, 1 << 17):
        made.rows(out, 4096, 5)
    assert [it[0] for it in found] == ["rows", "rows"]
    assert len(found.made) == before
