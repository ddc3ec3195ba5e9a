"""Each term of a budget, in numbers that were worked out by hand, and what is told of too small ones."""

from __future__ import annotations

import dataclasses

import pytest
from support.units import BLOCKS, NEEDS, PACKED, PLAIN, RATES, STREAMED, counted, layout

from tpde.errors import OutOfMemory
from tpde.planning import shortages
from tpde.planning.budget import Budget
from tpde.planning.layout import MIB, page_tables, parts_of, workspaces
from tpde.planning.planner import make_plan
from tpde.planning.units import Footprint, Placement, Unit


@pytest.mark.parametrize(
    ("sizes", "tiled", "found"),
    [
        (((1002, 16), (416, 0)), 0, [1002]),
        (((1002, 16), (416, 0)), 1, [416, 512]),
        (((1002, 16), (416, 0)), 2, []),
        (((1002, 16), (416, 16)), 2, [16, 64, 128, 256]),
        (((512, 16),), 1, [16, 64, 128, 256]),
        (((512, 100),), 1, [100, 128, 256]),
        (((512, 16), (512, 16)), 1, []),
        (((2000, 600), (100, 0)), 1, [600, 1024]),
    ],
)
def test_sizes_of_a_workspace(sizes: tuple[tuple[int, int], ...], tiled: int, found: list[int]) -> None:
    """Of one that holds all units but those that are tiled, and a row of these at least."""
    units = [Unit(str(i), 1, size * MIB, 0, tile=tile * MIB) for i, (size, tile) in enumerate(sizes)]
    assert [it // MIB for it in workspaces(units, tiled)] == found


def test_every_part_of_a_budget() -> None:
    big = dataclasses.replace(STREAMED, plain=64 * MIB, tile=16 * MIB, row=8192)
    found = counted(PLAIN, PACKED, big, plain="a", packed="b")._replace(host=3 << 30, staging=1 << 30)
    parts = parts_of(layout(found, tiled=1), NEEDS, retained=19 * MIB)
    assert parts == {
        "plain": 3 * MIB,
        "cache": 5 * MIB,
        "activations": 7 * MIB,
        "fixed": 11 * MIB,
        "workspace": 17 * MIB,
        "strips": 0,
        "tiles": 17 * MIB // 8192 * 4096,
        "ring": 128 * MIB,
        "kept": 19 * MIB,
        "experts": 13 * MIB,
        "pages": 8 * MIB + 4 * MIB,
        "index": 512,
        "packed": 1024,
        "windows": 0,
        "decoded": 1024,
    }
    assert parts_of(layout(found, slots=0), NEEDS)["experts"] == 0, "experts come with their blocks then"
    assert parts_of(layout(found), NEEDS)["tiles"] == 0, "nothing is tiled"


def test_page_tables_are_whole_pages() -> None:
    assert [page_tables(it) for it in (0, 1, 1 << 30, (1 << 30) + 1)] == [0, 2 * MIB, 2 * MIB, 4 * MIB]


def test_loading_may_need_more_than_running() -> None:
    big = Unit("big", 280 * MIB, 416 * MIB, MIB)
    found = counted(big, STREAMED, plain="big")
    running = sum(parts_of(layout(found, 0, workspace=0), NEEDS).values())
    loading = (3 + 11) * MIB + 6 * MIB + 512 + big.plain + big.packed + big.index
    assert loading > running
    assert layout(found, 0, workspace=0).used(NEEDS) == loading
    slots = layout(found, 10)
    assert slots.used(NEEDS) == sum(parts_of(slots, NEEDS).values()) > loading


# ---- too little memory ----


@pytest.mark.parametrize(("cache", "activations"), [(0, 0), (MIB, 0), (0, MIB)])
@pytest.mark.parametrize("resident", [False, True])
def test_what_is_too_little_says_what_would_be_less(cache: int, activations: int, resident: bool) -> None:
    footprint = Footprint(plain=0, cache=cache, activations=activations, fixed=MIB, argument="`batches`")
    odd = Unit("odd", 5 * MIB + 1, 8 * MIB, 0, resident=resident)
    with pytest.raises(OutOfMemory) as caught:
        make_plan([odd, *BLOCKS], footprint, 1000, None, RATES, calls=10)
    error = caught.value
    text = str(error)
    assert (" or more, or a smaller `batches`" in text) is bool(cache or activations)
    assert ("; 6 MiB are packed otherwise" in text) is resident
    assert "`vram` is 1000 bytes, the least that works is " in text
    assert "1 MiB of kernels and libraries" in text
    assert "plain weights" not in text, "there are none"
    assert (error.where, error.found, error.needed) == ("vram", 1000, error.least)


def test_too_little_host_memory_is_named() -> None:
    error = shortages.too_little_ram(3 * MIB + 1, 2 * MIB - 1)
    assert "`ram` is 1 MiB, the least that works is 4 MiB" in str(error)
    assert "use `4MiB` or more" in str(error)
    assert (error.where, error.found, error.needed, error.least) == (
        "ram",
        2 * MIB - 1,
        3 * MIB + 1,
        3 * MIB + 1,
    )
    assert error.budget == "ram"
    for ram, said in ((MIB - 1, "1048575 bytes"), (MIB, "1 MiB"), (2 * MIB - 1, "1 MiB")):
        assert f"`ram` is {said}, " in str(shortages.too_little_ram(3 * MIB, ram))


@pytest.mark.parametrize(
    ("it", "field"), [(PLAIN, "packed"), (NEEDS, "plain"), (RATES, "copy"), (Budget(1), "vram")]
)
def test_what_is_planned_with_does_not_change(it: object, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(it, field, 1)


def test_a_budget_is_exact_to_the_byte() -> None:
    """The least that works is what its parts add up to, and a byte less does not."""
    with pytest.raises(OutOfMemory) as caught:
        make_plan(BLOCKS, NEEDS, 1, None, RATES, calls=10)
    least = caught.value.least
    assert least is not None
    pages = page_tables(sum(it.packed for it in BLOCKS)) + page_tables(NEEDS.elsewhere)
    rings = 4 * 4 * MIB
    assert least == NEEDS.total + NEEDS.experts + 150 * MIB + rings + pages + 12 * MIB
    made = make_plan(BLOCKS, NEEDS, least, None, RATES, calls=10)
    assert made.used == least
    assert set(made.placements.values()) == {Placement.HOST}
    with pytest.raises(OutOfMemory):
        make_plan(BLOCKS, NEEDS, least - 1, None, RATES, calls=10)
