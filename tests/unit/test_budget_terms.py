"""Each term of a budget and of a prediction, in numbers that were worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tpde.errors import OutOfMemory
from tpde.planning import shortages, token_work
from tpde.planning.budget import Budget
from tpde.planning.candidates import STAGING_LEAST, STAGING_STEP, Candidate, Tally, candidates, tally
from tpde.planning.layout import MIB, Layout, page_tables, parts_of, workspaces
from tpde.planning.planner import make_plan
from tpde.planning.prediction import Work, predict
from tpde.planning.units import Footprint, Placement, Rates, Unit

NOTHING = Work(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
RATES = Rates(copy=50e9, disk=5e9, memory=4e12, decode=2e12, launch=40e-6, windows=5e12)
ENDS = 1.5e-3


def seconds(**fields: int) -> dict[str, float]:
    return predict(NOTHING._replace(**fields), RATES)


def test_a_token_ends_on_the_device_and_on_the_host() -> None:
    assert seconds() == {"copy": 0.0, "disk": 0.0, "memory": ENDS, "host": ENDS}


def test_the_host_calls_modules_units_and_pieces() -> None:
    assert seconds(calls=100)["host"] == pytest.approx(ENDS + 100 * 40e-6)
    assert seconds(units=10)["host"] == pytest.approx(ENDS + 17 * 40e-6)
    assert seconds(pieces=10)["host"] == pytest.approx(ENDS + 10 * 40e-6)


def test_the_device_reads_and_decodes() -> None:
    assert seconds(read=4 * 10**9)["memory"] == pytest.approx(ENDS + 1e-3)
    # Resident weights: their bytes, and what each launch takes.
    assert seconds(decoded=2 * 10**9, launches=5)["memory"] == pytest.approx(ENDS + 1e-3 + 5 * 20e-6)
    # Those that pass through the ring, a launch for each piece: counted once.
    passing = seconds(decoded=2 * 10**9, passing=2 * 10**9, launches=7, pieces=7)
    assert passing["memory"] == pytest.approx(ENDS + 1e-3 + 7 * 20e-6)
    mixed = seconds(decoded=6 * 10**9, passing=2 * 10**9, launches=10, pieces=7)
    assert mixed["memory"] == pytest.approx(ENDS + 3e-3 + 10 * 20e-6)


def test_a_disk_is_read_at_its_rate() -> None:
    assert seconds(disk=10 * 10**9)["disk"] == pytest.approx(2.0)


def test_copies_take_their_bytes_and_each_its_start() -> None:
    """With a ring in which 20 ms of copies fit, nothing is late and nothing stalls."""
    ring = 10**9
    assert seconds(copied=49 * 10**9, ring=ring)["copy"] == pytest.approx(1.0)
    assert seconds(copied=49 * 10**9, pieces=1000, ring=ring)["copy"] == pytest.approx(1.0 + 1000 * 4e-6)


def test_a_small_ring_runs_dry() -> None:
    """Of 0.2 ms of copies: at some point of each unit the host is 1 ms late, and a token's end takes 1.5."""
    ring, ahead = 10**7, 0.2e-3
    late = 3 * (1e-3 - ahead) + (ENDS - ahead)
    assert seconds(copied=49 * 10**9, streamed=3, ring=ring)["copy"] == pytest.approx(1.0 + late)


def test_copies_stall_while_other_things_are_computed() -> None:
    """The ring holds 20 ms of copies; all else takes 1 s of the host, or of the device."""
    ring = 10**9
    host = seconds(copied=49 * 10**9, ring=ring, streamed=2, calls=25_000)
    assert host["copy"] == pytest.approx(1.0 + 1.0 - 2 * 0.02)
    device = seconds(copied=49 * 10**9, ring=ring, streamed=2, read=4 * 10**12)
    assert device["copy"] == pytest.approx(1.0 + 1.0 - 2 * 0.02)
    # While pieces are queued and decoded, places of the ring get free: that does not stall it.
    pieces = seconds(copied=49 * 10**9, ring=ring, streamed=2, pieces=25_000)
    assert pieces["copy"] == pytest.approx(1.0 + 25_000 * 4e-6)


