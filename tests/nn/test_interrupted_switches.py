"""A switch of one model or its rows that is interrupted, or fails: the next one counts."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
from support.models import assert_same_bits
from support.row_tunes import IDS, Tunes, make
from support.small import torch

import tpde
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import model_deltas
from tpde.nn.parts import Parts
from tpde.nn.plain_copies import Copies


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
