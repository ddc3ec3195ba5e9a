"""The planner: budgets are kept, errors name budgets that work, and more memory is never worse."""

import dataclasses
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpde.errors import InvalidInput, OutOfMemory
from tpde.planning.candidates import STAGING_LEAST, Candidate, evenly, tally
from tpde.planning.layout import MIB, Layout
from tpde.planning.planner import make_plan
from tpde.planning.sizes import mib, parse_size
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.units import Footprint, Placement, Rates, Unit

RATES = Rates(copy=55e9, disk=6e9, memory=4.2e12, decode=2.0e12, launch=37e-6, windows=4.2e12)
DEVICE = (Placement.PLAIN, Placement.PACKED)


def unit(name, mib, rows=False, tile=0, resident=False):
    plain = int(mib * MIB)
    return Unit(name, int(plain / 1.49), plain, plain // 500, rows, tile, resident)


BLOCK, HEAD = 416, 1002
LLAMA = [
    unit("embed", HEAD, rows=True),
    *(unit(f"layers.{i}", BLOCK) for i in range(32)),
    unit("head", HEAD, tile=16 * MIB),
]
NEEDS = Footprint(plain=5 * MIB, cache=171 * MIB, activations=336 * MIB, fixed=128 * MIB)


def plan(vram, ram=None, units=LLAMA, needs=NEEDS, rates=RATES):
    return make_plan(units, needs, vram, ram, rates, calls=421)


SLOW = Rates(copy=1e9, disk=1e8, memory=1e12, decode=1e11, launch=1e-3, windows=1e12)


@pytest.mark.parametrize("vram", [2000, 4000, 9000, 20_000])
@pytest.mark.parametrize("ram", [None, 4000])
def test_times_on_another_machine(vram, ram):
    """As planned for it, if the same is where; and nothing else changes."""
    here = plan(vram * MIB, ram and ram * MIB)
    there = here.on(SLOW)
    assert there == dataclasses.replace(here, times=there.times)
    assert there.seconds > here.seconds
    assert there.on(RATES) == here
    made = plan(vram * MIB, ram and ram * MIB, rates=SLOW)
    assert made.seconds <= there.seconds
    if made.placements == here.placements and made.ring == here.ring:
        assert made == there


sizes = st.sampled_from([1, 3.5, 16, 100, BLOCK, HEAD])
models = st.builds(
    lambda blocks, size, others, embeddings: [
        *(unit(f"embed.{i}", mib, rows=True) for i, mib in enumerate(embeddings)),
        *(unit(f"layers.{i}", size) for i in range(blocks)),
        *(unit(f"other.{i}", mib, tile=tile) for i, (mib, tile) in enumerate(others)),
    ],
    st.integers(0, 12),
    sizes,
    st.lists(st.tuples(sizes, st.sampled_from([0, 512, MIB])), max_size=5),
    st.lists(sizes, max_size=2),
).filter(bool)
footprints = st.builds(
    Footprint,
    *(st.integers(0, 300).map(lambda mib: mib * MIB + 77) for _ in range(3)),
    st.just(128 * MIB),
    st.sampled_from([0, 2 * MIB, 460 * MIB]),
)
rams = st.none() | st.integers(1, 8000).map(lambda mib: mib * MIB)
slow = settings(max_examples=40, deadline=None)


def check(made: StreamPlan, units, needs, vram, ram):
    """Add the budget up once more, from the definition."""

    def total(field, *places):
        return sum(-(-getattr(it, field) // 512) * 512 for it in units if made.placements[it.name] in places)

    assert list(made.placements) == [it.name for it in units]
    decoded = [it for it in units if made.placements[it.name] is not Placement.PLAIN and not it.rows]
    streamed = [it for it in decoded if made.placements[it.name] in (Placement.HOST, Placement.DISK)]
    assert made.workspace % 512 == 0
    assert set(made.tiled) == {it.name for it in decoded if it.plain > made.workspace}
    assert all(0 < it.tile <= made.workspace for it in decoded if it.name in made.tiled)
    assert bool(made.ring) == bool(streamed)
    if streamed:
        assert made.slots >= 4
        assert 4 * MIB <= made.piece <= 32 * MIB
    assert made.used == sum(
        (
            needs.total,
            made.workspace,
            made.ring,
            made.retained,
            needs.experts if streamed else 0,
            -(-(made.host + made.staging) // 512 // (2 * MIB)) * 2 * MIB,
            total("index", Placement.HOST, Placement.DISK),
            total("packed", Placement.PACKED),
            total("plain", Placement.PLAIN),
        )
    )
    assert made.used <= vram
    assert not made.retained or (streamed and not needs.experts)
    assert made.retained <= sum(it.packed for it in streamed) + len(streamed) * 2 * MIB
    assert made.work.copied >= 0 <= made.work.disk
    on_host = [it for it in units if made.placements[it.name] is Placement.HOST]
    assert made.host == sum(it.packed for it in on_host)
    assert bool(made.staging) == bool(made.units(Placement.DISK))
    assert not any(it.rows for it in units if made.placements[it.name] in (Placement.DISK, Placement.PLAIN))
    if ram is not None:
        assert made.host + made.staging <= ram
    assert made.seconds == max(made.times.values()) > 0
    assert made.times[made.limit] == made.seconds


@slow
@given(models, footprints, st.integers(1, 16000), rams)
def test_budgets_are_kept(units, needs, mib, ram):
    try:
        made = plan(mib * MIB, ram, units, needs)
    except OutOfMemory:
        return
    check(made, units, needs, mib * MIB, ram)


@slow
@given(models, footprints, st.integers(1, 16000), st.integers(0, 4000), rams)
def test_more_vram_is_never_worse(units, needs, mib, more, ram):
    try:
        small = plan(mib * MIB, ram, units, needs)
    except OutOfMemory:
        assume(False)
    large = plan((mib + more) * MIB, ram, units, needs)
    assert (len(large.tiled), large.seconds) <= (len(small.tiled), 1.02 * small.seconds)


def test_more_vram_is_faster_on_a_large_model():
    times = [plan(int(gib * 1024) * MIB).seconds for gib in (2, 3, 4, 6, 8, 12, 16, 24)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.8 * times[3] > 3 * times[6]


@slow
@given(models, footprints, rams)
def test_the_least_vram_is_exact(units, needs, ram):
    with pytest.raises(OutOfMemory, match=r"the least that works is (\d+) MiB") as caught:
        plan(1, ram, units, needs)
    least = caught.value.least
    mib = -(-least // MIB)
    assert f"is {mib} MiB" in str(caught.value)
    check(plan(least, ram, units, needs), units, needs, least, ram)
    plan(mib * MIB, ram, units, needs)
    for less in (least - 1, (mib - 1) * MIB):
        with pytest.raises(OutOfMemory) as again:
            plan(less, ram, units, needs)
        # Where it would do with more host memory, that is what the error names.
        assert again.value.least == least or "`ram`" in str(again.value)


@slow
@given(models, footprints, st.integers(1, 16000))
def test_the_least_ram_is_exact(units, needs, mib):
    try:
        plan(mib * MIB, 1, units, needs)
    except OutOfMemory as error:
        assume("`ram`" in str(error))
        least = error.least
    else:
        assume(False)
    plan(mib * MIB, least, units, needs)
    with pytest.raises(OutOfMemory):
        plan(mib * MIB, least - 1, units, needs)


@pytest.mark.parametrize(
    ("vram", "ram", "where", "tiled", "workspace", "ring", "staging", "kept", "limit", "microseconds"),
    [
        (1200, None, (34, 0, 0, 0), ("head",), 416, (4, 16), 0, 0, "copy", 189085),
        (1600, None, (33, 0, 1, 0), ("head",), 416, (6, 32), 0, 0, "copy", 182118),
        (2048, None, (33, 0, 1, 0), (), 1002, (4, 16), 0, 0, "copy", 183598),
        (3072, None, (30, 0, 3, 1), (), 416, (4, 32), 0, 0, "copy", 158088),
        (6144, None, (19, 0, 14, 1), (), 416, (4, 32), 0, 0, "copy", 98123),
        (11571, None, (1, 0, 32, 1), (), 416, (0, 0), 0, 0, "host", 19090),
        (16000, None, (0, 0, 1, 33), (), 0, (0, 0), 0, 0, "host", 17077),
        (2048, 2500, (6, 27, 1, 0), (), 1002, (4, 16), 256, 0, "disk", 1382007),
        (4096, 4096, (11, 15, 7, 1), (), 416, (4, 8), 416, 0, "disk", 729711),
        (4096, 9000, (27, 0, 6, 1), (), 416, (6, 32), 0, 98, "copy", 139827),
        (6144, 1300, (2, 17, 14, 1), (), 416, (4, 8), 256, 92, "disk", 810928),
    ],
)
def test_plans_of_a_known_model(vram, ram, where, tiled, workspace, ring, staging, kept, limit, microseconds):
    """A change of any of these is one of what users get: sizes in MiB, and what a token takes."""
    made = plan(vram * MIB, ram and ram * MIB)
    places = Placement.HOST, Placement.DISK, Placement.PACKED, Placement.PLAIN
    assert tuple(len(made.units(it)) for it in places) == where
    assert (made.tiled, made.workspace, made.staging, made.retained) == (
        tiled,
        workspace * MIB,
        staging * MIB,
        kept * MIB,
    )
    assert (made.slots, made.piece) == (ring[0], ring[1] * MIB)
    assert made.limit == limit
    assert round(made.seconds * 1e6) == microseconds
    assert made.work.read == NEEDS.plain + sum(it.plain for it in LLAMA if not it.rows)
    assert made.work.calls == 421


def test_what_streams_is_spread():
    made = plan(6 << 30)
    assert made.limit == "copy"
    streams = [made.placements[f"layers.{i}"] is Placement.HOST for i in range(32)]
    fewest, most = (f(sum(streams[i : i + 8]) for i in range(25)) for f in (min, max))
    assert most - fewest <= 1
    assert 0 < sum(streams) < 32


def test_a_part_of_the_host_spills_to_the_disk():
    made = plan(4 << 30, 4 << 30)
    assert made.limit == "disk"
    assert made.staging >= STAGING_LEAST
    assert made.placements["embed"] is Placement.HOST
    where = [made.placements[f"layers.{i}"] for i in range(32)]
    assert where.count(Placement.DISK) > 4
    assert where.count(Placement.HOST) > 4
    assert 0.9 * (4 << 30) < made.host + made.staging <= 4 << 30
    halves = [where[:16].count(Placement.DISK), where[16:].count(Placement.DISK)]
    assert abs(halves[0] - halves[1]) <= 1


def test_all_packed_before_any_block_is_plain():
    for gib in range(2, 20):
        made = plan(gib << 30)
        plain = [name for name in made.units(Placement.PLAIN) if name != "head"]
        if plain:
            assert not made.units(Placement.HOST)
    assert made.units(Placement.HOST) == []
    assert made.placements["embed"] is Placement.PACKED
    assert made.workspace == 0


def test_one_large_unit_is_plain_to_shrink_the_workspace():
    """Plain it takes 1002 MiB; streamed the same as a workspace, where the blocks need 416."""
    assert plan(2 << 30).workspace == HEAD * MIB
    made = plan(3 << 30)
    assert made.placements["head"] is Placement.PLAIN
    assert made.workspace == BLOCK * MIB


def test_tiles_only_where_a_unit_does_not_fit_whole():
    whole = next(gib for gib in range(1136, 3072, 16) if not _tiled(gib * MIB))
    assert _tiled((whole - 16) * MIB) == ("head",)
    assert not any(_tiled(mib * MIB) for mib in range(whole, 8192, 256))
    # What blocks need is not tiled, however little there is.
    assert plan(1200 * MIB).workspace >= BLOCK * MIB


def _tiled(vram):
    return plan(vram).tiled


def test_a_layer_larger_than_the_device():
    giant = [unit("linear", 80e9 / MIB, tile=16 * MIB)]
    made = make_plan(giant, Footprint(0, 0, 4 * MIB, 128 * MIB), 16 << 30, None, RATES, calls=1)
    assert made.tiled == ("linear",)
    assert 16 * MIB <= made.workspace <= 1 << 30
    assert made.retained > 14 << 30, "what is left over beside the largest ring"
    assert made.work.copied == giant[0].packed - giant[0].index - made.retained
    assert made.seconds < 1.1 * made.work.copied / RATES.copy


def test_what_a_tile_gives_has_room():
    """As many columns of the output as the workspace holds rows, of all tokens."""
    head = [dataclasses.replace(unit("head", 1002, tile=16 * MIB), row=8192)]
    needs = Footprint(0, 0, 502 * MIB, 128 * MIB, column=2048 * 2)
    made = make_plan(head, needs, 1024 * MIB, None, RATES, calls=1)
    assert made.tiled == ("head",)
    assert made.parts["tiles"] == made.workspace // 2
    assert made.used <= 1024 * MIB
    whole = make_plan(head, needs, 4096 * MIB, None, RATES, calls=1)
    assert not whole.tiled
    assert whole.parts["tiles"] == 0


def test_page_tables_of_host_memory():
    """8 bytes for each 4 KiB that is locked: of this device's units, and of what other devices may have."""
    needs = Footprint(0, 0, 4 * MIB, 128 * MIB, elsewhere=60 << 30)
    made = make_plan([unit("linear", 1024, tile=16 * MIB)], needs, 640 * MIB, None, RATES, calls=1)
    assert made.placements["linear"] is Placement.HOST
    assert made.parts["pages"] == 122 * MIB, "2 MiB for up to 1 GiB, and 120"


def test_loading_has_room_for_index_maps():
    """Those of what is streamed are there first, and those of a plain unit while it is decoded."""
    near, far = unit("near", 800), unit("far", 800)
    chosen = tally(Candidate(frozenset({"near"}), frozenset()), [near, far], None)
    assert chosen.loading == near.plain + near.packed + near.index
    needs = Footprint(plain=MIB, cache=0, activations=0, fixed=MIB)
    layout = Layout(chosen, tiled=0, workspace=0, slots=0, piece=0)
    pages = 2 * MIB  # of what is streamed: PyTorch cannot have them while it loads either
    assert layout.used(needs) == 2 * MIB + near.plain + near.packed + near.index + chosen.maps + pages
    assert chosen.maps >= far.index


def test_units_that_no_kernel_streams_stay_on_the_device():
    units = [unit("embed", 100, rows=True, resident=True), *(unit(f"layers.{i}", 100) for i in range(8))]
    units += [unit("odd", 100, resident=True)]
    made = make_plan(units, Footprint(0, 0, 0, 128 * MIB), 700 * MIB, None, RATES, calls=100)
    assert made.placements["embed"] is made.placements["odd"] is Placement.PACKED
    assert made.units(Placement.HOST)
    with pytest.raises(OutOfMemory, match=r"; 135 MiB are packed otherwise, and only what `--codec prefix`"):
        make_plan(units, Footprint(0, 0, 0, 128 * MIB), 300 * MIB, None, RATES, calls=100)


def test_predictions_meet_measurements():
    """On an H200, with a host of 37 us a call: see docs/notes/prediction.md."""
    assert plan(80 << 30).seconds == pytest.approx(15.5e-3, rel=0.15)
    packed = make_plan(LLAMA, NEEDS, int(11.3 * 2**30), None, RATES, calls=421)
    assert len(packed.units(Placement.PACKED)) >= 30
    assert packed.times["host"] == pytest.approx(19.5e-3, rel=0.15)


def test_streaming_is_near_the_rate_of_the_bus():
    for gib in (2, 3, 4, 6, 8):
        bar = (10.06e9 - max(0, (gib << 30) - 2.1e9)) / RATES.copy / 0.93
        assert plan(gib << 30).seconds < bar


def test_evenly():
    units = [unit(str(i), 1) for i in range(10)]
    assert [it.name for it in evenly(units, 5)] == ["1", "3", "5", "7", "9"]
    assert evenly(units, 0) == []
    assert evenly(units, 10) == units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("16 GB", 16 * 10**9),
        ("1.5MiB", 3 << 19),
        (" 512 kib ", 512 << 10),
        ("4096", 4096),
        (4096, 4096),
        ("2TiB", 2 << 40),
        ("7 B", 7),
        (1, 1),
        ("3kB", 3000),
        ("3MB", 3 * 10**6),
        ("3KiB", 3 << 10),
        ("3TB", 3 * 10**12),
        (".5 GiB", 1 << 29),
        ("1.GiB", 1 << 30),
        ("0.0015 kB", 1),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("16G", "`16GiB` or `16GB`"),
        ("lots", "such as `16GiB`"),
        ("", "such as `16GiB`"),
        ("-1GiB", "such as `16GiB`"),
        ("0GiB", "above zero"),
        (0, "above zero"),
        (-1, "above zero"),
        ("0.5", "above zero"),
        (1.0, "such as `16GiB`"),
        (None, "such as `16GiB`"),
        ("1 GiB 2", "such as `16GiB`"),
        ("1e3", "such as `16GiB`"),
        ("3t", "`3TiB` or `3TB`"),
        ("16 apples", "such as `16GiB`"),
        (True, "such as `16GiB`"),
    ],
)
def test_what_is_no_size(text, says):
    with pytest.raises(InvalidInput, match=says):
        parse_size(text)


def test_sizes_are_written_in_mib_rounded_up():
    assert [mib(it) for it in (1, MIB, MIB + 1, 0)] == ["1 MiB", "1 MiB", "2 MiB", "0 MiB"]


def test_planning_imports_neither_torch_nor_cuda():
    code = (
        "import sys, tpde.planning.planner; "
        "assert not {'torch', 'cuda', 'numpy'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_units_have_room_for_their_packed_form_while_they_are_decoded() -> None:
    """A plain head may need least memory in the end, but more than that at the start."""
    body = [Unit(f"layers.{i}", 280 * MIB, 416 * MIB, MIB) for i in range(32)]
    units = [*body, Unit("head", 672 * MIB, 1002 * MIB, 2 * MIB)]
    footprint = Footprint(5 * MIB, MIB, 2 * MIB, 128 * MIB)
    plain = 0
    for vram in range(1500 * MIB, 16000 * MIB, 50 * MIB):
        with suppress(OutOfMemory):
            made = make_plan(units, footprint, vram, None, RATES, calls=300)
            at = 0
            for unit in (units[-1], *body):
                if made.placements[unit.name] is Placement.PLAIN:
                    plain, at = plain + 1, at + unit.plain
                    assert at + unit.packed + footprint.fixed <= vram
    assert plain
