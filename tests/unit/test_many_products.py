"""Products of many rows of x in one launch, run on the CPU, and when they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend, MadeKernel
from support.emulated import CPU
from support.emulated_products import Made, of_runs
from support.tiles import KINDS, share_out
from support.window_products import H200, Launches, there

from tpde.codec.windows import sections
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.many_rows import MOST, beats_decoding, blocks_of, many_way, room_of, shares_of
from tpde.cuda.window_launches import NO_STEPS, steps_of

H100 = DeviceFacts("H100", (9, 0), 132, H200)


@pytest.mark.parametrize(
    ("rows", "columns", "count", "blocks", "kind"),
    [
        (335, 512, 300, 2, 0),  # rows of y at multiples of 16 bytes, but for those of the last stripe
        (332, 512, 260, 2, 0),  # rows of y elsewhere
        (300, 600, 257, 1, 0),  # elsewhere; a chunk of two pairs; a block that takes all six tiles
        (513, 328, 40, 2, 0),  # stripes that are not there; of five tiles, one is cut
        (513, 600, 300, 3, 0),  # ten tiles, of which four are for three blocks
        (513, 600, 300, 7, 0),  # seven blocks begin or end some of three
        (513, 600, 300, 4, 0),  # a third of a round
        (513, 600, 300, 9, 0),
        (800, 600, 40, 4, 0),  # seven tiles: three of four blocks have one more, and none is cut
        (900, 1100, 40, 5, 0),  # eight tiles, of which three are left: a block ends one and begins another
        (40, 2050, 520, 3, 0),  # a chunk of one pair
        (2100, 256, 6, 2, 0),  # one chunk: a tile's first is the next one of another
        (335, 512, 128, 2, 1),  # of three tiles, two are cut
        (332, 600, 100, 3, 2),  # two tiles; rows of x that are not there
        (513, 1100, 65, 2, 2),  # of three tiles of twelve stripes, two are cut
        (900, 600, 130, 4, 1),  # sixteen tiles, two beside each other
        (2100, 256, 6, 5, 2),
    ],
)
def test_bits(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, count: int, blocks: int, kind: int
) -> None:
    tiles = share_out(monkeypatch, 1, KINDS[kind])
    made = Made(rows, columns, count, escapes=columns in (512, 600))
    blocks = min(blocks, tiles.number(made.window, count))
    have = CPU._replace(multiprocessors=blocks)
    assert blocks_of(have, made.window, count) == blocks
    found = made.by(many_way(have, made.window, count), blocks)
    assert np.array_equal(found[:-1, :-1], of_runs(made, 1))
    assert (found[-1] == 0x7777).all()
    assert (found[:, -1] == 0x7777).all()


@pytest.mark.parametrize(
    ("rows", "columns", "count", "runs", "kind"),
    [
        # Rows of y that are not at multiples of 16 bytes; a last chunk that is not whole.
        (332, 1100, 300, 2, 0),
        (335, 1024, 130, 4, 0),  # rows of x that are not there, of whole groups of 64 and of others
        (129, 1400, 257, 3, 0),
        (48, 2050, 20, 8, 0),  # runs of one chunk, and of two
        (332, 1100, 128, 2, 1),
        (335, 1024, 65, 4, 2),  # fewer groups of rows of x than runs
        (48, 2050, 50, 8, 1),
        (300, 1400, 200, 3, 2),
        (100, 4200, 65, 16, 1),  # as many runs as there may be
    ],
)
def test_runs(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, count: int, runs: int, kind: int
) -> None:
    made = Made(rows, columns, count, escapes=columns == 1024)
    (of_x, warps), _ = KINDS[kind], share_out(monkeypatch, runs, KINDS[kind])
    blocks = runs * -(-rows // (16 * warps)) * -(-count // of_x)
    assert blocks_of(CPU, made.window, count) == blocks
    found = made.by(many_way(CPU, made.window, count), blocks)
    assert np.array_equal(found[:-1, :-1], of_runs(made, runs))
    assert (found[-1] == 0x7777).all()
    assert (found[:, -1] == 0x7777).all()


def test_other_rows_of_x_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by how many of them a tile goes."""
    made = Made(48, 328, 300, escapes=False)
    share_out(monkeypatch, 1)
    whole = made.by(many_way(CPU, made.window, 300), 1)
    made.x = np.ascontiguousarray(made.x[100:140])
    for kind in KINDS:
        share_out(monkeypatch, 1, kind)
        assert np.array_equal(made.by(many_way(CPU, made.window, 40), 1)[:-1], whole[100:140])


