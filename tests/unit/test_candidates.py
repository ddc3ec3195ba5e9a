"""Which placements of units are tried, and how much memory each takes of host and device."""

from __future__ import annotations

import pytest
from support.units import PACKED, PLAIN, STREAMED, counted

from tpde.planning.candidates import STAGING_LEAST, STAGING_STEP, Candidate, candidates, tally
from tpde.planning.layout import MIB
from tpde.planning.units import Placement, Unit

ROWS = Unit("rows", 5 * MIB + 1, 8 * MIB, 23, rows=True)


def test_units_are_counted_as_the_allocator_rounds() -> None:
    found = counted(PLAIN, PACKED, STREAMED, plain="a", packed="b")
    assert (found.plain, found.packed, found.maps) == (1024, 1024, 512)
    assert found.host == STREAMED.packed
    assert found.decoded == (STREAMED, PACKED), "the largest first"
    assert found.loading == 1024 + PLAIN.packed + PLAIN.index


def test_plain_units_are_decoded_beside_those_before() -> None:
    found = counted(PLAIN, PACKED, STREAMED, plain="a b c")
    # The largest comes first; the last has the others beside it.
    assert found.loading == 3 * 1024 + PLAIN.packed + PLAIN.index


def test_host_memory_has_room_for_rows_and_for_staging() -> None:
    large = [Unit(f"layers.{i}", 100 * MIB, 150 * MIB, 0) for i in range(20)]
    found = counted(ROWS, *large, ram=1000 * MIB)
    assert found.least_ram == ROWS.packed + STAGING_LEAST
    assert found.staging == STAGING_LEAST
    # 1000 MiB less 5 of rows and 256 to read to: seven units of 100.
    assert len(large) - len(found.on_disk) == 7
    assert found.host == ROWS.packed + 700 * MIB
    small = counted(ROWS, *large[:1])
    assert small.least_ram == ROWS.packed + 100 * MIB
    assert (small.staging, small.on_disk) == (0, frozenset())


def test_staging_is_a_share_in_whole_pieces() -> None:
    large = [Unit(f"layers.{i}", 1000 * MIB, 1500 * MIB, 0) for i in range(20)]
    assert counted(*large, ram=4100 * MIB).staging == 4100 * MIB // 8 // STAGING_STEP * STAGING_STEP
    assert counted(*large, ram=19_000 * MIB).staging == 1024 * MIB


def test_host_memory_of_just_the_size_needs_no_disk() -> None:
    large = [Unit(f"layers.{i}", 100 * MIB, 150 * MIB, 0) for i in range(20)]
    whole = ROWS.packed + 2000 * MIB
    assert counted(ROWS, *large, ram=whole).staging == 0
    less = counted(ROWS, *large, ram=whole - 1)
    assert less.staging == STAGING_LEAST
    assert less.on_disk
    assert {less.placement(it) for it in large} == {Placement.HOST, Placement.DISK}
    assert less.placement(ROWS) is Placement.HOST
    assert counted(ROWS, packed="rows").placement(ROWS) is Placement.PACKED


# ---- which are tried ----


def sized(*packed: int) -> list[Unit]:
    return [Unit(str(i), size, size, 0) for i, size in enumerate(packed)]


@pytest.mark.parametrize(
    ("packed", "room", "kept"),
    [
        ((10, 10, 10, 10), 20, "13"),
        ((30, 10, 10), 20, "12"),
        ((10, 30, 10), 20, "02"),
        ((10, 30, 10), 19, "2"),
        ((10, 10), 20, "01"),
        ((10, 10), 9, ""),
    ],
)
def test_what_fits_is_spread_and_leaves_no_room_for_more(
    packed: tuple[int, ...], room: int, kept: str
) -> None:
    """Of host memory, beside what is read to."""
    units = sized(*(100 * MIB * it for it in packed))
    found = tally(Candidate(frozenset(), frozenset()), units, 100 * MIB * room + STAGING_LEAST)
    assert found.staging in (0, STAGING_LEAST)
    assert {it.name for it in units} - found.on_disk == {*kept}


def together(names: frozenset[str]) -> str:
    return "".join(sorted(names))


def subsets(units: list[Unit]) -> list[str]:
    """Which units are tried packed, with all others streamed."""
    *found, every = (together(it.packed) for it in candidates(units) if not it.plain)
    assert every == together(frozenset(it.name for it in units)), "before some of all are plain"
    return found


@pytest.mark.parametrize(("units", "step"), [(0, 1), (3, 1), (128, 1), (256, 2)])
def test_how_many_units_are_tried(units: int, step: int) -> None:
    made = [Unit(chr(1000 + i), 10, 10, 0) for i in range(units)]
    assert [len(it) for it in subsets(made)] == [*range(0, units + 1, step)]


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((10, 5, 5, 1), ["0", "012"]),
        ((4, 3, 2, 1, 1), ["0", "01", "012"]),
        ((5, 4, 3, 2, 1), ["0", "01", "012"]),
        ((1, 2, 3), ["2", "12"]),
        ((5,), []),
        ((5, 5), []),
    ],
)
def test_units_larger_than_all_others(sizes: tuple[int, ...], found: list[str]) -> None:
    """Plain, whatever the others are."""
    plain = [it.plain for it in candidates(sized(*sizes)) if len(it.plain) + len(it.packed) < len(sizes)]
    assert [*dict.fromkeys(map(together, plain))] == ["", *found]


def test_subsets_of_units_of_one_size_and_of_few_others() -> None:
    few = subsets(sized(10, 10, 10, 5))
    assert few == ["", "2", "12", "012", "3", "23", "123", "0123"]
    assert subsets([]) == [""]
    # The group with most bytes is the main one, and of three others all subsets are tried.
    three = subsets(sized(11, 6, 6, 1, 2))
    assert len(three) == 3 * 8
    assert {"", "2", "12"} < {*three}
    assert "1" not in three
    assert "1" in subsets(sized(50, 1, 1)), "the two are the others, though there are more of them"
    # Of more, only evenly spread ones.
    more = subsets(sized(50, 1, 2, 3, 4))
    assert more == [a + b for b in ("", "4", "24", "234", "1234") for a in ("", "0")]


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (Unit("z", 9, 10, 0), "/ /z /xz /wxz /rwxz /rswxz z/rswx xz/rsw wxz/rs"),
        (
            Unit("z", 9, 20, 0, resident=True),
            "/z /xz /wxz z/ z/x z/wx /rwxz /rswxz x/rswz wx/rsz z/rswx xz/rsw wxz/rs",
        ),
    ],
    ids=["like the others", "larger, and resident"],
)
def test_which_units_may_be_where(odd: Unit, found: str) -> None:
    """What is plain, and what is packed: nothing is plain before all else is packed, but what is larger."""
    rows = [Unit(name, 9, 10, 0, rows=True) for name in "rs"]
    units = [*rows, Unit("w", 9, 10, 0), Unit("x", 9, 10, 0), odd]
    assert [f"{together(it.plain)}/{together(it.packed)}" for it in candidates(units)] == found.split()
