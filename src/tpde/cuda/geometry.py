"""How the warps of a block share its memory: chosen for each launch of `kernels/decode.cu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tpde.cuda.items import DESCRIPTOR_BYTES, Item, kind_defines
from tpde.format.blob_header import align

LANES = 32  # format.md 5.1
GROUP_BYTES = 512
MAX_WORD_BYTES = 8
MANY_PLANES = 2
LEAST_WARPS = 4  # with fewer, streams stay in global memory
TABLE_WARPS = 8  # with fewer, loading tables takes longer
LARGE_CHUNK = 16 << 10  # bytes; with more, 16 warps were 3 % faster than 24: memory has fewer rows open
# Bytes of a block's shared memory. Below, on compute capability 8.6, 8.9 and 12.0, a block has 99 KiB.
SMALL_SHARED = 128 << 10
RING_PIECES = 4  # decode.cu knows it too
WINDOWS = (8, 4, 2, 1)

# An escape has at most so many bits for a symbol, or a pair (format.md 3).
_ESCAPE_BITS, _ESCAPE_PAIR_BITS = 20, 28
# What a lane may read beyond its bits: every symbol an escape, the word it is at then, and four more.
_SLACK_BITS, _SLACK_BYTES = _ESCAPE_BITS, 24


class Need(NamedTuple):
    """What a list of blobs asks of shared memory, in bytes."""

    room: int  # the coded planes of any chunk
    fair: int  # the coded planes of all chunks but about 1 of 100
    chunk: int  # a chunk, on average
    raw: int  # a group's raw planes
    tables: int
    slack: int
    warps: int  # the most that are worth it where shared memory is large
    most: int  # warps that registers allow
    piece: int  # a piece of a lane's ring
    rings: int  # a warp's rings


def max_warps(kind: Mapping[str, int], check: bool) -> int:
    """Warps of a block that registers allow: 80 each for 24, 96 for checksums, 128 for eight planes.

    Each coded plane beyond two takes a few more; as many as for checksums are enough for four.
    """
    if kind["WORD"] == MAX_WORD_BYTES:
        return 16
    return 24 - 4 * check - 4 * (kind["CODED"].bit_count() > MANY_PLANES)


def _piece(word_bytes: int, coded: int, pairs: int) -> int:
    """Bytes of a ring's piece: more than what is looked up at a time, four entries or a group's, may take."""
    words = 16 // word_bytes
    singles = min(words, 4) * _ESCAPE_BITS if coded & ~pairs else 0
    doubles = min(words // 2, 4) * _ESCAPE_PAIR_BITS if pairs else 0
    return 8 if max(singles, doubles) < 8 * 8 else 16


def need(items: Sequence[Item]) -> Need:
    """What the chunks of some blobs of one kind take."""
    headers = [it.header for it in items]
    kind = kind_defines(headers[0], items[0].tables)
    piece, most = _piece(kind["WORD"], kind["CODED"], kind["PAIRS"]), max_warps(kind, check=False)
    words = max(header.chunk_words for header in headers)
    raw_planes = sum(not count for _, count in headers[0].planes)
    room = max(
        align(header.max_stream_bytes * sum(count > 0 for _, count in header.planes), 16)
        for header in headers
    )
    chunks = max(sum(header.chunks for header in headers), 1)
    chunk = sum(header.blob_bytes - header.chunks_at for header in headers) // chunks
    # 1.08 times the mean holds 99 of 100 chunks of weights; planes that are filled hide the mean.
    fair = align(max(chunk - words * raw_planes, 0) * 108 // 100, 16)
    return Need(
        room,
        min(fair, room) or room,
        chunk,
        raw_planes * GROUP_BYTES // headers[0].word_bytes,
        max(it.tables.image.size for it in items),
        align(words // LANES * _SLACK_BITS // 8 + _SLACK_BYTES, 16),
        16 if chunk > LARGE_CHUNK else most,
        most,
        piece,
        kind["CODED"].bit_count() * LANES * RING_PIECES * piece,
    )


class Geometry(NamedTuple):
    """How the warps of a multiprocessor's one block share its memory."""

    warps: int
    window: int  # groups of raw planes that a warp stages at a time, two times over
    piece: int  # 0: coded planes are staged; or bytes of a piece of the rings that they pass through
    ahead: int  # 1: the next chunk's coded planes are staged while one is decoded
    room: int  # bytes for a chunk's coded planes, larger ones stay in global memory; or for a warp's rings
    table_room: int  # bytes for tables; 0: they stay in global memory
    shared: int


