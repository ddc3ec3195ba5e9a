"""How warps share a block's memory (gpu-decode.md): what is chosen for packed weights, and at every limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tpde.codec.selection import base_header
from tpde.cuda.geometry import Geometry, Need, geometry, kernel_defines, max_warps, need, staged
from tpde.cuda.items import DESCRIPTOR_BYTES, Item, Tables
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec

KIB = 1 << 10
# What weights ask for as the packer writes them.
NEEDS = {
    "BF16": Need(3088, 2976, 10948, 256, 16384, 672, 24, 24, 16, 2048),
    "F16": Need(6208, 6208, 13928, 256, 16384, 672, 24, 24, 16, 2048),
    "F32": Need(3088, 2976, 27332, 384, 16384, 672, 16, 24, 8, 1024),
    "F64": Need(16176, 9440, 57888, 384, 40960, 672, 16, 16, 8, 2048),
    "F8": Need(7168, 7168, 6791, 0, 32768, 672, 24, 24, 16, 2048),
}
# For so much shared memory in KiB, and so many chunks for a block.
CHOSEN = {
    ("BF16", 99, 0): (24, 1, 0, 0, 2992, 16384, 101152),
    ("BF16", 99, 9): (9, 1, 0, 0, 2992, 16384, 48592),
    ("BF16", 99, 249): (23, 1, 0, 0, 2992, 16384, 97648),
    ("BF16", 163, 0): (24, 4, 0, 0, 3088, 16384, 140320),
    ("BF16", 163, 249): (23, 4, 0, 0, 3088, 16384, 135184),
    ("BF16", 227, 0): (24, 8, 0, 0, 3088, 16384, 189472),
    ("BF16", 227, 9): (9, 8, 0, 0, 3088, 16384, 81712),
    ("BF16", 227, 249): (23, 8, 0, 0, 3088, 16384, 182288),
    ("F16", 99, 0): (24, 2, 16, 0, 2048, 16384, 90112),
    ("F16", 99, 9): (9, 2, 16, 0, 2048, 16384, 44032),
    ("F16", 99, 249): (23, 2, 16, 0, 2048, 16384, 87040),
    ("F16", 163, 0): (22, 1, 0, 0, 6208, 16384, 164896),
    ("F16", 163, 249): (21, 1, 0, 0, 6208, 16384, 158176),
    ("F16", 227, 249): (23, 4, 0, 0, 6208, 16384, 206944),
    ("F32", 99, 0): (24, 2, 8, 0, 1024, 16384, 77824),
    ("F32", 163, 0): (16, 8, 0, 0, 3088, 16384, 164768),
    ("F32", 227, 0): (16, 8, 0, 1, 3088, 16384, 214176),
    ("F32", 227, 9): (9, 8, 0, 0, 3088, 16384, 100144),
    ("F32", 227, 249): (16, 8, 0, 1, 3088, 16384, 214176),
    ("F64", 99, 249): (16, 2, 8, 0, 2048, 40960, 98304),
    ("F64", 163, 0): (7, 1, 0, 0, 16176, 40960, 160240),
    ("F64", 163, 7): (7, 1, 0, 0, 16176, 40960, 160240),
    ("F64", 163, 1): (7, 1, 0, 0, 16176, 40960, 160240),
    ("F64", 163, 9): (5, 1, 0, 0, 16176, 40960, 126352),
    ("F64", 227, 0): (16, 1, 0, 0, 11136, 40960, 232096),
    ("F8", 99, 0): (24, 8, 16, 0, 2048, 32768, 81920),
    ("F8", 163, 0): (18, 1, 0, 0, 7168, 32768, 162464),
    ("F8", 227, 9): (9, 8, 0, 0, 7168, 32768, 97952),
    ("F8", 227, 25): (16, 8, 0, 0, 7168, 32768, 148128),
}


@pytest.mark.parametrize(("name", "shared", "chunks"), CHOSEN)
def test_what_is_chosen_for_weights(name: str, shared: int, chunks: int) -> None:
    assert geometry(NEEDS[name], shared * KIB, chunks) == Geometry(*CHOSEN[name, shared, chunks])


def _asking(**other: int) -> Need:
    return NEEDS["BF16"]._replace(**other)


@pytest.mark.parametrize(
    ("wanted", "shared", "chosen"),
    [
        (_asking(room=0, fair=0), 227, (24, 8, 0, 1, 0, 16384, 115360)),
        (_asking(room=0, fair=0, raw=0), 227, (24, 8, 0, 1, 0, 16384, 17056)),
        (_asking(room=53296, fair=53296), 227, (4, 1, 0, 0, 53296, 16384, 232288)),
        (_asking(room=53312, fair=53312), 227, (24, 1, 0, 1, 0, 16384, 29344)),  # three would fit
        (_asking(room=256 * KIB, fair=256 * KIB, rings=20688), 99, (4, 1, 16, 0, 20688, 16384, 101184)),
        (_asking(room=256 * KIB, fair=256 * KIB, rings=20736), 99, (24, 1, 0, 1, 0, 16384, 29344)),
        (NEEDS["F16"], 128, (16, 1, 0, 0, 6208, 16384, 124576)),
        (NEEDS["F16"], 127.99, (24, 4, 16, 0, 2048, 16384, 114688)),
    ],
)
def test_what_is_chosen_at_limits(wanted: Need, shared: float, chosen: tuple[int, ...]) -> None:
    assert geometry(wanted, int(shared * KIB)) == Geometry(*chosen)


def test_tables_take_up_to_half_of_the_memory() -> None:
    limit = 227 * KIB - DESCRIPTOR_BYTES - 672
    for tables, kept in ((limit // 2, limit // 2), (limit // 2 + 1, 0)):
        fit = staged(_asking(tables=tables), 227 * KIB, 24)
        assert (fit.table_room, fit.limit) == (kept, limit - kept)
    # In front of rings, which begin at multiples of their size, 64 bytes, and which need the tables there.
    for tables, piece, kept in ((50505, 16, 50560), (50560, 16, 50560), (50561, 0, 0)):
        chosen = geometry(_asking(room=256 * KIB, fair=256 * KIB, tables=tables), 99 * KIB)
        assert (chosen.piece, chosen.table_room) == (piece, kept)


def test_chunks_for_a_round_have_a_warp_each_and_at_least_eight() -> None:
    found = [geometry(NEEDS["BF16"], 227 * KIB, chunks) for chunks in (1, 7, 8, 9, 23, 24, 25)]
    assert [it.warps for it in found] == [8, 8, 8, 9, 23, 24, 16]
    assert {it.ahead for it in found[:-1]} == {0}
    assert geometry(NEEDS["F32"], 227 * KIB, 17).ahead == 1


def test_warps_that_registers_allow() -> None:
    for word, coded in ((1, 1), (2, 0b10), (2, 0b11), (4, 0b1100), (4, 0b1110), (4, 0b1111), (8, 0b11)):
        kind, many = {"WORD": word, "CODED": coded}, coded.bit_count() > 2
        expected = (16, 16) if word == 8 else (20, 16) if many else (24, 20)
        assert (max_warps(kind, check=False), max_warps(kind, check=True)) == expected


def test_macros() -> None:
    kind = {"WORD": 4, "ROTATE": 1, "CODED": 8, "PAIRS": 8, "SHORT": 0}
    chosen = Geometry(*CHOSEN["F32", 99, 0])
    for check, threads in ((False, 24 * 32), (True, 20 * 32)):
        made = kernel_defines(kind, chosen, check)
        assert made == {**kind, "WINDOW": 2, "PIECE": 8, "CHECK": int(check), "THREADS": threads}


# ---- what blobs ask for ----


def _header(dtype: str, planes: Any, chunks: int = 10, chunk_words: int = 8192, **more: int) -> BlobHeader:
    header = base_header(TensorSpec(dtype, (chunks * chunk_words,)), CODEC_PREFIX, chunk_words)
    header = replace(header, planes=planes, tables=sum(n for _, n in planes), tables_bytes=64)
    found = {"blob_bytes": header.chunks_at + 11_000 * chunks, "max_stream_bytes": 3084} | more
    return replace(header, **found)


def _item(header: BlobHeader, tables: int = 4096, pairs: int = 0) -> Item:
    return Item(header, Tables(np.zeros(tables, np.uint8), 11, pairs), 0, 0, 0)


BF16 = ((0, 0), (0, 1))


def test_what_one_blob_asks_for() -> None:
    # 11000 bytes a chunk, of which 8192 are raw: 1.08 times the rest is 3032.6.
    assert need([_item(_header("BF16", BF16))]) == Need(3088, 3040, 11000, 256, 4096, 672, 24, 24, 16, 2048)


def test_blobs_of_a_kind_ask_for_the_most_of_each_and_the_mean() -> None:
    first = _header("BF16", BF16, 30, chunk_words=8192)
    other = _header("BF16", ((0, 0), (0, 2)), 10, chunk_words=4096, max_stream_bytes=5000)
    other = replace(other, blob_bytes=other.chunks_at + 10 * 15_000)
    found = need([_item(first), _item(other, 9000)])
    # 12000 bytes a chunk.
    assert found == Need(5008, 4112, 12000, 256, 9000, 672, 24, 24, 16, 2048)
    assert need([_item(other), _item(first, 9000)]) == found


@pytest.mark.parametrize(
    ("dtype", "planes", "pairs", "room", "raw", "most", "piece", "rings"),
    [
        ("F8_E4M3", ((0, 1),), 0, 3088, 0, 24, 16, 2048),
        ("F8_E4M3", ((0, 2),), 1, 3088, 0, 24, 16, 2048),
        ("I16", ((0, 1), (1, 4)), 0, 6176, 0, 24, 16, 4096),
        ("BF16", BF16, 2, 3088, 256, 24, 16, 2048),
        ("F32", ((0, 0), (0, 0), (0, 1), (1, 1)), 8, 6176, 256, 24, 16, 4096),
        ("F32", ((0, 0), (0, 0), (0, 0), (0, 1)), 8, 3088, 384, 24, 8, 1024),
        ("F32", ((0, 0), (0, 0), (0, 0), (0, 1)), 0, 3088, 384, 24, 16, 2048),
        ("F64", (*[(0, 0)] * 7, (0, 1)), 128, 3088, 448, 16, 8, 1024),
        ("F64", (*[(0, 0)] * 7, (0, 1)), 0, 3088, 448, 16, 8, 1024),
        ("BF16", ((0, 0), (0, 0)), 0, 0, 512, 24, 8, 0),
    ],
)
def test_what_planes_ask_for(
    dtype: str, planes: Any, pairs: int, room: int, raw: int, most: int, piece: int, rings: int
) -> None:
    found = need([_item(_header(dtype, planes), pairs=pairs)])
    assert (found.room, found.raw, found.most, found.piece, found.rings) == (room, raw, most, piece, rings)


def test_large_chunks_are_worth_sixteen_warps() -> None:
    for size, warps in ((16 << 10, 24), ((16 << 10) + 1, 16)):
        header = _header("F32", ((0, 0), (0, 0), (0, 0), (0, 1)), 10)
        found = need([_item(replace(header, blob_bytes=header.chunks_at + 10 * size))])
        assert (found.chunk, found.warps, found.most) == (size, warps, 24)


def test_a_fair_room_is_never_none_nor_more_than_all() -> None:
    for size, fair in ((8192, 3088), (8000, 3088), (12_000, 3088), (8192 + 1000, 1088)):
        header = _header("BF16", BF16)
        found = need([_item(replace(header, blob_bytes=header.chunks_at + 10 * size))])
        assert found.fair == fair, size
    assert need([_item(_header("BF16", BF16, 0))]).chunk == 0
