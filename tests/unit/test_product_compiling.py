"""Kernels of products from windows are compiled at a time, once, ahead where asked for; and what fails."""

from __future__ import annotations

import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.backends import MadeBackend, MadeKernel
from support.window_products import H200, there

from tpde.codec.windows import sections
from tpde.cuda import compiling, expert_ways, window_experts
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import MOST_ROWS
from tpde.cuda.window_products import compile_ahead
from tpde.errors import CompileError, UnsupportedDevice

_ALL = {"rows", "lookup", "product", "group_product", "wide_product", "many_product"}


def _asked(source: str, name: str) -> str:
    """What arranges x is compiled with the product that takes it."""
    return (
        {"window_wide.cu": "wide_product", "window_many.cu": "many_product"}[source]
        if name == "arrange"
        else name
    )


def test_kernels_of_a_shape_are_asked_for_at_a_time(launch_on: Any) -> None:
    """By other threads, each once, before this one asks."""
    asked: list[tuple[str, str]] = []
    here, two = threading.current_thread(), threading.Event()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        what = _asked(source, name), repr(sorted(defines.items()))
        if threading.current_thread() is here:
            assert what in asked
        else:
            assert what not in asked
            asked.append(what)
            if len(asked) == 2:
                two.set()
            assert two.wait(20)  # one at a time, it would wait in vain
        return MadeKernel(lambda *_, **__: None, 15)

    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    there(sections(4096, 4096)).prepare()
    assert {name for name, _ in asked} == _ALL


def test_a_kernel_that_is_refused_ends_compiling(launch_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised, not that of the kernel asked for first; what has not begun is left."""
    numbers, four, ended = itertools.count(1), threading.Barrier(4), threading.Event()

    class Pool(ThreadPoolExecutor):
        """Says when it has taken back what it was asked to, before it waits for what has begun."""

        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown(wait)

    def kernel(*_: Any, **__: Any) -> MadeKernel:
        number = next(numbers)
        if number <= 4:
            four.wait(20)
        if number == 4:
            raise CompileError("the first")
        assert ended.wait(20)
        raise CompileError("another")

    monkeypatch.setattr(compiling, "ThreadPoolExecutor", Pool)
    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    with pytest.raises(CompileError, match="the first"):
        there(sections(4096, 4096)).prepare()
    assert next(numbers) <= 6, "the thread of the one that failed may have begun another"


def test_kernels_are_compiled_ahead(launch_on: Any) -> None:
    """Without waiting for any: those of encoding and of a shape; `prepare` asks for no other."""
    asked: queue.Queue[tuple[str, str]] = queue.Queue()
    may = threading.Event()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        assert may.wait(20)
        asked.put((_asked(source, name), repr(sorted(defines.items()))))
        return MadeKernel(lambda *_, **__: None, 15)

    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    compile_ahead(4096, 5120, 0)
    assert asked.empty()
    may.set()
    assert {asked.get(timeout=20)[0] for _ in range(2)} == {"plan_long", "encode"}
    matrix = there(sections(4096, 5120))
    products = {matrix.ways(count)[0].label for count in range(1, MOST_ROWS + 1)}
    found = {asked.get(timeout=20) for _ in range(4 + len(products))}
    assert {name for name, _ in found} == _ALL
    matrix.prepare()
    assert {asked.get() for _ in range(asked.qsize())} <= found


def test_kernels_of_experts_are_compiled_ahead(launch_on: Any) -> None:
    """All that products of any number of rows take, whether warps are alone or not."""
    asked: queue.Queue[tuple[str, str]] = queue.Queue()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        asked.put((name, repr(sorted(defines.items()))))
        return MadeKernel(lambda *_, **__: None, 15)

    have = DeviceFacts("GPU", (9, 0), 132, H200)
    many = 3  # ways with many rows, beside two kernels that list and arrange them
    for experts, rows, columns, products in ((128, 1536, 2048, 4), (8, 512, 14336, 1)):
        launch_on(MadeBackend(kernel, have))
        window_experts.compile_ahead(experts, rows, columns, 0)
        found = {asked.get(timeout=20) for _ in range(2 + 2 + products + many + 2)}
        names = ["encode", "experts_arranged", "experts_listed", *["experts_many"] * many]
        names += [*["experts_product"] * products, "experts_rows", "experts_sum", "plan_long"]
        assert sorted(name for name, _ in found) == names
        window = sections(rows, columns)
        made = window_experts.DeviceExperts([(window, 128)] * experts, experts, False, 0)
        made.prepare()
        for count in range(1, expert_ways.MOST_ROUTED + 1):
            made._launch(count)
        for tokens in (65, 128, 256, 1000, 4000):
            how = made._way(tokens, 8 * tokens)
            if how is not None:
                window_experts._many(window_experts.current(), columns, experts, how, 0)
        assert {asked.get() for _ in range(asked.qsize())} <= found


def test_what_fails_ahead_is_told_later(launch_on: Any) -> None:
    """It is tried once for all layers of a shape."""
    asked: queue.Queue[tuple[str, int]] = queue.Queue()

    def kernel(source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        asked.put((name, defines.get("TAIL", 0)))
        raise CompileError("refused")

    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (9, 0), 132, H200)))
    for columns in (6144, 6144, 6144, 6200):
        compile_ahead(4096, columns, 0)
    encoding = 0
    while (it := asked.get(timeout=20))[1] == 0:  # the last shape's chunks are not all full
        encoding += it[0] == "plan_long"
    assert encoding == 1
    with pytest.raises(CompileError, match="refused"):
        there(sections(4096, 6144)).prepare()
    launch_on(MadeBackend(facts=UnsupportedDevice("too old")))
    with pytest.raises(UnsupportedDevice, match="too old"):
        compile_ahead(4096, 6144, 0)
