"""Which experts a router chooses, wherever it says so, and when all are needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.small import X, torch

from tpde.errors import InvalidInput
from tpde.nn import routing


def test_routers_may_name_no_expert() -> None:
    """Numbers beyond the last stand for experts of other devices, or none."""
    models = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    slot = SimpleNamespace(shape=(4, 8, 8))
    module: Any = SimpleNamespace(
        tpde_base=models.MixtralExperts,
        tpde_slots={"w": slot},
        config=SimpleNamespace(_experts_implementation="eager"),
    )
    index = torch.tensor([[0, 4], [2, 99], [-1, 2]])
    assert routing.chosen(module, (X, index), {}) == [0, 2, 3]
    assert routing.chosen(module, (X, index.float()), {}) is None
    module.config._experts_implementation = "a kernel"
    assert routing.chosen(module, (X, index), {}) is None


class Chooses:
    """As transformers' modules of experts are called."""

    __module__ = "transformers.models.some.modeling_some"

    def forward(self, hidden: Any, router_indices: Any = None, weights: Any = None) -> None:
        """Nothing."""


def routed(kind: Any = Chooses, **config: Any) -> Any:
    slots = {"bias": SimpleNamespace(shape=(4, 8)), "w": SimpleNamespace(shape=(4, 8, 8))}
    return SimpleNamespace(tpde_base=kind, tpde_slots=slots, config=SimpleNamespace(**config))


def test_the_choice_is_found_wherever_it_is_given() -> None:
    index = torch.tensor([[3, 1], [1, 1]])
    for args, kwargs in (((X, index), {}), ((X, index, X), {}), ((X,), {"router_indices": index})):
        assert routing.chosen(routed(), args, kwargs) == [1, 3]
        assert routing.needed(routed(), args, kwargs) == [1, 3]
    assert routing.chosen(routed(), (), {"hidden": X, "router_indices": index.int()}) == [1, 3]
    assert routing.needed(routed(), (X, torch.empty(0, 2, dtype=torch.int64)), {}) == []


@pytest.mark.parametrize("implementation", [None, "eager", "batched_mm", "grouped_mm"])
def test_implementations_that_look_experts_up(implementation: str | None) -> None:
    module = routed(_experts_implementation=implementation)
    assert routing.chosen(module, (X, torch.tensor([2])), {}) == [2]


def test_all_experts_are_needed_where_the_choice_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    """A mask of booleans is none, nor are weights; it is said once of a class."""
    known: Any = type("Known", (Chooses,), {"__module__": Chooses.__module__})
    theirs = type("Theirs", (Chooses,), {"__module__": "somebody.else"})
    plain = type("Plain", (), {"__module__": Chooses.__module__, "forward": lambda self, hidden: None})
    for kind in (theirs, plain):
        assert not routing.routes(kind)
        assert routing.chosen(routed(kind), (X, torch.tensor([2])), {}) is None
    assert routing.routes(known)
    with caplog.at_level("WARNING", "tpde"):
        for index in (torch.tensor([True, False]), torch.tensor([1.0]), None, [2], 2):
            assert routing.chosen(routed(known), (X, index), {}) is None
            assert routing.needed(routed(known), (X, index), {}) == [0, 1, 2, 3]
        assert routing.needed(routed(known), (X,), {}) == [0, 1, 2, 3]
        assert routing.needed(routed(theirs), (X, torch.tensor([2])), {}) == [0, 1, 2, 3]
    told = [it.message for it in caplog.records]
    assert len(told) == 2
    assert "`Known`" in told[0]
    assert "`Theirs`" in told[1]


def test_fused_weights_are_of_one_number_of_experts() -> None:
    module = routed()
    assert [slot.shape for slot in routing.fused(module)] == [(4, 8, 8)]
    source: Any = object()
    routing.route_experts(module, source)
    assert module.tpde_slots["w"].experts is source
    assert not hasattr(module.tpde_slots["bias"], "experts")
    module.tpde_slots["other"] = SimpleNamespace(shape=(5, 8, 8))
    for slots in (module.tpde_slots, {"bias": module.tpde_slots["bias"]}, {}):
        with pytest.raises(InvalidInput, match="one number, the same for all"):
            routing.route_experts(SimpleNamespace(tpde_slots=slots), source)  # type: ignore[arg-type]
