"""What a token does, and each term of how long it takes, in numbers that were worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from support.units import BLOCKS, NEEDS, RATES, counted, layout

from tpde.planning import token_work
from tpde.planning.candidates import Tally
from tpde.planning.layout import MIB
from tpde.planning.prediction import Work, predict
from tpde.planning.units import Footprint, Unit

NOTHING = Work(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
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


# ---- what a token does ----


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
