"""Products of many rows of x with experts in windows, run on the CPU, and when they are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend
from support.contents import rng
from support.emulated import CPU, kernel_on_cpu
from support.emulated_products import sums_of_runs
from support.held_experts import Held, of_batch

from tpde.cuda import many_experts, window_experts
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.expert_ways import MOST_EACH, MOST_EXPERTS, MOST_ROUTED, few_rows
from tpde.cuda.many_experts import WAYS, ManyExperts, most_rows, way_of, ways_of

HAVE = CPU._replace(capability=(9, 0), shared_bytes=227 << 10)
GPU = DeviceFacts("H200", (9, 0), 132, 227 << 10)
MANY = 65  # tokens, of which many are multiplied at a time

# Experts, parts, rows, columns: two chunks and more, tails, odd columns, stripes that are not whole, more of
# them than warps, rows of y at multiples of 16 bytes and elsewhere.
SHAPES = [
    (3, 1, 16, 512),
    (4, 2, 24, 600),
    (2, 2, 200, 257),
    (5, 1, 213, 1031),
    (2, 1, 320, 768),
]
CONTENTS = ["weights", "pruned", "escapes", "edges", "every_word"]


@pytest.fixture(autouse=True)
def hopper_on_cpu(launch_on: Callable[[Any], Any]) -> None:
    """Kernels run on the CPU, which is taken for a Hopper GPU."""
    launch_on(MadeBackend(kernel_on_cpu, HAVE))


def take(monkeypatch: pytest.MonkeyPatch, way: ManyExperts) -> None:
    """Have calls of many tokens take a way."""
    monkeypatch.setattr(window_experts, "_way_of", lambda *given: way if given[-2] >= MANY else None)


def needed(held: Held, x: np.ndarray, ids: Any, per: int, bias: np.ndarray | None) -> np.ndarray:
    """What windows.md 9.3 says of each row, by one run."""
    y = np.zeros((len(ids), held.parts * held.rows), np.uint16)
    for i, expert in enumerate(ids):
        for part in range(held.parts if 0 <= expert < held.experts else 0):
            rows = slice(part * held.rows, (part + 1) * held.rows)
            added = np.zeros(held.rows, np.uint16) if bias is None else bias[expert, rows]
            y[i, rows] = sums_of_runs(x[i // per][None], held.words[expert * held.parts + part], added)[0]
    return y


@pytest.mark.parametrize("way", WAYS, ids=lambda it: f"{it.rows}x{it.warps}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(shape: tuple[int, int, int, int], way: ManyExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows of an expert, one, several batches; rows without an expert; numbers of both sizes."""
    take(monkeypatch, way)
    experts, parts, rows, columns = shape
    held, draw = Held(*shape, CONTENTS[:2]), rng("many", *shape)
    bias = of_batch(experts, parts * rows)
    mixed = draw.integers(-1, experts + 1, 60)
    for per, ids, added in (
        (1, np.array([experts - 1]), None),
        (2, mixed, bias),
        (1, np.concatenate((np.zeros(way.rows + 9, np.int64), mixed[:20])).astype(np.int32), None),
        (1, np.array([experts] * 3 + [-1] * 2), bias),
    ):
        x = of_batch(-(-len(ids) // per), columns)
        found = held.product(x, ids, per, added, MANY)
        assert np.array_equal(found, needed(held, x, ids, per, added)), (per, ids)


@pytest.mark.parametrize("skew", [2, 16])
@pytest.mark.parametrize("contents", CONTENTS)
def test_words_of_any_kind(contents: str, skew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many escapes, both values of the flag, what is no number; whatever else is in the batch."""
    take(monkeypatch, WAYS[1])
    held = Held(3, 2, 40, 520, [contents, "weights"])
    ids = rng("kinds", contents).integers(0, 3, 70)
    x = of_batch(70, 520)
    found = held.product(x, ids, 1, None, MANY, skew)
    for i in (0, 33, 69):
        alone = held.product(x[i : i + 1], ids[i : i + 1], 1, None, MANY, skew)
        assert np.array_equal(alone[0], found[i])
    if contents != "edges" and contents != "every_word":
        assert np.array_equal(found, needed(held, x, ids, 1, None))


def test_batches_and_ways_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(4, 1, 150, 600, CONTENTS[:3])
    ids, x = rng("same").integers(0, 4, 300), of_batch(300, 600)
    made = []
    for way in WAYS:
        take(monkeypatch, way)
        made.append(held.product(x, ids, 1, None, MANY))
        order = rng("order", way.rows).permutation(300)
        assert np.array_equal(held.product(x[order], ids[order], 1, None, MANY), made[-1][order])
    assert all(np.array_equal(it, made[0]) for it in made)


def test_up_to_64_tokens_have_other_sums() -> None:
    """Those of `product`, of which each row has the bits it has alone."""
    held = Held(2, 1, 2000, 2048, ["weights"])
    ids, x = np.zeros(200, np.int64), of_batch(200, 2048)
    assert held.device.room(64, 200) == 0
    assert held.device.room(65, 200) > 0
    few = held.product(x[:3], ids[:3], 1, None, 64)
    assert np.array_equal(few, held.by_one(x[:3], ids[:3]))


def test_room_is_asked_for() -> None:
    held = Held(2, 1, 2000, 512, ["weights"])
    x = of_batch(200, 512)
    for at in (0, 64):
        with pytest.raises(ValueError, match="multiple of 128"):
            held.device.product(x.ctypes.data // 16 * 16, 512, 1, 128, 200, 128, 0, 0, tokens=65, room=at)


@pytest.mark.parametrize("way", WAYS, ids=lambda it: f"{it.rows}x{it.warps}")
def test_room_has_all_that_a_router_may_choose(way: ManyExperts) -> None:
    """Each expert's rows begin at a multiple of eight, and its last batch is not whole."""
    for experts, count in ((1, 1), (3, 100), (128, 1000), (128, 8000), (1024, 65536)):
        for sizes in (
            [count],
            [1] * min(experts, count) if count <= experts else [1] * (experts - 1) + [count - experts + 1],
            [count // experts + (i < count % experts) for i in range(experts)],
        ):
            at = way.room(300, experts, count)
            octets = sum(-(-it // 8) for it in sizes)
            batches = sum(-(-it // way.rows) for it in sizes)
            assert at.batches + 32 * batches <= at.eights
            assert at.eights + 4 * octets <= at.order
            assert at.order + 32 * octets <= at.x
            assert at.x % 128 == 0
            assert at.x + octets * 8 * 1024 <= at.nbytes


def test_when_they_are_taken() -> None:
    """As an H200 is faster: what is multiplied with so many rows of x, and up to how many."""

    def rows(columns: int, stripes: int, experts: int, tokens: int, each: int) -> int:
        found = way_of(GPU, columns, stripes, experts, tokens, tokens * each)
        return found.rows if found else 0

    # us on an H200, by few rows, 64, 128 and 256 at a time: 128 tokens 230, 178, 226 and 310, 512 tokens 497,
    # 202, 247 and 336; 2,000 tokens -, 470, 408 and 408, 4,000 tokens -, 850, 676 and 637.
    assert [rows(2048, 96, 128, it, 8) for it in (64, 65, 128, 512, 4000)] == [0, 0, 64, 64, 256]
    # Mixtral: 100 tokens 745, 409, 484 and 680, 256 tokens 1824, 584, 514 and 719, 1,000 tokens 1060 by 256.
    assert [rows(4096, 1792, 8, it, 2) for it in (64, 65, 256, 1000)] == [0, 64, 128, 256]
    assert rows(2048, 6, 4, 65, 1) == 0  # few tiles
    assert rows(2048, 6, 4, 600, 1) > 0  # more than few rows are
    for have in (
        GPU._replace(capability=(8, 0)),
        GPU._replace(capability=(10, 0)),
        GPU._replace(shared_bytes=163 << 10),
    ):
        assert not ways_of(have, 2048, 128)
        assert not most_rows(have, 2048, 96, 128)
        assert way_of(have, 2048, 96, 128, 512, 4096) is None
    assert not ways_of(GPU, 256, 128)  # one chunk
    assert not ways_of(GPU, 2048, MOST_EXPERTS + 1)
    # Decoding is as fast for 8,000 tokens: 1,060 us and 1,147.
    assert 4000 * 8 < most_rows(GPU, 2048, 96, 128) < 10000 * 8
    assert 1500 * 2 < most_rows(GPU, 14336, 256, 8) < 6000 * 2
    assert most_rows(GPU, 768, 6, 4) == 0  # decoded in no time
    part = GPU._replace(multiprocessors=16)  # which decodes as much more slowly
    assert most_rows(part, 2048, 96, 128) > 4000 * 8


def test_x_takes_a_quarter_of_what_decoding_does() -> None:
    for columns, stripes, experts in ((2048, 96, 128), (14336, 256, 8), (7168, 256, 256), (1000, 1792, 8)):
        most = most_rows(GPU, columns, stripes, experts)
        assert most
        room = max(it.room(columns, experts, most).nbytes for it in WAYS)
        assert room <= 1.02 * 2 * 16 * experts * stripes * columns / 4


def test_what_is_taken_is_multiplied() -> None:
    """Few rows, or many; between them nothing is refused that was taken."""
    for columns, stripes, experts, each in (
        (2048, 96, 128, 8),
        (14336, 256, 8, 2),
        (768, 6, 4, 2),
        (7168, 256, 256, 8),
    ):
        most = most_rows(GPU, columns, stripes, experts)
        for tokens in (1, 64, 65, 100, 300, 512, 513, 1000, 3000, 6000):
            count = tokens * each
            taken = few_rows(experts, tokens, count) or (tokens > 64 and count <= most)
            how = way_of(GPU, columns, stripes, experts, tokens, count)
            if taken and how is None:
                assert count <= min(MOST_ROUTED, MOST_EACH * experts)


def test_estimates_are_of_what_there_is() -> None:
    way = many_experts.WAYS[0]
    assert way.tiles(96, 128, 4096) == 128 * 8  # 32 rows of each
    assert way.tiles(96, 128, 8192) == 1.5 * 128 * 8
    assert way.tiles(97, 128, 8) == 8 * 9  # of so many experts, one row each
