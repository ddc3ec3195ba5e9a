"""Timing ways of products, on the CPU: kernels are emulated, and clocks are made up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from support.backends import MadeBackend, MadeKernel
from support.emulated import CPU, kernel_on_cpu
from support.models import torch
from support.pretended import on_cpu, pretended  # noqa: F401

from tpde.codec.windows import sections
from tpde.cuda.product_ways import ways_of
from tpde.errors import OutOfMemory
from tpde.weights.product_timing import Sample, Timed, on_gpu, time_products

DEVICE = torch.device("cuda", 0)
SHAPE = 40, 300


FEW = Sample(cold_bytes=1 << 16, least_products=6)


@pytest.fixture(autouse=True)
def kernels(pretended: None, launch_on: Any) -> None:  # noqa: F811
    """A device without groups of warps."""
    launch_on(MadeBackend(kernel_on_cpu, CPU))


class Clock:
    """Runs work each time, and says that it took what it was told, or twice or three times as long."""

    def __init__(self, *seconds: float) -> None:
        self._seconds, self.order, self._made = seconds, list[int](), 0

    def __call__(self, work: Callable[[int], None]) -> Callable[[], float]:
        number, self._made = self._made, self._made + 1

        def run() -> float:
            work(0)
            self.order.append(number)
            return self._seconds[number % len(self._seconds)] * (1 + self.order.count(number) % 3)

        return run


def test_every_way_is_timed_in_turns() -> None:
    clock = Clock(6.0, 3.0)
    (timed,) = time_products(SHAPE, [3], DEVICE, clock, FEW)
    ways = ways_of(CPU, sections(*SHAPE), 3)
    assert (timed.rows, timed.columns, timed.x_rows) == (*SHAPE, 3)
    assert [*timed.seconds] == [it.label for it in ways]
    assert len(ways) == 2
    assert clock.order == [0, 1] + [0, 1] * FEW.runs  # the first of each warms up
    # Twice is the median of the runs that count; each has 6 products.
    assert [*timed.seconds.values()] == [2.0, 1.0]
    assert timed.default == ways[0].label
    assert timed.best == ways[1].label


def test_matrices_are_multiplied_in_turn(launch_on: Any) -> None:
    """There are as many as the cache does not hold, each at an address of its own."""
    places: list[int] = []

    def kernel(source: str, name: str, *given: Any, **more: Any) -> MadeKernel:
        return MadeKernel(lambda *_, **__: lambda stream, *arguments: places.append(int(arguments[0])))

    launch_on(MadeBackend(kernel, CPU))
    for _ in time_products(SHAPE, [1], DEVICE, Clock(1.0), FEW._replace(least_products=2)):
        pass
    cycle = [*dict.fromkeys(places)]
    steps = {after - before for before, after in pairwise(cycle)}
    assert len(steps) == 1
    assert steps.pop() * (len(cycle) - 1) < 1 << 16 <= (cycle[1] - cycle[0]) * len(cycle)
    assert places == cycle * (len(places) // len(cycle))
    assert len(places) // len(cycle) == 2 * (1 + FEW.runs)  # of each way


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"a": 1.0, "b": 2.0}, "a"),
        ({"a": 1.0, "b": 0.99}, "a"),  # noise
        ({"a": 1.0, "b": 0.98}, "b"),
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
        ({"a": 1.0}, "a"),
    ],
)
def test_another_way_must_gain_more_than_noise(seconds: dict[str, float], best: str) -> None:
    timed = Timed(1, 1, 1, seconds)
    assert (timed.default, timed.best) == ("a", best)


def test_a_way_with_other_bits_ends_the_measurement(launch_on: Any) -> None:
    def kernel(source: str, name: str, defines: Any, device: int, **more: Any) -> Any:
        made = kernel_on_cpu(source, name, defines, device, **more)
        if defines.get("SHARED") == 0 and name == "product":
            return MadeKernel(lambda *_, **__: lambda *arguments: None)  # writes nothing
        return made

    launch_on(MadeBackend(kernel, CPU))
    with pytest.raises(AssertionError, match=r"40 x 300, 3 rows of x: other bits by Product.*SHARED.*report"):
        [*time_products(SHAPE, [3], DEVICE, Clock(1.0), FEW)]


def test_ways_without_room_are_left_out(launch_on: Any) -> None:
    """A part of a device runs no clusters."""
    facts = CPU._replace(capability=(9, 0), shared_bytes=227 << 10)

    def kernel(source: str, name: str, *given: Any, **more: Any) -> Any:
        if name == "group_product":
            return MadeKernel(lambda *_, **__: pytest.fail("there is no room"), clusters=0)
        return MadeKernel(lambda *_, **__: lambda *arguments: None)

    launch_on(MadeBackend(kernel, facts))
    (timed,) = time_products((16, 2048), [16], DEVICE, Clock(1.0), FEW)
    assert {it.split()[0] for it in timed.seconds} == {"product"}


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*size: Any, **options: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.\nMore lines")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(OutOfMemory, match=r"40 x 300 words .* do not fit on cuda:0 .*1 EiB.\); free some"):
        next(time_products(SHAPE, [1], DEVICE))


def test_work_is_recorded_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: a first run compiles and loads, the second is recorded, those that are timed are replays.

    The first waits for what was queued before, such as what makes x.
    """
    happened: list[Any] = []
    monkeypatch.setattr(type(torch.cuda.Stream()), "wait_stream", lambda *_: happened.append("wait"))
    graph = type("Graph", (), {"replay": lambda self: happened.append("replay")})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    run = on_gpu(happened.append)
    assert happened == ["wait", 0, 0]
    assert run() > 0
    assert happened == ["wait", 0, 0, "replay"]
