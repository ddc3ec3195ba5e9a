"""Which kernels multiply by windows, with how many rows at a time, and that each has room."""

from __future__ import annotations

import pytest
from support.window_products import ADA, AMPERE, H200

from tpde.codec.windows import sections
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import MOST_ROWS, multiplies_in_groups, ways_of


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
        (4096, 33, "wide_product", 64),
        (14336, 16, "group_product", 16),
        (6144, 64, "wide_product", 64),
        (1 << 20, 33, "wide_product", 64),
        (1024, 64, "product", 16),  # blocks of a cluster would have no part
    ],
)
def test_which_one(columns: int, count: int, name: str, rows: int) -> None:
    how = ways_of(device(H200, True), sections(4096, columns), count)[0]
    assert (how.name, how.rows) == (name, rows)
    assert ways_of(device(H200, False), sections(4096, columns), count)[0].name == "product"


@pytest.mark.parametrize(
    ("rows", "columns", "count", "cluster"),
    [
        (28672, 4096, 64, 4),  # many turns of two chunks a part
        (6144, 4096, 64, 8),  # few turns
        (28672, 4352, 64, 4),  # three chunks a part
        (28672, 6400, 64, 8),
    ],
)
def test_four_blocks_have_two_parts_each_where_sums_take_long(
    rows: int, columns: int, count: int, cluster: int
) -> None:
    ways = ways_of(device(H200, True), sections(rows, columns), count)
    assert [it.cluster for it in ways if it.name == "wide_product"][:2] == [cluster, 12 - cluster]


@pytest.mark.parametrize(
    ("rows", "columns", "count", "name"),
    [
        (5120, 4096, 1, "group_product"),  # 320 stripes, 264 blocks at a time
        (5120, 2048, 8, "group_product"),
        (6144, 4096, 1, "product"),  # 384
        (6144, 4096, 2, "group_product"),
        (10240, 4096, 4, "product"),  # 640
        (10240, 4096, 5, "group_product"),
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
    ("rows", "columns", "count", "warps"),
    [
        (3072, 2048, 32, 8),  # 192 stripes
        (4080, 2048, 17, 8),  # 255
        (4096, 2048, 32, 12),
        (3072, 2048, 16, 12),
        (2048, 2056, 32, 12),  # the first part has two chunks
    ],
)
def test_fewer_warps_take_few_stripes(rows: int, columns: int, count: int, warps: int) -> None:
    ways = ways_of(device(H200, True), sections(rows, columns), count)
    assert [it.warps - 4 for it in ways if it.rows == -(-count // 16) * 16][:2] == [warps, 20 - warps]


@pytest.mark.parametrize(
    ("columns", "count", "names"),
    [
        (4096, 64, ["wide 64", "wide 64", "group 64", "group 32", "group 32"]),
        (6144, 64, ["wide 64", "wide 64", "group 64", "group 64", "group 32", "group 32"]),
        (14336, 64, ["wide 64", "wide 64", "group 64", "group 32", "group 32", "group 32"]),
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
    with pytest.raises(ValueError, match="1 to 64"):
        ways_of(device(ADA, True), sections(32, 64), count)


def test_parts_of_a_few_chunks_keep_all_of_x() -> None:
    shapes = [(16, 14336), (16, 28672), (32, 8192), (32, 14336), (64, 6144), (64, 6145)]
    found = [
        [it.defines for it in ways_of(device(H200, True), sections(64, columns), rows) if it.width == rows]
        for rows, columns in shapes
    ]
    assert [next(it["STREAMS"] for it in ways if "STREAMS" in it) for ways in found] == [0, 1, 0, 1, 0, 1]


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


@pytest.mark.parametrize(
    ("capability", "columns", "groups"),
    [((9, 0), 2048, True), ((9, 0), 1792, False), ((8, 0), 2048, False), ((10, 0), 2048, False)],
)
def test_where_groups_multiply(capability: tuple[int, int], columns: int, groups: bool) -> None:
    have, matrix = DeviceFacts("GPU", capability, 132, H200), sections(64, columns)
    assert multiplies_in_groups(have, matrix) == groups
    assert {it.name for it in ways_of(have, matrix, 64)} == (
        {"product", "group_product", "wide_product"} if groups else {"product"}
    )
