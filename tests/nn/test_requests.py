"""Rows of one batch under several states: each has the bits that its rows alone have under it."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from support.models import assert_same_bits
from support.row_tunes import IDS, Tunes, make
from support.small import torch

from tpde.errors import InvalidInput
from tpde.nn.batch_rows import BatchRows

LISTS = [
    [None],
    ["math"],
    ["math"] * 5,
    [None] * 5,
    ["math", None, "law"],
    ["law", "math", None],
    ["math", "law", "math", None, "law"],
    ["math", "math", "law", "law", None],
]


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits(dtype: Any, pack: bool) -> None:
    tunes = make(dtype, pack, blocks=2)
    for names in LISTS:
        tunes.packed.use(names)
        assert tunes.packed.tpde_deltas.active == tuple(names)
        tunes.check(names)
        tunes.check(names)
    for name in ("math", None):
        tunes.packed.use(name)
        assert tunes.packed.tpde_deltas.active == name
        tunes.check([name] * 3)


def test_rows_that_are_alone_differ(tunes: Tunes) -> None:
    """What the other tests rely on: each state gives other bits."""
    found = [tunes.plain[name](IDS[:1]) for name in (None, "math", "law")]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[2])


def test_nothing_of_it_stays(tunes: Tunes) -> None:
    hooks = ("_forward_pre_hooks", "_state_dict_pre_hooks")
    before = set(tunes.packed.__dict__)
    tunes.packed.use(["math", "law"])
    assert any(getattr(it, hooks[0]) for it in tunes.packed.modules())
    tunes.packed.use(None)
    assert set(tunes.packed.__dict__) == before
    assert not any(getattr(it, name) for it in tunes.packed.modules() for name in hooks)


def test_the_model_is_held_by_nothing() -> None:
    model = make(blocks=1).packed
    model.use(["math", "law"])
    model(IDS[:2])
    seen = weakref.ref(model), weakref.ref(model.blocks[0].up)
    del model
    gc.collect()
    assert [it() for it in seen] == [None, None]


def test_names_that_there_are_not(tunes: Tunes) -> None:
    tunes.packed.use(["math", None])
    for names in (["math", "lore"], [3], ("",), ["math", ["law"]]):
        with pytest.raises(InvalidInput, match="'math', 'law', or None"):
            tunes.packed.use(names)
    for names in (np.array(["math", None]), np.array("math"), [np.array(["math"])], {"math"}):
        with pytest.raises(InvalidInput, match=r"no delta .*'math', 'law', or None .*; or a list of them"):
            tunes.packed.use(names)
    for names in ([], ()):
        with pytest.raises(InvalidInput, match="name one for each row"):
            tunes.packed.use(names)
    assert tunes.packed.tpde_deltas.active == ("math", None)
    tunes.check(["math", None])


def test_the_choice_stays_after_errors(tunes: Tunes) -> None:
    names = ["math", "law", "math"]
    tunes.packed.use(names)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("in the second call")

    hook = tunes.packed.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="in the second call"):
        tunes.packed(IDS[:3])
    hook.remove()
    assert tunes.packed.tpde_deltas.active == tuple(names)
    with pytest.raises(InvalidInput, match="by itself"):
        tunes.packed.blocks[0](torch.zeros(2, 64).bfloat16())
    tunes.check(names)
    tunes.packed.use("law")
    tunes.check(["law"] * 2)


def test_a_wrapped_model_and_another_one(tunes: Tunes) -> None:
    """Whoever calls the whole model may do so from within another one."""
    other = make(blocks=2)
    wrapper = torch.nn.DataParallel(torch.nn.Sequential(tunes.packed, torch.nn.Identity()), device_ids=[])
    tunes.packed.use(["math", None, "law"])
    with torch.no_grad():
        found = wrapper(IDS[:3])
    assert_same_bits(found, tunes.expected(["math", None, "law"], IDS[:3]))
    other.check([None] * 4)
    other.packed.use(["law", "math"])
    other.check(["law", "math"])
    tunes.check(["math", None, "law"])


def test_a_shallow_copy_shares_it(tunes: Tunes) -> None:
    again = copy.copy(tunes.packed)
    tunes.packed.use(["math", "law"])
    with torch.no_grad():
        assert_same_bits(again(IDS[:2]), tunes.expected(["math", "law"], IDS[:2]))


def test_threads(tunes: Tunes) -> None:
    names = [["math", "law", None], ["law", "law", "math"]]
    expected = [tunes.expected(it, IDS[:3]) for it in names]
    wrong, done = [], threading.Event()
    tunes.packed.use(names[0])

    def forward() -> None:
        with torch.no_grad():
            while not done.is_set():
                found = tunes.packed(IDS[:3])
                if not any(torch.equal(found, it) for it in expected):
                    wrong.append(found)

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for it in threads:
        it.start()
    for number in range(20):
        tunes.packed.use(names[number % 2])
    done.set()
    for it in threads:
        it.join(20)
    assert not wrong


def test_calls_of_other_threads_wait() -> None:
    """Plain parameters are those of one delta at a time."""
    tunes = make(torch.float32, blocks=2)
    names, inside, go_on = ["math", "law"], threading.Event(), threading.Event()
    tunes.packed.use(names)
    calls, found = [], dict[int, Any]()

    def hold(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            inside.set()
            assert go_on.wait(20)

    hook = tunes.packed.blocks[1].register_forward_pre_hook(hold)

    def forward(key: int) -> None:
        with torch.no_grad():
            found[key] = tunes.packed(IDS[:2])

    threads = [threading.Thread(target=forward, args=(it,)) for it in range(2)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    time.sleep(0.3)
    assert len(calls) == 1
    go_on.set()
    for it in threads:
        it.join(20)
    hook.remove()
    for it in range(2):
        assert_same_bits(found[it], tunes.expected(names, IDS[:2]))


def test_batches() -> None:
    batch = BatchRows(["b", None, "a", "b", None])
    assert batch.places == {"b": [0, 3], None: [1, 4], "a": [2]}
    found = [torch.tensor([0, 1, 30, 31]), torch.tensor([10, 11, 40, 41]), torch.tensor([20, 21])]
    assert batch.rows_of(found, 2).tolist() == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]
