"""Which arguments have rows, each under its own state, and which results can be joined again."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import torch
from support.tunes import tuned

import tpde
from tpde.errors import InvalidInput
from tpde.nn import add_deltas, pack_module

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))


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


# ---- arguments ----


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


# ---- results ----


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
