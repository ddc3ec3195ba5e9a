"""Products of many rows of x in one launch, run on the CPU, and when they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend, MadeKernel
from support.emulated import CPU
from support.emulated_products import Made
from support.window_products import H200, Launches, there

from tpde.codec import windows
from tpde.codec.windows import sections
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.many_rows import MOST, blocks_of, how_many, many_way, room_of
from tpde.cuda.window_launches import NO_STEPS, steps_of

H100 = DeviceFacts("H100", (9, 0), 132, H200)


def fp32(words: Any) -> Any:
    return (words.astype(np.uint32) << 16).view(np.float32)


def one_after_the_other(made: Made) -> Any:
    """What windows.md 9.3 says, with sums of 16 products as the emulated instruction has them."""
    columns = made.window.columns
    sides = fp32(made.x[:, :columns]).astype(np.float64), fp32(windows.decode(made.blob)).astype(np.float64)
    x, words = (np.pad(it, ((0, 0), (0, -columns % 32))) for it in sides)
    sums = np.zeros((len(x), len(words)), np.float32)
    for tile in range(0, x.shape[1], 32):
        for fragment in (0, 4):
            products = np.zeros(sums.shape)
            for k in range(16):
                column = tile + fragment + 8 * (k // 2 % 4) + k % 2 + 2 * (k // 8)
                products += np.outer(x[:, column], words[:, column])
            sums = (sums.astype(np.float64) + products).astype(np.float32)
    bits = (sums + fp32(made.bias)).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    ("rows", "columns", "count", "blocks"),
    [
        (335, 512, 300, 2),  # rows of y at multiples of 16 bytes, but for those of the last stripe
        (332, 512, 260, 2),  # rows of y elsewhere
        (300, 600, 257, 1),  # elsewhere; a chunk of two pairs; a block that takes all six tiles
        (513, 328, 40, 2),  # stripes that are not there; of five tiles, one is cut
        (513, 600, 300, 3),  # ten tiles, of which four are for three blocks
        (513, 600, 300, 7),  # seven blocks begin or end some of three
        (513, 600, 300, 4),  # a third of a round
        (513, 600, 300, 9),
        (800, 600, 40, 4),  # seven tiles: three of four blocks have one more, and none is cut
        (900, 1100, 40, 5),  # eight tiles, of which three are left: a block ends one and begins another
        (40, 2050, 520, 3),  # a chunk of one pair
        (2100, 256, 6, 2),  # one chunk: a tile's first is the next one of another
    ],
)
def test_bits(rows: int, columns: int, count: int, blocks: int) -> None:
    made = Made(rows, columns, count, escapes=columns in (512, 600))
    have = CPU._replace(multiprocessors=blocks)
    assert blocks_of(have, made.window, count) == blocks
    found = made.by(many_way(have, made.window, count), blocks)
    assert np.array_equal(found[:-1, :-1], one_after_the_other(made))
    assert (found[-1] == 0x7777).all()
    assert (found[:, -1] == 0x7777).all()


def test_other_rows_of_x_change_nothing() -> None:
    made = Made(48, 328, 300, escapes=False)
    whole = made.by(many_way(CPU, made.window, 300), 1)
    made.x = np.ascontiguousarray(made.x[100:140])
    assert np.array_equal(made.by(many_way(CPU, made.window, 40), 1)[:-1], whole[100:140])


def test_what_an_h100_measured() -> None:
    """The fastest of decoding, two launches and one, of products whose times are apart by a tenth."""
    found = {
        (rows, columns, count): how_many(H100, sections(rows, columns), count)
        for rows, columns in ((28672, 4096), (4096, 14336), (4096, 4096), (6144, 4096), (3072, 2048))
        for count in (136, 256, 512, 1000, 2048)
    }
    assert {key for key, how in found.items() if how == "many"} == {
        *((28672, 4096, count) for count in (136, 256, 512, 1000)),
        (4096, 14336, 1000),
        (4096, 4096, 1000),
        *((6144, 4096, count) for count in (512, 1000)),
    }
    assert {key for key, how in found.items() if how == "parts"} >= {
        *((rows, 4096, count) for rows in (4096, 6144) for count in (136, 256)),
        *((4096, 14336, count) for count in (136, 256)),
    }
    assert found[3072, 2048, 256] is None
    assert all(found[key] is None for key in found if key[2] == 2048)


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
        for count in range(129, MOST + 1, 100):
            if how_many(H100, window, count) == "many":
                assert room_of(H100, window, count) <= min(80 << 20, 2 * rows * columns)
    assert how_many(H100, sections(6144, 4096), 1024) == "many"
    assert how_many(H100, sections(6144, 4096), 1025) is None  # 240 tiles take as long as 264
    assert how_many(H100, sections(8192, 28672), 1000) == "many"
    assert how_many(H100, sections(8192, 28672), 1100) is None
    assert many_way(H100, sections(4096, 4096), 1000).shared <= H200


def test_blocks() -> None:
    """One for each multiprocessor, but no more than there are tiles of eight stripes and 256 rows of x."""
    assert blocks_of(H100, sections(4096, 4096), 1000) == 128
    assert blocks_of(H100, sections(4097, 4096), 1025) == 132
    assert blocks_of(H100, sections(100, 4096), 257) == 2


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


@pytest.mark.parametrize("count", [161, 256])
def test_two_launches(launch_on: Any, count: int) -> None:
    found = Launches(launch_on, (9, 0))
    made = there(sections(4096, 4096))
    assert made.room(count) == 16 * 128 * 512
    made.product(32, 4096, count, 48, 5000, 77, 5, 4112)
    needed: list[tuple[Any, ...]] = []
    for number, some in enumerate((128, count - 128)):
        x, y = 32 + 2 * 4096 * 128 * number, 48 + 2 * 5000 * 128 * number
        needed += [("arrange", x, 4096, some, 4096, 4112), ("wide_product", 4112, some, y, 5000, 77)]
    assert [(it[0], *it[-5:]) for it in found] == needed


def test_where_no_cluster_has_room_matrices_are_decoded(launch_on: Any) -> None:
    """As on a part of a device: two launches would be sixteen."""
    found = Launches(launch_on, (9, 0), clusters=0)
    made = there(sections(4096, 4096))
    assert [made.takes(count) for count in (128, 129, 200, 256)] == [True, False, False, False]
    with pytest.raises(ValueError, match="many_product is for exactly 200 rows of x, not 300"):
        made.choose(300, many_way(CPU, made.window, 200))
    made.choose(200, many_way(CPU, made.window, 200))  # in one launch all the same
    made.product(32, 4096, 200, 48, 5000, 77, 5, 4112)
    assert [it[0] for it in found] == ["arrange", "many_product"]


def test_what_is_decoded(launch_on: Any) -> None:
    Launches(launch_on, (9, 0))
    made = there(sections(3072, 2048))
    assert made.takes(128)
    assert not made.takes(256)
    assert not made.takes(10**9)
    with pytest.raises(ValueError, match="for 256 rows of x a matrix is decoded"):
        made.product(32, 2048, 256, 48, 3072, 0, 5, 4112)
    assert steps_of(MadeBackend(None, H100), sections(28672, 4096), MOST + 1, 0) is NO_STEPS  # type: ignore[arg-type]
