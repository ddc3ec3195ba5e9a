"""The planner: budgets are kept, errors name budgets that work, and more memory is never worse."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.stream_plans import BLOCK, HEAD, plan, unit

from tpde.errors import OutOfMemory
from tpde.planning.layout import MIB
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.units import Footprint, Placement

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
