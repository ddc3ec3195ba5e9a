"""Rows of one batch under several states: each has the bits that its rows alone have under it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import io
import itertools
import pickle
import threading
import time
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.models import assert_same_bits
from support.small import Model, torch
from support.tunes import tuned

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import add_deltas, model_deltas, pack_module, plain_state_dict
from tpde.nn.batch_rows import BatchRows
from tpde.nn.parts import Parts
from tpde.nn.plain_copies import Copies

IDS = torch.arange(35).reshape(5, 7)
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


class Tunes(NamedTuple):
    """Plain models by names, of which None is the base; and the packed one that becomes each."""

    plain: dict[str | None, Any]
    packed: Any

    def expected(self, names: Any, ids: Any) -> Any:
        """What rows of each name alone give under it, in their order."""
        made = [None] * len(names)
        for name in dict.fromkeys(names):
            rows = [i for i, it in enumerate(names) if it == name]
            with torch.no_grad():
                for row, found in zip(rows, self.plain[name](ids[rows]), strict=True):
                    made[row] = found
        return torch.stack(made)

    def check(self, names: Any) -> None:
        ids = IDS[: len(names)]
        with torch.no_grad():
            assert_same_bits(self.packed(ids), self.expected(names, ids), str(names))


def make(dtype: Any = torch.bfloat16, pack: bool = True, **sizes: int) -> Tunes:
    torch.manual_seed(5)
    base = Model(**sizes).to(dtype).eval()
    plain = {None: base, "math": tuned(base, 1), "law": tuned(base, 2)}
    packed = copy.deepcopy(base)
    if pack:
        pack_module(packed, min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    return Tunes(plain, packed)


@pytest.fixture
def tunes() -> Tunes:
    return make(blocks=2)


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


# ---- the choice


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


# ---- interruptions


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, after: bool = False) -> None:
    """Let Ctrl-C come in the place of a call, or after it: of the `at`th, and once only."""
    real, calls = getattr(owner, name), itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == at
        if after or not now:
            found = real(*args, **kwargs)
        if now:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("before", ["law", ["law", "math"]], ids=["one", "rows"])
@pytest.mark.parametrize("again", [None, "math", "law", ["math", None], ["law", "math"]], ids=str)
def test_an_interrupted_switch(pack: bool, before: Any, again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tunes = make(pack=pack, blocks=2)
    model = tunes.packed
    model.use(before)
    tunes.check(["law", "math"] if before == ["law", "math"] else ["law"] * 2)
    interrupt(monkeypatch, Copies, "set", 3)
    with pytest.raises(KeyboardInterrupt):
        model.use("math" if before == "law" else None)
    for call in (
        lambda: model(IDS[:2]),
        lambda: tpde.unpack_module(model),
    ):
        with pytest.raises(PackedWeight, match=r"`use` of the model was interrupted.*call `use` again"):
            call()
    if pack:
        with pytest.raises((PackedWeight, InvalidInput), match=r"interrupted|state"):
            torch.save(model.state_dict(), io.BytesIO())
    if pack and before == "law":
        for call in (model.blocks[0].up.weight.float, lambda: copy.deepcopy(model.blocks[0])):
            with pytest.raises(PackedWeight, match="was interrupted"):
                call()
    model.use(again)
    tunes.check(again if isinstance(again, list) else [again] * 2)
    model.use(None)
    tunes.check([None] * 2)


@pytest.mark.parametrize("again", ["law", "math", None, ["math", None]], ids=str)
@pytest.mark.parametrize("before", ["law", ["law", "math"]], ids=["one", "rows"])
@pytest.mark.parametrize("end", ["_end_requests", "after _end_requests", "remove", "_slots"])
def test_a_switch_that_is_interrupted_at_its_end(
    end: str, before: Any, again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain parameters are under the new name then, and packed ones under the old one, or under both."""
    if (end, before) == ("remove", "law"):
        return  # there is nothing to remove
    tunes = make(blocks=1)
    tunes.packed.use(before)
    name, owner = end.removeprefix("after "), Parts if end == "remove" else model_deltas.Deltas
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, 1, after=name != end)
        with pytest.raises(KeyboardInterrupt):
            tunes.packed.use("math")
    with pytest.raises(PackedWeight, match="was interrupted"):
        tunes.packed(IDS[:2])
    tunes.packed.use(again)
    tunes.check(again if isinstance(again, list) else [again] * 2)
    tunes.packed.use(None)
    tunes.check([None])
    assert not any(it._forward_pre_hooks for it in tunes.packed.modules())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.nn.Module, "register_forward_pre_hook"), (model_deltas, "Parts"), (Parts, "refuse")],
)
def test_rows_that_are_not_begun(owner: Any, name: str, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them stays, and the delta before is in use."""
    tunes = make(blocks=2)
    tunes.packed.use("law")
    before = set(tunes.packed.__dict__)

    def fail(*_: Any, **__: Any) -> None:
        raise error("half way")

    real, calls = getattr(owner, name), list[int]()
    with monkeypatch.context() as patch:
        if name == "register_forward_pre_hook":

            def third(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return fail() if len(calls) == 3 else real(*args, **kwargs)

            patch.setattr(owner, name, third)
        else:
            patch.setattr(owner, name, fail)
        with pytest.raises(error, match="half way"):
            tunes.packed.use(["math", "law"])
    hooks = ("_forward_pre_hooks", "_state_dict_pre_hooks")
    assert not any(getattr(it, name) for it in tunes.packed.modules() for name in hooks)
    assert set(tunes.packed.__dict__) == before
    tunes.check(["law"] * 2)
    tunes.packed.use(["math", "law"])
    tunes.check(["math", "law"])
    with pytest.raises(InvalidInput, match="by itself"):
        tunes.packed.blocks[0](torch.zeros(2, 64).bfloat16())


def test_methods_that_cannot_stand_for_rows(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such method")

    tunes.packed.use("law")
    monkeypatch.setitem(model_deltas.METHODS, "generate", fail)
    with pytest.raises(RuntimeError, match="no such method"):
        tunes.packed.use(["math", "law"])
    assert not any(it._forward_pre_hooks for it in tunes.packed.modules())
    tunes.check(["law"] * 2)


def test_an_interrupted_call_of_rows(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one puts plain parameters where they should be, and so does `use`."""
    for heal in (["math", "law"], None):
        tunes.packed.use(["math", "law"])
        tunes.check(["math", "law"])
        with monkeypatch.context() as patch:
            interrupt(patch, Copies, "set", 3)
            with pytest.raises(KeyboardInterrupt):
                tunes.packed(IDS[:2])
        tunes.packed.use(heal)
        tunes.check(heal or [None] * 2)


def test_parameters_of_the_caller_are_not_overwritten() -> None:
    tunes = make(torch.float32, blocks=2)
    own = {"blocks.0.norm.weight": torch.full((64,), 3.0)}
    tunes.packed.use(["math", "law"])
    tunes.check(["math", "law"])
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.norm\.weight` is another tensor"):
        torch.func.functional_call(tunes.packed, own, (IDS[:2],))
    assert (own["blocks.0.norm.weight"] == 3).all()
    tunes.check(["math", "law"])
    tunes.packed.use("math")
    with torch.no_grad():
        found = torch.func.functional_call(tunes.packed, own, (IDS[:2],))
        assert_same_bits(found, torch.func.functional_call(tunes.plain["math"], own, (IDS[:2],)))
    assert (own["blocks.0.norm.weight"] == 3).all()


def test_what_was_trained_is_not_lost(tunes: Tunes) -> None:
    tunes.packed.use(["math", "law"])
    tunes.check(["math", "law"])
    with torch.no_grad():
        tunes.packed.blocks[0].norm.weight.mul_(2)
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.norm\.weight` was changed"):
        tunes.packed(IDS[:2])
    assert tunes.packed.tpde_deltas.active == ("math", "law")


def test_no_switch_within_a_call(tunes: Tunes) -> None:
    tunes.packed.use(["math", "law"])
    hook = tunes.packed.blocks[1].register_forward_pre_hook(lambda *_: tunes.packed.use("math"))
    with pytest.raises(PackedWeight, match="between two of them"):
        tunes.packed(IDS[:2])
    hook.remove()
    tunes.check(["math", "law"])


def test_graphs_of_several_are_not_recorded(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    tunes.packed.use(["math", "law"])
    monkeypatch.setattr("tpde.nn.passes.capturing", lambda device: True)
    with pytest.raises(PackedWeight, match="under 2 deltas"):
        tunes.packed(IDS[:2])
    tunes.packed.use(["law", "law"])
    tunes.check(["law", "law"])
    monkeypatch.undo()
    tunes.packed.use("math")
    tunes.check(["math"])


def test_a_recorded_graph_is_not_left_behind(tunes: Tunes, monkeypatch: pytest.MonkeyPatch) -> None:
    tunes.packed.use(["math", "law"])
    monkeypatch.setattr("tpde.weights.changed.capturing", lambda device: True)
    with pytest.raises(PackedWeight, match="recorded with the weights of 'math'"):
        tunes.packed(IDS[:2])
    monkeypatch.undo()
    for names in (["law"], "law", None):
        with pytest.raises(PackedWeight, match="CUDA graph was recorded"):
            tunes.packed.use(names)


# ---- what walks past it


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_parts_are_refused(pack: bool) -> None:
    tunes = make(pack=pack, blocks=2)
    model, x = tunes.packed, torch.zeros(2, 64).bfloat16()
    model.use(["math", "law"])
    model(IDS[:2])
    for part, took in (
        (model.blocks[0], x),
        (model.blocks[1].norm, x),
        (model.blocks[0].up, x),
        (model.embed, IDS[:2]),
        (model.head, x),
    ):
        with pytest.raises(InvalidInput, match="by itself") as caught:
            part(took)
        assert caught.value.where
        if pack and part is not model.blocks[1].norm:
            with pytest.raises(InvalidInput, match=r"by itself|the same for all of them"):
                part.forward(took)
    with pytest.raises(InvalidInput):
        type(model).forward(model, IDS[:2])
    model.use("math")
    with torch.no_grad():
        assert_same_bits(model.blocks[0](x), tunes.plain["math"].blocks[0](x))


def test_parts_are_refused_in_other_threads_meanwhile(tunes: Tunes) -> None:
    model, found = tunes.packed, list[Any]()
    model.use(["math", "law"])

    def other() -> None:
        try:
            found.append(model.blocks[0](torch.zeros(2, 64).bfloat16()))
        except InvalidInput as error:
            found.append(error)

    def hold(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)

    hook = model.blocks[1].register_forward_pre_hook(hold)
    model(IDS[:2])
    hook.remove()
    assert len(found) == 2
    assert all(isinstance(it, InvalidInput) for it in found)


def test_weights_are_refused(tunes: Tunes) -> None:
    model = tunes.packed
    model.use(["math", "law"])
    assert model.blocks[0].up.weight.shape == (192, 64)
    with pytest.raises(InvalidInput, match="the same for all of them"):
        model.blocks[0].up.weight.float()
    for ask in (model.state_dict, model.blocks.state_dict, model.blocks[1].norm.state_dict):
        with pytest.raises(InvalidInput, match="was asked for its state"):
            ask()
    with pytest.raises(InvalidInput):
        plain_state_dict(model)
    with pytest.raises(InvalidInput):
        tpde.unpack_module(model)
    for part in (model, model.blocks[0], model.blocks[0].norm):
        with pytest.raises((PackedWeight, InvalidInput)):
            copy.deepcopy(part)
        with pytest.raises((PackedWeight, InvalidInput)):
            pickle.dumps(part)
    model.use("law")
    tpde.unpack_module(model)
    with torch.no_grad():
        assert_same_bits(model(IDS), tunes.plain["law"](IDS))


def test_a_plain_model_is_not_unpacked(tunes: Tunes) -> None:
    plain = make(pack=False, blocks=1).packed
    plain.use(["math", "law"])
    with pytest.raises(InvalidInput, match="each of 2 rows"):
        tpde.unpack_module(plain)
    plain.use(None)
    use = plain.use
    tpde.unpack_module(plain)
    with pytest.raises(InvalidInput):
        use([None])


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


def test_compiled(tunes: Tunes) -> None:
    compiled = torch.compile(tunes.packed, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            tunes.packed.use("math")
            assert_same_bits(compiled(IDS), tunes.plain["math"](IDS))
            tunes.packed.use(["math", "law"])
            with pytest.raises(InvalidInput, match="was to be compiled"):
                compiled(IDS[:2])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(tunes.packed, backend="aot_eager", fullgraph=True)(IDS[:2])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced(tunes: Tunes) -> None:
    plain = make(pack=False, blocks=1)
    plain.packed.use("math")
    traced = torch.jit.trace(plain.packed, IDS)
    with torch.no_grad():
        assert_same_bits(traced(IDS), plain.plain["math"](IDS))
    for model in (tunes.packed, plain.packed):
        model.use(["math", "law"])
        with pytest.raises((PackedWeight, InvalidInput), match=r"torch\.jit\.trace|each of 2 rows"):
            torch.jit.trace(model, IDS[:2])
    plain.check(["math", "law"])


def test_checkpointing_is_refused_where_it_would_fail(tunes: Tunes) -> None:
    model = tunes.packed
    model.use(["math", "law"])
    model.blocks[1].gradient_checkpointing = True
    tunes.check(["math", "law"])
    model(IDS[:2])  # in evaluation
    model.train()
    with pytest.raises(PackedWeight, match=r"`blocks\.1` does gradient checkpointing") as caught:
        model(IDS[:2])
    assert caught.value.where == "blocks.1"
    with torch.no_grad():
        model(IDS[:2])
    model.use("math")
    model(IDS[:2])


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_compiled_after_an_interruption(pack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    tunes = make(pack=pack, blocks=1)
    compiled = torch.compile(tunes.packed, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(compiled(IDS), tunes.plain[None](IDS))
        interrupt(monkeypatch, Copies, "set", 3)
        with pytest.raises(KeyboardInterrupt):
            tunes.packed.use("math")
        with pytest.raises(PackedWeight, match="was interrupted"):
            compiled(IDS)
        tunes.packed.use("math")
        assert_same_bits(compiled(IDS), tunes.plain["math"](IDS))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks a block's input for it
def test_compiled_blocks(tunes: Tunes) -> None:
    for block in tunes.packed.blocks:
        block.compile(backend="aot_eager")
    for names in (["math", "law"], ["law", None, "math"], ["law"] * 2):
        tunes.packed.use(names)
        tunes.check(names)
    tunes.packed.use(["law", "math"])
    loss = tunes.packed(IDS[:2]).sum()
    with pytest.raises(InvalidInput, match="the same for all of them"):
        loss.backward()
    with pytest.raises(InvalidInput, match="by itself"):
        tunes.packed.blocks[0](torch.zeros(2, 64).bfloat16())


# ---- gradients


def test_gradients_flow_where_no_plain_parameter_changes() -> None:
    torch.manual_seed(5)
    base = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False))
    plain = {None: base, "math": tuned(base, 1, dense=100), "law": tuned(base, 2, dense=100)}
    for it in plain.values():
        it.requires_grad_(False)
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    names = ["math", "law", None, "math"]
    packed.use(names)
    x = torch.randn(4, 64, requires_grad=True)
    packed(x).square().sum().backward()
    packed.use(None)
    for name, model in plain.items():
        rows = [i for i, it in enumerate(names) if it == name]
        own = x.detach()[rows].requires_grad_()
        model(own).square().sum().backward()
        assert_same_bits(x.grad[rows], own.grad, str(name))


def test_a_plain_parameter_that_autograd_keeps_is_missed(tunes: Tunes) -> None:
    tunes.packed.use(["math", "law"])
    loss = tunes.packed(IDS[:2]).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed by an in-place"):
        loss.backward()
    tunes.packed.use(["law", "law"])
    tunes.packed(IDS[:2]).sum().backward()  # one delta, which stays


# ---- arguments and results


class Odd(torch.nn.Module):
    """Takes and gives what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.result: Any = None
        self.took: list[Any] = []

    def forward(self, x: Any, more: Any = None, *rest: Any, input_ids: Any = None, **other: Any) -> Any:
        self.took.append((x, more, rest, other))
        y = self.layer(x)
        return y if self.result is None else self.result(y)


@pytest.fixture(scope="module")
def odd_tunes() -> Any:
    torch.manual_seed(5)
    base = Odd()
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, tuned(base, seed)) for seed, it in enumerate(("a", "b"))})
    packed.use(["a", "b", "a"])
    return packed


@pytest.fixture
def odd(odd_tunes: Any) -> Any:
    odd_tunes.result = None
    odd_tunes.took.clear()
    return odd_tunes


X = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))


def test_the_one_positional_tensor(odd: Any) -> None:
    """Has the rows in its first dimension, whatever it is called; what is no tensor goes to each call."""
    marker = {"any": ["thing", 3]}
    odd(X, marker, "rest", flag=True)
    assert [it[0].shape[0] for it in odd.took] == [2, 1]
    assert_same_bits(odd.took[0][0], X[[0, 2]])
    assert all(it[1] is marker and it[2] == ("rest",) and it[3] == {"flag": True} for it in odd.took)
    assert odd(X.view(3, 1, 1, 64)).shape == (3, 1, 1, 64)
    assert len(odd.took) == 4
    for it in (Slotted("text"), collections.deque([1]), functools.partial(len, X.shape), closure_of("text")):
        odd(X, it)
        assert odd.took[-1][1] is it
    odd(X, attention_mask=X[:, :7])
    assert_same_bits(odd.took[-1][3]["attention_mask"], X[1:2, :7])


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class SlottedToo(Slotted):
    __slots__ = "one"  # noqa: PLC0205

    def __init__(self, held: Any, one: Any) -> None:
        super().__init__(held)
        self.one = one


def closure_of(held: Any) -> Any:
    def call() -> Any:
        return held, later

    if held is None:
        later = 1
    return call


def nested(tensor: Any) -> Any:
    return torch.nested.nested_tensor(list(tensor), layout=torch.jagged)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((X, X), {}, "x"),
        ((), {"x": X}, "x"),
        ((X,), {"labels": X}, "labels"),
        ((X,), {"pixel_values": X}, "pixel_values"),
        ((X,), {"nested": {"deep": [X]}}, "nested"),
        ((X, [X]), {}, "more"),
        ((X, 1, 2, (X.numpy(),)), {}, "argument 4"),
        ((X,), {"past_key_values": object()}, "past_key_values"),
        ((X,), {"position_ids": X[:, :1, None]}, "position_ids"),
        ((X,), {"attention_mask": X.view(3, 1, 8, 8)}, "attention_mask"),
        ((X,), {"attention_mask": [[1]] * 3}, "attention_mask"),
        ((X,), {"attention_mask": X[:, :3]}, "attention_mask"),
        ((X[0, 0],), {}, "x"),
        ((X.to_sparse(),), {}, "x"),
        ((nested(X),), {}, "x"),
        ((X,), {"other": nested(X)}, "other"),
        ((X,), {"input_ids": X.to_sparse()}, "input_ids"),
        ((X,), {"slots": Slotted(X)}, "slots"),
        ((X,), {"slots": SlottedToo(X, 1)}, "slots"),
        ((X,), {"slots": SlottedToo(1, X)}, "slots"),
        ((X,), {"queue": collections.deque([X])}, "queue"),
        ((X,), {"view": {"a": X}.values()}, "view"),
        ((X,), {"default": collections.defaultdict(list, a=[X])}, "default"),
        ((X,), {"part": functools.partial(torch.add, X)}, "part"),
        ((X,), {"part": functools.partial(torch.add, other=X)}, "part"),
        ((X,), {"closure": closure_of(X)}, "closure"),
        ((X,), {"closure": closure_of(closure_of([X]))}, "closure"),
    ],
)
def test_what_is_not_known_to_hold_rows(odd: Any, args: Any, kwargs: Any, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"`{name}`") as caught:
        odd(*args, **kwargs)
    assert caught.value.where == name
    assert not odd.took


def test_other_numbers_of_rows(odd: Any) -> None:
    for took in (X[:2], torch.cat((X, X)), X[:0]):
        with pytest.raises(InvalidInput, match=f"`x` has {len(took)} rows, .* for 3") as caught:
            odd(took)
        assert (caught.value.found, caught.value.needed) == (len(took), 3)
    for name, rows in (("position_ids", 2), ("attention_mask", 1), ("decoder_input_ids", 1)):
        with pytest.raises(InvalidInput, match=f"`{name}` has {rows} rows"):
            odd(X, **{name: torch.zeros(rows, 64)})
    with pytest.raises(InvalidInput, match="no argument is known"):
        odd(None, position_ids=torch.zeros(1, 64))
    with pytest.raises(InvalidInput, match="no argument is known"):
        odd(None)
    assert not odd.took


def test_positions_of_all_rows(odd: Any) -> None:
    positions = torch.arange(64)[None]
    odd(X, position_ids=positions)
    assert [it[3]["position_ids"] is positions for it in odd.took] == [True, True]
    odd(X, position_ids=positions.expand(3, -1))
    assert [len(it[3]["position_ids"]) for it in odd.took[2:]] == [2, 1]


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    """As transformers' are."""

    left: Any
    right: Any = None


def test_results(odd: Any) -> None:
    plain = odd(X)
    for result, read in (
        (lambda y: (y, None, (y * 2, ())), lambda it: it[2][0] / 2),
        (lambda y: [y, y], lambda it: it[1]),
        (lambda y: {"a": y}, lambda it: it["a"]),
        (lambda y: {1: y, "1": y * 2}, lambda it: it[1]),
        (lambda y: {1: y * 2, "1": y}, lambda it: it["1"]),
        (lambda y: collections.OrderedDict(a=y), lambda it: it["a"]),
        (lambda y: Pair(y, (y,)), lambda it: it.right[0]),
        (Result, lambda it: it.left),
        (lambda y: torch.return_types.max((y, y)), lambda it: it.indices),
    ):
        odd.result = result
        found = odd(X)
        assert type(found) is type(result(X))
        assert_same_bits(read(found), plain)


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (lambda y: y.sum(), "the output"),
        (lambda y: y[:0], "the output"),
        (lambda y: {"loss": y.sum(), "logits": y}, "loss"),
        (lambda y: {1: y, 2: y.sum()}, r"the output\[2\]"),
        (lambda y: Result(y, {"deep": object()}), "deep"),
        (lambda y: (y, len(y)), r"the output\[1\]"),
        (lambda y: (y,) * len(y), "the output"),
        (lambda y: y if len(y) == 1 else (y,), "the output"),
        (lambda y: y[:, : len(y)], "the output"),
        (lambda y: y.to(torch.float64) if len(y) == 1 else y, "the output"),
        (lambda y: {str(len(y)): y}, "the output"),
        (lambda y: collections.defaultdict(list, a=y), "the output"),
        (lambda y: collections.deque([y]), "the output"),
        (lambda y: y.to_sparse(), "the output"),
        (lambda y: {"deep": (y, y.to_sparse())}, r"deep\[1\]"),
        (nested, "the output"),
    ],
)
def test_results_that_cannot_be_joined(odd: Any, result: Any, name: str) -> None:
    odd.result = result
    with pytest.raises(InvalidInput, match=f"`{name}`.*cannot be (joined|made of joined parts)"):
        odd(X)
    assert odd.tpde_deltas.active == ("a", "b", "a")


def test_one_delta_for_all_rows_is_refused_the_same(odd_tunes: Any) -> None:
    odd = odd_tunes
    odd.result = None
    odd.use(["b", "b", "b"])
    odd.took.clear()
    odd(X)
    assert odd.took[0][0] is X
    with pytest.raises(InvalidInput, match="`labels`"):
        odd(X, labels=X)
    with pytest.raises(InvalidInput, match="`x` has 2 rows"):
        odd(X[:2])
    odd.result = lambda y: y.sum()
    with pytest.raises(InvalidInput, match="cannot be joined"):
        odd(X)
    odd.use(["a", "b", "a"])


def test_batches() -> None:
    batch = BatchRows(["b", None, "a", "b", None])
    assert batch.places == {"b": [0, 3], None: [1, 4], "a": [2]}
    found = [torch.tensor([0, 1, 30, 31]), torch.tensor([10, 11, 40, 41]), torch.tensor([20, 21])]
    assert batch.rows_of(found, 2).tolist() == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]
