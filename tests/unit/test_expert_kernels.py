"""The kernels of experts in windows, run on the CPU: their rows, and products with the bits of `product`."""

from __future__ import annotations

import numpy as np
import pytest
from support.contents import rng
from support.emulated import CPU, windows_on_cpu  # noqa: F401
from support.held_experts import Held, of_batch
from support.window_encoding import guards, room

from tpde.codec import window_plan, windows, windows_reference
from tpde.cuda import expert_ways, window_experts
from tpde.cuda.expert_ways import MOST_EXPERTS, MOST_ROUTED, expert_products
from tpde.cuda.window_experts import DeviceExperts
from tpde.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("windows_on_cpu")


# Experts, parts, rows, columns: parts of a sum of their own up to eight, tails, odd columns, idle warps.
SHAPES = [
    (1, 1, 1, 1),
    (3, 1, 17, 5),
    (4, 2, 24, 70),
    (5, 2, 33, 300),
    (2, 1, 16, 512),
    (3, 2, 40, 768),
    (2, 1, 20, 1100),
    (2, 2, 20, 2048),
    (2, 1, 18, 2304 + 3),
]
CONTENTS = ["weights", "pruned", "escapes", "edges", "every_word"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(shape: tuple[int, int, int, int]) -> None:
    """No rows, one, and many of an expert; both values of the flag; rows without an expert."""
    experts, parts, rows, columns = shape
    held = Held(*shape, CONTENTS)
    assert len({int(it) for it in held.device.table[:, 6]}) == min(experts * parts, 2)
    draw = rng("ids", *shape)
    bias = of_batch(experts, parts * rows)
    for per, ids in (
        (1, [0]),
        (1, [experts - 1] * 9),
        (2, draw.integers(-1, experts + 1, 6).tolist()),
        (1, draw.integers(-1, experts + 1, 37).tolist()),
        (1, [experts] * 3),
        (1, [-1] * 3),
        (1, [-1] * 40),
        (1, [experts - 1, *[-1] * 7, -(2**31)]),
    ):
        x = of_batch(-(-len(ids) // per), columns)
        for added in (None, bias):
            found = held.product(x, ids, per, added)
            assert np.array_equal(found, held.by_one(x, ids, per, added)), (per, ids)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", expert_ways._WAYS, ids=str)
def test_ways_change_nothing(
    way: tuple[int, bool, int, int], shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(*shape, CONTENTS)
    monkeypatch.setattr(expert_ways, "_WAYS", (way,))
    for count, kind in ((5, np.int64), (32, np.int32), (33, np.int32), (90, np.int64)):
        ids = rng("ids", way[0], count).integers(-1, shape[0] + 1, count).astype(kind)
        x = of_batch(count, shape[3])
        assert np.array_equal(held.product(x, ids), held.by_one(x, ids))


def test_whole_numbers_are_exact() -> None:
    """Against plain arithmetic on what the reference decodes: no order of sums changes these."""
    draw = rng("whole")
    held = Held(4, 1, 40, 520, ["weights"])
    for i, blob in enumerate(held.blobs):
        values = draw.integers(-4, 5, (40, 520)).astype(np.float32)
        made = window_plan.encode((values.view(np.uint32) >> 16).astype(np.uint16))
        held.blobs[i] = room(made.size, 128, 0)
        held.blobs[i][:] = made
        assert blob.size
    found = [(windows.validate(it), it.ctypes.data) for it in held.blobs]
    held.device = DeviceExperts(found, 4, False, 0)
    held.device.table_at = held.device.table.ctypes.data
    x = draw.integers(-3, 4, (30, 520)).astype(np.float32)
    ids = draw.integers(0, 4, 30)
    plain = [
        (windows_reference.decode(it.tobytes()).astype(np.uint32) << 16).view(np.float32) for it in held.blobs
    ]
    needed = np.stack([plain[e] @ row for e, row in zip(ids, x, strict=True)]).astype(np.float32)
    y = held.product((x.view(np.uint32) >> 16).astype(np.uint16), ids)
    bits = needed.view(np.uint32)
    assert np.array_equal(y, (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16))


def test_what_is_no_number_reaches_the_rows_that_have_it_alone() -> None:
    held = Held(2, 1, 20, 64, ["edges", "weights"])
    x = of_batch(2, 64)
    found = held.product(x, [0, 1])
    wrong = (found & 0x7F80) == 0x7F80
    assert wrong[0].any()
    assert not wrong[1].any()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_exact(shape: tuple[int, int, int, int], turned: bool) -> None:
    experts, parts, rows, columns = shape
    if turned and parts > 1:
        parts, rows = 1, rows * parts
    held = Held(experts, parts, rows, columns, CONTENTS, turned)
    plain = np.stack(held.words).reshape(experts, parts * rows, columns)
    needed = np.ascontiguousarray(plain.swapaxes(1, 2)) if turned else plain
    size = needed[0].size
    for first, count in ((0, experts), (experts - 1, 1), (0, 1)):
        for at in (0, 1):
            out = room(2 * (needed.size + at), 16, 0xA5).view(np.uint16)[at:]
            held.device.decode(out.ctypes.data, 0, first=first, count=count)
            before = np.full(needed.size, 0xA5A5, np.uint16)
            before[first * size : (first + count) * size] = needed.reshape(experts, -1)[
                first : first + count
            ].reshape(-1)
            assert np.array_equal(out, before)
    numbers = np.array(sorted({0, experts - 1}), np.uint32)
    out = room(2 * needed.size, 16, 0xA5).view(np.uint16)
    held.device.decode(out.ctypes.data, 0, count=numbers.size, numbers=numbers.ctypes.data)
    for number, found in enumerate(out.reshape(experts, -1)):
        right = needed[number].reshape(-1) if number in numbers else np.full(size, 0xA5A5)
        assert np.array_equal(found, right)


def test_many_experts_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(7, 1, 20, 300, ["weights"])
    monkeypatch.setattr(window_experts, "_MOST_CHUNKS", 10)  # two experts of four chunks each
    out = np.zeros((7, 20, 300), np.uint16)
    held.device.decode(out.ctypes.data, 0)
    assert np.array_equal(out, np.stack(held.words))
    out[:] = 0
    numbers = np.array([1, 2, 6], np.uint32)
    held.device.decode(out.ctypes.data, 0, count=3, numbers=numbers.ctypes.data)
    assert np.array_equal(out[[1, 2, 6]], np.stack(held.words)[[1, 2, 6]])
    assert not out[[0, 3, 4, 5]].any()


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_every_way_fits(shared: int) -> None:
    have = CPU._replace(shared_bytes=shared, multiprocessors=132)
    for columns in (8, 768, 2048, 14336):
        for experts in (1, 8, 128, MOST_EXPERTS):
            for count in (1, 64, 512, MOST_ROUTED):
                ways = expert_products(columns, 96, experts, count, have)
                assert ways
                for how in ways:
                    assert how.shared <= shared
                    assert how.blocks * (how.shared + 1024) <= shared + 1024
                    sums = (1536 if how.alone else 1024) * how.rows // 8
                    assert how.shared >= how.warps * (9728 + sums) + 6 * experts + 2 * count + 4
                    assert how.warps * sums >= 4 * MOST_EXPERTS  # counts are where sums are later


def test_the_way_is_chosen_by_how_much_there_is_to_do() -> None:
    have = CPU._replace(shared_bytes=227 << 10, multiprocessors=132)

    def first(columns: int, stripes: int, experts: int, count: int) -> tuple[int, bool]:
        return expert_products(columns, stripes, experts, count, have)[0][:2]

    assert first(2048, 96, 128, 8) == (8, True)
    assert first(14336, 256, 8, 2) == (8, False)  # of two experts' stripes, most warps would have none
    assert [first(2048, 96, 128, it) for it in (768, 769, 1536, 1537, 4096)] == [
        (8, True),
        (16, True),
        (16, True),
        (32, True),
        (32, True),
    ]
    small = have._replace(shared_bytes=99 << 10)
    assert expert_products(2048, 96, 128, 4096, small)[0][:2] == (8, False)


@pytest.mark.parametrize(("tokens", "each", "width"), [(1, 1, 1), (3, 8, 516), (2, 3, 1030), (5, 2, 34)])
def test_sums_are_rounded_row_by_row(tokens: int, each: int, width: int) -> None:
    held = Held(1, 1, width, 8, ["weights"])
    y = of_batch(tokens * each, width)
    y[0, 0] = 0x8000
    scores = rng("scores", tokens).standard_normal((tokens, each)).astype(np.float32)
    out = room(2 * tokens * width, 8, 0x5A)
    there = room(y.nbytes, 8, 0)
    there[:] = y.view(np.uint8).reshape(-1)
    held.device.weighted(there.ctypes.data, scores.ctypes.data, tokens, each, out.ctypes.data, 0)
    assert (guards(out) == 0x5A).all()
    values = (y.astype(np.uint32) << 16).view(np.float32).reshape(tokens, each, width)
    needed = np.zeros((tokens, width), np.float32)
    for k in range(each):
        needed = needed + scores[:, k, None] * values[:, k]
    bits = needed.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    assert np.array_equal(out.view(np.uint16).reshape(tokens, width), rounded)


def test_what_cannot_be_launched_is_refused() -> None:
    held = Held(2, 1, 16, 64, ["weights"])
    for x, stride, count in ((2, 64, 1), (0, 60, 1), (0, 64, 0), (0, 64, MOST_ROUTED + 1)):
        with pytest.raises(ValueError):
            held.device.product(x, stride, 1, 0, count, 0, 0, 0)
    one, other = (windows.sections(*it) for it in ((16, 64), (16, 128)))
    for given, experts, turned in (([one, other], 2, False), ([one] * 3, 2, False), ([one] * 4, 2, True)):
        with pytest.raises(InvalidInput, match="are no 2 experts"):
            DeviceExperts([(it, 128) for it in given], experts, turned, 0)
    with pytest.raises(ValueError, match="multiple of 128"):
        DeviceExperts([(one, 64)], 1, False, 0)
