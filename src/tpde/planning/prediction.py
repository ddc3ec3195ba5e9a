"""How long a token takes: one forward pass of one token, all weights being read once (prediction.md)."""

from __future__ import annotations

from typing import NamedTuple

from tpde.planning.units import Rates

COPY_SHARE = 0.98  # of the rate of single large copies that many of them one after the other reach
COPY_SECONDS = 4e-6  # for each copy: 1, 4, 16 and 64 MiB take 3 to 9 us more than their bytes
DECODE_SECONDS = 20e-6  # for each decode: the last warps run alone
UNIT_CALLS = 1.7  # 29 packed blocks take 2.0 ms more of the host than plain ones: 69 us each, a call 42 us
PIECE_CALLS = 1  # a copy, two events and a launch take about as long as a module's call
LATE_SECONDS = 1e-3  # by which the host is late at some point of each unit, as when Python collects garbage
END_SECONDS = 1.5e-3  # sampling, and whatever else is between two forward passes


class Work(NamedTuple):
    """What a token takes of a machine.

    Attributes
    ----------
    calls : int
        Calls of modules.
    read : int
        Bytes of plain weights that are read.
    decoded, passing : int
        Those that are decoded before: all, and those that were copied.
    launches : int
        How many decodes.
    units : int
        How many units are decoded.
    copied, pieces : int
        Bytes that are copied to the device, and the copies.
    streamed : int
        Units, or tiles, that these belong to.
    disk : int
        Bytes that are read from files.
    ring : int
        Bytes that can be copied ahead.
    windows : int
        Bytes in the window layout that are multiplied.
    """

    calls: int
    read: int
    decoded: int
    passing: int
    launches: int
    units: int
    copied: int
    pieces: int
    streamed: int
    disk: int
    ring: int
    windows: int = 0


def predict(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds that each resource is busy, or waited for, during one token; a token takes the longest."""
    pieces = work.pieces * PIECE_CALLS * rates.launch
    host = (work.calls + UNIT_CALLS * work.units) * rates.launch + pieces
    passing = work.passing / rates.decode + work.pieces * DECODE_SECONDS
    resident = (work.decoded - work.passing) / rates.decode + (work.launches - work.pieces) * DECODE_SECONDS
    memory = work.read / rates.memory + work.windows / rates.windows + resident + passing
    seconds = {"copy": 0.0, "disk": 0.0, "memory": memory + END_SECONDS, "host": host + END_SECONDS}
    if work.copied:
        # While no piece is decoded, since other things are computed or a token is sampled, copies go on until
        # the ring is full.
        ahead = work.ring / rates.copy
        computing = max(host - pieces, memory - passing)
        late = work.streamed * max(0.0, LATE_SECONDS - ahead) + max(0.0, END_SECONDS - ahead)
        stalled = max(0.0, computing - work.streamed * ahead) + late
        seconds["copy"] = work.copied / (rates.copy * COPY_SHARE) + work.pieces * COPY_SECONDS + stalled
    if work.disk:
        seconds["disk"] = work.disk / rates.disk
    return seconds
