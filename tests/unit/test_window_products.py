"""How products from windows are launched: by which kernel, how often, and from where to where."""

from __future__ import annotations

from typing import Any

import pytest
from support.window_products import ADA, AMPERE, H200, Launches, there

from tpde.codec.windows import sections
from tpde.cuda.product_ways import MOST_ROWS
from tpde.cuda.window_experts import DeviceExperts
from tpde.errors import UnsupportedDevice


@pytest.mark.parametrize(("shared", "blocks"), [(H200, 2), (AMPERE, 1), (ADA, 1)])
def test_blocks_of_a_multiprocessor(launch_on: Any, shared: int, blocks: int) -> None:
    """Two are there at a time only where shared memory has room for them: none begins when others end."""
    found, matrix = Launches(launch_on, (8, 0), shared=shared), sections(100_000, 4096)
    there(matrix).product(0, 4096, 8, 0, 100_000, 0, 0)
    there(matrix).rows(1 << 16, 4096, 5)
    assert found.made[0][1] == blocks * 132
    assert found.made[1][1] == (1 if shared == ADA else 2) * 132  # which takes 76 KiB, not 84


@pytest.mark.parametrize(("shared", "blocks"), [(H200, 2), (AMPERE, 2), (ADA, 1)])
def test_experts_are_decoded_by_as_many_blocks_as_have_room(launch_on: Any, shared: int, blocks: int) -> None:
    found, matrix = Launches(launch_on, (8, 0), shared=shared), sections(48, 512)
    DeviceExperts([(matrix, 1 << 20), (matrix, 1 << 21)], 2, False, 0).decode(128, 5)
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
    assert (grid, threads, more) == (16, 512, {"cluster": 8, "early": True})  # seven stripes, four a group
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


@pytest.mark.parametrize("count", [33, 50, 64])
def test_many_rows_take_one_launch(launch_on: Any, count: int) -> None:
    found = Launches(launch_on, (9, 0))
    made = there(sections(1000, 4096))
    assert made.room(count) == 4096 * 2 * 64
    for room in (0, 4104):
        with pytest.raises(ValueError, match="524288 bytes of room at a multiple of 16, not at"):
            made.product(0, 4096, count, 0, 4096, 0, 0, room)
    made.product(32, 4096, count, 48, 1000, 77, 5, 4112)
    # Behind the stream, and of the product the matrix's eight arguments.
    assert [(it[0], it[1], *it[-5:]) for it in found] == [
        ("arrange", 5, 32, 4096, count, 4096, 4112),
        ("wide_product", 5, 4112, count, 48, 1000, 77),
    ]
    (_, grid, threads, shared, more), arrange = sorted(found.made, key=lambda it: -it[3])
    assert (grid, threads, more) == (8 * 15, 512, {"cluster": 8, "early": True})  # 16 times four stripes
    assert shared <= H200
    assert arrange == ("arrange", 128, 256, 0, {"early": True})  # 16 bytes a thread


def test_many_rows_where_no_cluster_has_room(launch_on: Any) -> None:
    found = Launches(launch_on, (9, 0), clusters=0)
    there(sections(1000, 4096)).product(0, 4096, 52, 0, 4096, 0, 0)
    assert [(it[0], it[-4]) for it in found] == [("product", 16)] * 3 + [("product", 4)]


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
    # One for each number of rows of x; of each kernel for more one for each of three matrices.
    assert len(products) == 2 * MOST_ROWS + 2 * 3
    how = there(matrix).ways(20)[1]
    chosen = there(matrix)
    chosen.choose(20, how)
    assert len([it for it in found.made if "product" in it[0]]) == 2 * MOST_ROWS + 2 * 3 + 1


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
