"""Forward passes that wait for other threads, which need packed weights, too."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.forks import needs_fork, require_in_fork
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch

from tpde.nn import pack_module

WITHIN = 100  # seconds; what hangs fails


def in_thread(work: Callable[[], Any]) -> Any:
    """What a thread returns that nobody waits for in the end: it may hang."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(WITHIN)
    return found[0]


class Future(Block):
    """Hands a layer to a pool."""

    def forward(self, x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            hidden = torch.relu(pool.submit(self.up, self.norm(x)).result())
        return x + self.down(hidden)


class Joined(Block):
    """Hands all that it does to a thread, and joins it."""

    def forward(self, x: Any) -> Any:
        return in_thread(lambda: super(Joined, self).forward(x))


class Event(Block):
    """Waits for an event."""

    def forward(self, x: Any) -> Any:
        done, found = threading.Event(), []

        def work() -> None:
            found.append(super(Event, self).forward(x))
            done.set()

        threading.Thread(target=work, daemon=True).start()
        done.wait()
        return found[0]


@pytest.mark.parametrize("block", [Future, Joined, Event])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_block_waits_for_a_thread(block: Any, gradients: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = Model(block=block).to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)

    def work() -> Any:
        with torch.set_grad_enabled(gradients):
            return ours(IDS)

    with caplog.at_level(logging.WARNING, "tpde"):
        found, expected = in_thread(work), plain(IDS)
    assert_same_bits(found, expected)
    assert sum("waits for a thread" in it.message for it in caplog.records) == 1
    if gradients and block is Future:  # `Joined` and `Event` leave grad mode to their threads
        for result in (found, expected):
            result.float().square().sum().backward()
        assert_same_bits(ours.blocks[0].up.bias.grad, plain.blocks[0].up.bias.grad)
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))


def test_a_block_waits_for_another_block() -> None:
    class Other(Block):
        def forward(self, x: Any) -> Any:
            other = self.__dict__.get("other")
            return super().forward(x if other is None else in_thread(lambda: other(x)))

    torch.manual_seed(0)
    models = [Model(block=Other).to(torch.bfloat16)]
    models.append(pack_module(copy.deepcopy(models[0]), min_bytes=0))
    for model in models:
        model.blocks[0].__dict__["other"] = model.blocks[1]
    with torch.no_grad():
        assert_same_bits(in_thread(lambda: models[1](IDS)), models[0](IDS))


def test_threads_that_wait_for_nobody_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    """One that is held up in a block, but not by another thread, is waited for."""
    entered, go_on = threading.Event(), [False]

    class Slow(Block):
        def forward(self, x: Any) -> Any:
            entered.set()
            while not go_on[0]:
                x = x + 0
            return super().forward(x)

    torch.manual_seed(0)
    plain = Model(block=Slow).to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(ours(IDS)), daemon=True) for _ in range(2)]
    threads[0].start()
    assert entered.wait(WITHIN)
    threads[1].start()
    threads[1].join(0.5)  # longer than a thread that waits is left alone
    assert not results
    go_on[0] = True
    for thread in threads:
        thread.join(WITHIN)
    for result in results:
        assert_same_bits(result, plain(IDS))
    assert len(results) == 2
    assert not any("waits for a thread" in it.message for it in caplog.records)


@needs_fork
def test_a_process_that_is_forked_while_a_thread_is_in_a_block() -> None:
    model = pack_module(Model().to(torch.bfloat16), min_bytes=0)
    expected, inside, forked = model(IDS), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert forked.wait(WITHIN)

    model.blocks[0].up.register_forward_pre_hook(wait)
    thread = threading.Thread(target=model, args=(IDS,))
    thread.start()
    assert inside.wait(WITHIN)

    def computes() -> bool:
        torch.set_num_threads(1)
        return bool(torch.equal(model(IDS), expected))

    require_in_fork(computes)
    forked.set()
    thread.join()
