"""What recurrent layers take, by layers that are made up: each has as much as a test says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.libraries import installed  # noqa: E402

from tpde.integrations.transformers import recurrent  # noqa: E402
from tpde.integrations.transformers.recurrent import NONE, Recurrent, Scan  # noqa: E402


class Cache:
    """Where layers leave their states."""

    def __init__(self, *, config: Any) -> None:
        self.layers = [SimpleNamespace(states=[], other=None, length=7)]


class Layer(torch.nn.Module):
    """Has `size(length)` bytes for each of two sequences, twice counted, and keeps `states` of each."""

    def __init__(self, size: Callable[[int], int], *, states: int = 0, loops: bool = False) -> None:
        super().__init__()
        self.proj, self.conv = torch.nn.Linear(4, 4), torch.nn.Conv1d(4, 4, 3, groups=4)
        self.size, self.states, self.loops = size, states, loops
        self.runs: list[int] = []

    def forward(self, hidden: Any, cache_params: Any) -> None:
        length = hidden.shape[1]
        assert tuple(hidden.shape) == (2, length, 4)
        self.runs.append(length)
        held = torch.empty(self.size(length), dtype=torch.uint8)
        for _ in range(length if self.loops else 0):
            torch.empty(0)
        if self.states:
            cache_params.layers[0].states = [torch.empty(self.states, dtype=torch.uint8), held[:0]]
            cache_params.layers[0].other = torch.empty(self.states, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "DynamicCache", Cache)
    for name in recurrent.KERNELS:
        monkeypatch.setitem(sys.modules, name, None)  # it is not there, though it were installed


def model(*layers: Any) -> Any:
    made = torch.nn.Module()
    made.layers, made.config = torch.nn.ModuleList(layers), None
    return made


def scan(*layers: Any) -> Scan:
    return recurrent.recurrent_of(model(*layers)).scan


def test_what_grows_with_tokens() -> None:
    assert scan(Layer(lambda n: 10 * n)) == Scan(10, 0.0, 20), "two tokens are the least"


def test_what_each_sequence_has_beside() -> None:
    assert scan(Layer(lambda n: 10 * n + 700)) == Scan(10, 0.0, 720)


def test_sequences_are_filled_up_to_chunks() -> None:
    """Of 128: most of all where a sequence is a token longer than some."""
    assert scan(Layer(lambda n: 10 * -(-n // 128) * 128)) == Scan(10, 0.0, 1280), "the least is one"
    assert scan(Layer(lambda n: 10 * (n if n < 64 else -(-n // 128) * 128))) == Scan(10, 0.0, 1270)


def test_what_grows_with_the_square() -> None:
    token = 4097 + 2049
    found = scan(Layer(lambda n: n * n))
    assert (found.token, found.sequence) == (token, 4)
    assert found.pair == (32768**2 - 4 - 32768 * token) / 32768**2


def test_what_has_a_bound_takes_nothing_back() -> None:
    assert scan(Layer(lambda n: 10 * min(n, 5000))) == Scan(10, 0.0, 20)


def test_loops_over_tokens_are_told_by_short_passes() -> None:
    layer = Layer(lambda n: 10 * n, loops=True)
    assert scan(layer) == Scan(10, 0.0, 20)
    assert max(layer.runs) == 32


def test_states_are_of_each_sequence() -> None:
    other = Layer(lambda n: 2 * n, states=30)
    other.proj = torch.nn.Linear(4, 5)
    made = model(Layer(lambda n: n, states=100), other)
    found = recurrent.recurrent_of(made)
    assert found.states == 130
    assert found.scan.token == 2, "the larger of both"
    assert recurrent.recurrent_of(made, {"layers.1.proj.weight", "layers.0.other"}).states == 30
    assert recurrent.recurrent_of(made, set()).states == 0


def test_layers_that_are_alike_are_run_once() -> None:
    layers = [Layer(lambda n: n), Layer(lambda n: n)]
    made = model(*layers)
    first = recurrent.recurrent_of(made)
    assert not layers[1].runs
    runs = list(layers[0].runs)
    assert recurrent.recurrent_of(made) == first
    assert layers[0].runs == runs, "of a model that is known nothing is run"
    wider = Layer(lambda n: n)
    wider.proj = torch.nn.Linear(4, 5)
    recurrent.recurrent_of(model(layers[0], wider))
    assert wider.runs


def test_a_layer_that_cannot_be_run_is_not_known() -> None:
    class Odd(Layer):
        def forward(self, hidden: Any, cache_params: Any) -> None:
            raise TypeError("more is wanted")

    assert recurrent.recurrent_of(model(Odd(lambda n: n), Layer(lambda n: 3 * n))).scan.token == 3
    assert recurrent.recurrent_of(model(Odd(lambda n: n))) == NONE


def test_layers_that_run_in_kernels_keep_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever library has them."""
    for name in recurrent.KERNELS:
        with monkeypatch.context() as patch:
            installed(patch, name)
            assert recurrent.recurrent_of(model(Layer(lambda n: n, states=9))) == Recurrent(Scan(), 9)
    assert recurrent.recurrent_of(model(Layer(lambda n: n))).scan != Scan()


class Uncached(Layer):
    def forward(self, hidden: Any) -> None: ...  # type: ignore[override]


class Named(Layer):
    def forward(self, hidden: Any, past_key_values: Any) -> None: ...  # type: ignore[override]


def _with(conv: Any = None, proj: Any = None) -> Any:
    made = Layer(lambda n: n)
    made.conv, made.proj = conv or made.conv, proj or made.proj
    return made


@pytest.mark.parametrize(
    ("layer", "is_one"),
    [
        (Layer(lambda n: n), True),
        (Named(lambda n: n), True),
        (Uncached(lambda n: n), False),
        (_with(torch.nn.Conv1d(4, 4, 3)), False),
        (_with(torch.nn.Conv1d(4, 4, 3, groups=2)), False),
        (_with(torch.nn.Conv1d(1, 4, 3)), False),  # of one channel there is one group
        (_with(torch.nn.Conv1d(4, 8, 3, groups=4)), True),
        (_with(torch.nn.Conv2d(4, 4, 3, groups=4)), False),
        (_with(proj=torch.nn.ReLU()), False),
    ],
)
def test_what_is_a_recurrent_layer(layer: Any, is_one: bool) -> None:
    found = list(recurrent.recurrent_layers(model(torch.nn.Linear(4, 4), layer)))
    assert found == ([("layers.1", layer)] if is_one else [])


def test_what_is_alive_counts_once() -> None:
    """However many views there are; not what was there before, nor what is gone."""
    before = torch.empty(1000, dtype=torch.uint8)
    with recurrent._Peak([before]) as mode:
        one = torch.empty(100, dtype=torch.uint8)
        views = [one[:50], one.view(10, 10), before[:7]]
        other = torch.empty(30, dtype=torch.uint8)
        del other
        torch.empty(40, dtype=torch.uint8)
    assert (mode.peak, mode.largest) == (100 + 40 + 100, 100)
    assert mode.calls == 6
    del views