def test_what_is_multiplied() -> None:
    """Large matrices, as an H100 is faster then; not what the model says is faster decoded."""
    found = {
        (rows, columns, count): beats_decoding(H100, sections(rows, columns), count)
        for rows, columns in ((28672, 4096), (4096, 14336), (4096, 4096), (6144, 4096), (3072, 2048))
        for count in (136, 256, 512, 1000, 2048)
    }
    assert found == {key: key[1] > 2048 and key[2] < 2048 for key in found}
    few = (28672, 4096), (4096, 14336), (4096, 4096), (3072, 2048), (2048, 8192), (128256, 2048)
    assert all(beats_decoding(H100, sections(*shape), count) for shape in few for count in (65, 128))
    assert not beats_decoding(H100, sections(1000, 3000), 128)  # 18 us on an H200, decoding 15.5
    part = H100._replace(multiprocessors=16)  # which also decodes and multiplies as much more slowly
    assert all(beats_decoding(part, sections(28672, 4096), count) for count in (65, 128, 512))


@pytest.mark.parametrize(
    ("rows", "columns", "count", "runs"),
    [
        (4096, 4096, 256, 4),  # us on an H100, with 1, 2, 3, 4 and 5 runs: 48, 32, 29, 26 and 52
        (4096, 14336, 512, 2),  # 166, 106, 148
        (5120, 25600, 256, 3),  # 283, 157, 127 and 190
        (5120, 25600, 512, 3),  # 321, 344, 256 and 297
        (6144, 4096, 256, 2),  # 48, 35 and 59
        (10240, 5120, 256, 1),  # 64, 85 and 78
        (6144, 4096, 768, 1),  # as many tiles as multiprocessors, and more
        (8192, 256, 256, 1),  # one chunk
        (2048, 2304, 256, 3),  # with more, sums would take more memory than the decoded matrix
    ],
)
def test_how_many_runs(rows: int, columns: int, count: int, runs: int) -> None:
    window = sections(rows, columns)
    found, number = shares_of(H100, window, count)
    assert (found.rows, found.warps, number) == (256, 8, runs)
    tiles = -(-rows // 128) * -(-count // 256)
    if runs > 1:
        assert blocks_of(H100, window, count) == tiles * runs
        x = -(-columns // 256) * 256 * 512 * -(-count // 256)
        assert room_of(H100, window, count) == x + 8192 + tiles * runs * 131072 <= 2 * rows * columns


@pytest.mark.parametrize(
    ("rows", "columns", "warps", "runs"),
    [
        (6144, 4096, 12, 4),  # us on an H200; by eight warps 25.3 with two runs
        (4096, 4096, 8, 4),  # 18.8; by twelve with six runs 20.9
        (28672, 4096, 12, 1),  # 73.0; by eight 76.7
        (16384, 2048, 8, 1),  # 24.7; by twelve 28.7
        (2048, 8192, 8, 8),  # 19.2; by twelve with eleven runs 21.6
        (3072, 2048, 8, 4),  # 13.6; by twelve with eight runs 16.1
        (10240, 8192, 12, 2),  # 56.8; by eight 73.8
        (4000, 2240, 8, 3),  # 16.0; by twelve with five runs 18.1
        (14336, 5120, 8, 1),  # 50.5; by twelve 62.6
        (2048, 2304, 8, 5),  # with nine, sums would take more memory than the decoded matrix
    ],
)
@pytest.mark.parametrize("count", [65, 128])
def test_which_tiles_few_rows_have(rows: int, columns: int, warps: int, runs: int, count: int) -> None:
    window = sections(rows, columns)
    assert shares_of(H100, window, count)[1] == runs
    how = many_way(H100, window, count)
    assert (how.width, how.defines["WIDE"], how.warps) == (128, warps, warps + 4)
    assert how.shared == 4 * 128 * 128 + warps * 11776 + 64 + 40 <= H200
    tiles = -(-rows // (16 * warps))
    blocks = blocks_of(H100, window, count)
    assert blocks == (runs * tiles if runs > 1 else min(tiles, 132))
    sums = blocks * warps * 128 * 64 if runs > 1 or 0 < tiles % blocks < 99 else 0
    x = -(-columns // 256) * 256 * 128 * 2
    assert how.room == room_of(H100, window, count) == x + 1024 * warps + sums <= 2 * rows * columns


@pytest.mark.parametrize(
    ("capability", "columns"), [((8, 0), 4096), ((10, 0), 4096), ((9, 0), 1792)], ids=str
)
def test_what_others_decode(launch_on: Any, capability: tuple[int, int], columns: int) -> None:
    """Other GPUs, and for short rows all."""
    have = DeviceFacts("GPU", capability, 132, H200)
    launch_on(MadeBackend(lambda *_, **__: MadeKernel(lambda *_, **__: None), have))
    made = there(sections(28672, columns))
    taken = [count for count in range(1, MOST + 2) if made.takes(count)]
    assert taken == list(range(1, 65))


def test_room_is_no_more_than_decoding_takes() -> None:
    for rows, columns in ((28672, 4096), (8192, 28672), (57344, 8192), (600, 40_000)):
        window = sections(rows, columns)
        for count in range(65, MOST + 1, 50):
            if beats_decoding(H100, window, count):
                assert room_of(H100, window, count) <= min(80 << 20, 2 * rows * columns)
    assert beats_decoding(H100, sections(6144, 4096), 1024)
    assert not beats_decoding(H100, sections(6144, 4096), 1025)  # 240 tiles take as long as 264
    assert beats_decoding(H100, sections(8192, 28672), 1000)
    assert not beats_decoding(H100, sections(8192, 28672), 1100)
    assert many_way(H100, sections(4096, 4096), 1000).shared <= H200


def test_blocks() -> None:
    """One for each multiprocessor, but no more than there are tiles of eight stripes and 256 rows of x."""
    assert blocks_of(H100, sections(4096, 4096), 1000) == 128
    assert blocks_of(H100, sections(4097, 4096), 1025) == 132
    assert blocks_of(H100, sections(100, 1024), 257) == 2


def test_one_launch(launch_on: Any) -> None:
    found = Launches(launch_on, (9, 0))
    made = there(sections(28672, 4096))
    assert made.takes(300)
    assert made.room(300) == 2 * 16 * 256 * 512 + 8192 + 132 * 131072  # x, flags, sums of a tile each
    made.product(32, 4096, 300, 48, 30000, 77, 5, 4112)
    assert [(it[:2], it[-5:]) for it in found] == [
        (("arrange", 5), (32, 4096, 300, 4096, 4112)),
        (("many_product", 5), (4112, 300, 48, 30000, 77)),
    ]
    assert [it[:2] for it in found.made] == [("many_product", 132), ("arrange", 1056)]
    assert made.room(1024) == 4 * 16 * 256 * 512 + 8192  # 104 of 132 blocks have a tile in the last round


def test_one_launch_of_runs(launch_on: Any) -> None:
    """Also on a part of a device that has no room for a cluster."""
    found = Launches(launch_on, (9, 0), clusters=0)
    made = there(sections(4096, 4096))
    assert [made.takes(count) for count in (64, 65, 128, 129, 200, 256)] == [True] * 6
    assert made.room(200) == 16 * 256 * 512 + 8192 + 128 * 131072  # x, counts, sums of four runs of 32 tiles
    made.product(32, 4096, 200, 48, 5000, 77, 5, 4112)
    assert [(it[0], *it[-5:]) for it in found] == [
        ("arrange", 32, 4096, 200, 4096, 4112),
        ("many_product", 4112, 200, 48, 5000, 77),
    ]
    assert ("many_product", 128) in [it[:2] for it in found.made]
    with pytest.raises(ValueError, match="many_product is for exactly 200 rows of x, not 300"):
        made.choose(300, many_way(CPU, made.window, 200))


def test_what_is_decoded(launch_on: Any) -> None:
    Launches(launch_on, (9, 0))
    made = there(sections(3072, 2048))
    assert made.takes(128)
    assert not made.takes(256)
    assert not made.takes(10**9)
    with pytest.raises(ValueError, match="for 256 rows of x a matrix is decoded"):
        made.product(32, 2048, 256, 48, 3072, 0, 5, 4112)
    assert steps_of(MadeBackend(None, H100), sections(28672, 4096), MOST + 1, 0) is NO_STEPS  # type: ignore[arg-type]
