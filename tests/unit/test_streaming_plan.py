"""Plans of known models: what is where, what is tiled, what has room, and how long a token takes."""

import dataclasses
import subprocess
import sys
from contextlib import suppress

import pytest
from support.stream_plans import BLOCK, HEAD, LLAMA, NEEDS, RATES, plan, unit

from tpde.errors import OutOfMemory
from tpde.planning.candidates import STAGING_LEAST, Candidate, evenly, tally
from tpde.planning.layout import MIB, Layout
from tpde.planning.planner import make_plan
from tpde.planning.units import Footprint, Placement, Rates, Unit

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