PLAIN, PACKED, STREAMED = Unit("a", 700, 1000, 20), Unit("b", 701, 1001, 21), Unit("c", 702, 1002, 22)
ROWS = Unit("rows", 5 * MIB + 1, 8 * MIB, 23, rows=True)


def counted(*units: Unit, plain: str = "", packed: str = "", ram: int | None = None) -> Tally:
    return tally(Candidate(frozenset(plain.split()), frozenset(packed.split())), units, ram)


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


NEEDS = Footprint(
    plain=3 * MIB,
    cache=5 * MIB,
    activations=7 * MIB,
    fixed=11 * MIB,
    experts=13 * MIB,
    elsewhere=2 << 30,
    column=4096,
)


def layout(found: Tally, slots: int = 4, tiled: int = 0, workspace: int = 17 * MIB) -> Layout:
    return Layout(found, tiled=tiled, workspace=workspace, slots=slots, piece=32 * MIB)


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


BLOCKS = [Unit(f"layers.{i}", 100 * MIB + 7, 150 * MIB, MIB) for i in range(12)]


def worked(found: Tally, workspace: int, slots: int = 4) -> Work:
    return token_work.work_of(layout(found, slots, workspace=workspace), read=5, calls=6)


def test_what_a_token_does() -> None:
    found = counted(*BLOCKS, packed="layers.0 layers.1")._replace(on_disk=frozenset({"layers.2"}))
    size = BLOCKS[0].packed - BLOCKS[0].index
    pieces = -(-size // (32 * MIB))
    assert worked(found, 150 * MIB) == Work(
        calls=6,
        read=5,
        decoded=12 * 150 * MIB,
        passing=10 * 150 * MIB,
        launches=2 + 10 * pieces,
        units=12,
        copied=10 * size,
        pieces=10 * pieces,
        streamed=10,
        disk=size,
        ring=128 * MIB,
    )


def test_tiles_take_turns() -> None:
    """Three of 64 MiB for 150, each a launch, and each a piece at least."""
    found = counted(*BLOCKS[:2], packed="layers.0")
    made = worked(found, 64 * MIB)
    assert (made.streamed, made.launches, made.pieces) == (3, 3 + 4, 4)
    small = counted(Unit("small", MIB, 150 * MIB, 0))
    assert worked(small, 64 * MIB).pieces == 3


def test_what_is_kept_is_copied_once() -> None:
    work = NOTHING._replace(copied=100, disk=40, passing=200)
    assert token_work.work_without(work, 0) == work
    # Those of the disk first, for they take longest.
    assert token_work.work_without(work, 30) == work._replace(copied=70, disk=10, passing=140)
    assert token_work.work_without(work, 60) == work._replace(copied=60, disk=0, passing=120)
    assert token_work.work_without(work._replace(disk=0), 60) == work._replace(copied=40, disk=0, passing=80)


def test_how_much_is_kept() -> None:
    found, needs = counted(*BLOCKS), dataclasses.replace(NEEDS, experts=0)
    here = layout(found, workspace=150 * MIB)
    work, used = worked(found, 150 * MIB), here.used(needs)
    left = token_work.LEFT_FREE

    def kept(spare: int, footprint: Footprint = needs) -> int:
        return token_work.retained_bytes(here, work, footprint, used + left + spare)

    assert kept(64 * MIB) == 64 * MIB
    assert kept(64 * MIB - 1) == 0, "too little to be worth it"
    assert kept(67 * MIB) == 66 * MIB, "whole pages"
    assert kept(1 << 40) == (work.copied + 512 * work.pieces) // (2 * MIB) * 2 * MIB, "all there is"
    assert token_work.retained_bytes(here, work, NEEDS, 1 << 40) == 0, "experts have what is left over"
    assert token_work.retained_bytes(here._replace(slots=0), work, needs, 1 << 40) == 0


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