def kernel_defines(kind: Mapping[str, int], chosen: Geometry, check: bool) -> dict[str, int]:
    """Macros of the kernel that decodes blobs of a kind in chosen ways."""
    threads = 32 * max_warps(kind, check)
    return {**kind, "WINDOW": chosen.window, "PIECE": chosen.piece, "CHECK": int(check), "THREADS": threads}


class Fit(NamedTuple):
    """What fits into a block's shared memory."""

    most: int  # warps
    window: int
    piece: int
    room: int
    table_room: int
    limit: int  # bytes for windows and rooms
    slack: int


def geometry(wanted: Need, shared_bytes: int, chunks: int = 0) -> Geometry:
    """Choose how to launch.

    Measured on an H200 (gpu-decode.md): 24 warps, or 16 where a chunk has more than 16 KiB, with the largest
    windows; of similar numbers of warps, the one whose last round is fullest. Chunks for one round get a warp
    each, of at least 8, and nothing is staged ahead. Where shared memory is small: as many warps as registers
    allow, coded planes passing through rings if staging them leaves fewer.

    Parameters
    ----------
    wanted : Need
        What the blobs ask for.
    shared_bytes : int
        What a block may have.
    chunks : int
        That a block will decode.
    """
    if shared_bytes >= SMALL_SHARED:
        fit = staged(wanted, shared_bytes, wanted.warps)
    else:
        fit = staged(wanted, shared_bytes, wanted.most)
        outside = not fit.room and wanted.room
        rings = _through_rings(wanted, shared_bytes)
        if rings.most > (LEAST_WARPS - 1 if outside else fit.most):
            fit = rings
    windows, most = 2 * wanted.raw * fit.window, fit.most

    def speed(warps: int) -> float:
        """How full the rounds are; a warp less costs 0.8 % beside, measured on six files."""
        return chunks / warps / -(-chunks // warps) - 0.008 * (most - warps)

    one_round = 0 < chunks <= most
    if one_round:
        warps = max(chunks, min(TABLE_WARPS, most))
    else:
        warps = max(range(max(most * 2 // 3, 1), most + 1), key=speed) if chunks else most
    ahead = int(not fit.piece and not one_round and warps * (windows + 2 * fit.room) <= fit.limit)
    shared = fit.table_room + warps * (windows + (1 + ahead) * fit.room) + fit.slack
    return Geometry(warps, fit.window, fit.piece, ahead, fit.room, fit.table_room, shared)


def staged(wanted: Need, shared_bytes: int, most: int) -> Fit:
    """Up to `most` warps with the coded planes of a chunk each."""
    limit = shared_bytes - DESCRIPTOR_BYTES - wanted.slack  # an item lies in static shared memory
    table_room = wanted.tables if wanted.tables <= limit // 2 else 0
    limit -= table_room
    choices = [(window, wanted.room) for window in WINDOWS] + [(1, wanted.fair)]
    for window, least in choices:
        windows = 2 * wanted.raw * window
        if most * (windows + least) <= limit:
            room = min(wanted.room, (limit // most - windows) // 16 * 16)
            break
    else:
        window, windows, room = 1, 2 * wanted.raw, wanted.room
        fit = min(most, limit // max(windows + room, 1))
        if fit < LEAST_WARPS:
            fit, room = min(most, limit // max(windows, 1)), 0
        most = fit
    return Fit(most, window, 0, room, table_room, limit, wanted.slack)


def _through_rings(wanted: Need, shared_bytes: int) -> Fit:
    """As many warps as may be with a ring for each lane and coded plane, which needs no slack."""
    ring = RING_PIECES * wanted.piece  # which starts at a multiple of its size
    limit = shared_bytes - align(DESCRIPTOR_BYTES, ring)
    table_room = align(wanted.tables, ring)
    limit = limit - table_room if table_room <= limit // 2 else 0
    for window in WINDOWS:
        each = 2 * wanted.raw * window + wanted.rings
        if wanted.most * each <= limit:
            break
    most = min(wanted.most, limit // max(each, 1))
    return Fit(most, window, wanted.piece, wanted.rings, table_room, limit, 0)
