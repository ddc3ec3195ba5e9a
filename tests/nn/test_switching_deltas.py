"""When a model may become another of its states: forward passes, recorded graphs and compiled code."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.forks import needs_fork, require_in_fork
from support.models import assert_same_bits
from support.small import IDS, torch
from support.tunes import make

from tpde.errors import InvalidInput, PackedWeight


def test_a_switch_waits_for_forward_passes() -> None:
    tunes = make()
    inside, go_on, order = threading.Event(), threading.Event(), []

    def hold(*_: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    hook = tunes.packed.blocks[1].register_forward_pre_hook(hold)
    found = []

    def forward() -> None:
        with torch.no_grad():
            found.append(tunes.packed(IDS))
        order.append("forward")

    def switch() -> None:
        tunes.packed.use("math")
        order.append("use")

    threads = [threading.Thread(target=forward), threading.Thread(target=switch)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    time.sleep(0.1)
    assert order == []
    go_on.set()
    for it in threads:
        it.join(20)
    assert order == ["forward", "use"]
    hook.remove()
    with torch.no_grad():
        assert_same_bits(found[0], tunes.plain[None](IDS))
    tunes.check("math")


def test_no_switch_within_a_forward_pass() -> None:
    tunes = make()
    hook = tunes.packed.blocks[1].register_forward_pre_hook(lambda *_: tunes.packed.use("math"))
    with pytest.raises(PackedWeight, match="between two of them"):
        tunes.packed(IDS)
    hook.remove()
    tunes.check(None)
    tunes.packed.use("math")
    tunes.check("math")


def test_threads_that_compute_while_others_switch() -> None:
    tunes = make()
    expected = {it: tunes.plain[it](IDS).detach() for it in tunes.plain}
    wrong, done = [], threading.Event()

    def forward() -> None:
        with torch.no_grad():
            while not done.is_set():
                found = tunes.packed(IDS)
                if not any(torch.equal(found, it) for it in expected.values()):
                    wrong.append(found)

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for it in threads:
        it.start()
    for number in range(30):
        tunes.packed.use((None, "math", "law")[number % 3])
        time.sleep(0.002)
    done.set()
    for it in threads:
        it.join()
    assert not wrong


def test_a_recorded_graph_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    tunes = make()
    monkeypatch.setattr("tpde.weights.changed.capturing", lambda device: True)
    tunes.check(None)
    monkeypatch.undo()
    with pytest.raises(PackedWeight, match="CUDA graph was recorded"):
        tunes.packed.use("math")
    tunes.packed.use(None)
    tunes.check(None)


def test_compiled() -> None:
    tunes = make()
    compiled = torch.compile(tunes.packed, backend="aot_eager", fullgraph=True)
    for name in (None, "math", "law", "math"):
        tunes.packed.use(name)
        with torch.no_grad():
            assert_same_bits(compiled(IDS), tunes.plain[name](IDS), str(name))


def test_a_compiled_backward_pass_of_another_state_is_refused() -> None:
    tunes = make()
    layer = tunes.packed.blocks[0].up
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, 64, requires_grad=True, dtype=torch.bfloat16)
    y = compiled(x)
    tunes.packed.use("math")
    with pytest.raises(InvalidInput, match="under another delta"):
        y.sum().backward()


@needs_fork
def test_a_process_that_is_forked_while_a_thread_is_in_a_forward_pass_waits_for_no_other() -> None:
    tunes = make()
    inside, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    hook = tunes.packed.blocks[1].register_forward_pre_hook(hold)
    thread = threading.Thread(target=tunes.packed, args=(IDS,))
    thread.start()
    assert inside.wait(20)

    def switches() -> bool:
        torch.set_num_threads(1)
        hook.remove()
        tunes.packed.use("math")
        tunes.check("math")
        return True

    require_in_fork(switches)
    go_on.set()
    thread.join()
