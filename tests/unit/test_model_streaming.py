"""Plans and budgets of transformers models on one or several devices. Planning and devices are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.integrations.transformers import expert_modules, streamed  # noqa: E402
from tpde.integrations.transformers.streamed import ModelStreaming  # noqa: E402
from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.shortages import too_little_ram  # noqa: E402

ONE, TWO, THREE = (torch.device("cuda", it) for it in range(3))


def model() -> Any:
    """Two layers, and a buffer that no map names."""
    made = torch.nn.Module()
    made.a, made.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    made.register_buffer("places", torch.zeros(2))
    return made


WHERE = {"a.weight": ONE, "a.bias": THREE, "b.weight": TWO}


def planned(*names: str) -> Any:
    return SimpleNamespace(runs=dict.fromkeys(names))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is planned: the device, what was reserved there, budgets, and the names that are there."""
    found: list[Any] = []

    def decide(self: Any, device: Any, planner: Any, reserved: int | None = None) -> None:
        found.append((device, reserved, *planner(1000)))

    def plan(model: Any, checkpoint: Any, plan: Any, budget: Budget, *, only: Any, fused: Any) -> Any:
        return budget.vram, budget.ram, set(only)

    monkeypatch.setattr(streamed, "activations_of", lambda model, itemsize: ("activations", itemsize))
    monkeypatch.setattr(streamed, "plan_streaming", plan)
    monkeypatch.setattr(Streaming, "decide", decide)
    return found


@pytest.mark.parametrize(
    ("packed", "ram", "share"),
    [
        (["a.weight", "b.weight"], 90, 45),
        (["a.weight"], 90, 90),
        ([], 90, 90),
        (["a.weight", "a.bias", "b.weight"], 91, 30),
        (["a.weight", "b.weight"], None, None),
    ],
)
def test_each_device_with_packed_weights_has_a_share_of_host_memory(
    packed: list[str], ram: int | None, share: int | None, asked: list[Any]
) -> None:
    """What no map names may be on any device, and counts on all."""
    ModelStreaming(Budget(5000, ram)).plan(model(), None, planned(*packed), WHERE)  # type: ignore[arg-type]
    assert asked == [
        (device, None, 1000, share, {name, "places"})
        for device, name in ((ONE, "a.weight"), (TWO, "b.weight"), (THREE, "a.bias"))
    ]


def test_what_was_there_before_kernels_were_loaded(asked: list[Any]) -> None:
    """Of their device."""
    warmup: Any = SimpleNamespace(device=TWO, reserved=77)
    ModelStreaming(Budget(5000), warmup=warmup).plan(model(), None, planned(), WHERE)  # type: ignore[arg-type]
    assert [it[:2] for it in asked] == [(ONE, None), (TWO, 77), (THREE, None)]


@pytest.mark.parametrize(
    ("error", "ram", "least"),
    [
        (too_little_ram(60, 40), 90, 120),
        (too_little_ram(60, 40), None, 60),
        (OutOfMemory("too little", budget="ram"), 90, None),
        (OutOfMemory("too little", least=60), 90, 60),
    ],
)
def test_too_little_host_memory_is_told_of_all_devices(
    error: OutOfMemory, ram: int | None, least: int | None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Streaming, "decide", decide)
    with pytest.raises(OutOfMemory) as caught:
        ModelStreaming(Budget(5000, ram)).plan(model(), None, planned("a.weight", "b.weight"), WHERE)  # type: ignore[arg-type]
    assert caught.value.least == least
    assert (caught.value is error) == (least != 120)


def test_a_model_is_held_to_its_budget(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(streamed, "limit_tokens", lambda *given: limits.append(given))
    streaming, made = ModelStreaming(Budget(5000, None, 70, max_batch=3)), model()
    streaming.plan(made, None, planned(), WHERE)  # type: ignore[arg-type]
    streaming.attach(made)
    assert limits == [(made, 70, 3, ("activations", 4))]
    assert made.tpde_streamer is streaming


# ---- experts ----


def module(*sources: bool) -> Any:
    """A packed module some of whose fused weights are in host memory."""
    found = [
        SimpleNamespace(in_host_memory=lambda streamer, it=it: it and streamer == "ours") for it in sources
    ]
    return SimpleNamespace(slots=[SimpleNamespace(packed=SimpleNamespace(sources=found))], tpde_base="routed")


@pytest.mark.parametrize(
    ("sources", "base", "streamer", "routed"),
    [
        ((True, True), "routed", "ours", True),
        ((True, False), "routed", "ours", False),
        ((), "routed", "ours", False),
        ((True,), "other", "ours", False),
        ((True,), "routed", "another", False),
    ],
)
def test_experts_that_are_fetched_one_by_one(
    sources: tuple[bool, ...], base: str, streamer: str, routed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module(*sources)
    made.tpde_base = base
    monkeypatch.setattr(expert_modules, "packed_modules", lambda _: [("a", made)])
    monkeypatch.setattr(expert_modules, "fused", lambda it: it.slots)
    monkeypatch.setattr(expert_modules, "routes", lambda kind: kind == "routed")
    assert expert_modules.routed_modules(model(), streamer) == ([made] if routed else [])


def test_a_cache_of_experts_takes_what_is_planned_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each device that has any, its own; where not one expert fits, none."""
    log: list[Any] = []
    made = SimpleNamespace(slots=[SimpleNamespace(shape=(4, 2, 2))])

    class Store:
        def __init__(self, cache: Any, *given: Any) -> None:
            log.append((cache, given))
            self.trace: list[Any] = []

        def module(self, slots: Any) -> str:
            return "its experts"

        def record(self, trace: Any) -> None:
            self.trace.append(trace)

        def check(self) -> None:
            log.append("checked")

        def stats(self) -> dict[str, int]:
            return {"expert_hits": 3}

    class Streamer:
        def __init__(self) -> None:
            self.device, self.owned = SimpleNamespace(trace="its trace"), list[Any]()
            self.dropped_pieces = 0

        def own(self, thing: Any) -> None:
            self.owned.append(thing)

        def check(self) -> None:
            log.append("streamer checked")

        def stats(self) -> dict[str, int]:
            return {"copied_bytes": 5}

        def record(self, trace: Any) -> None: ...

    streamers = {ONE: Streamer(), TWO: Streamer(), THREE: Streamer()}
    modules = {ONE: [made], TWO: [], THREE: [made]}
    sizes = {ONE: (300, 100), THREE: (0, 100)}
    given: list[Any] = []

    def cache_size(found: Any, piece: int, least: int, spare: int) -> tuple[int, int]:
        given.append((found, piece, least, spare))
        return sizes[ONE if piece == 10 else THREE]

    monkeypatch.setattr(
        streamed, "routed_modules", lambda _, it: next(modules[d] for d, s in streamers.items() if s is it)
    )
    monkeypatch.setattr(streamed, "cache_size", cache_size)
    monkeypatch.setattr(streamed, "fused", lambda it: it.slots)
    monkeypatch.setattr(streamed, "ExpertStore", Store)
    routes: list[Any] = []
    monkeypatch.setattr(streamed, "route_experts", lambda *it: routes.append(it))
    machine: Any = SimpleNamespace(device=lambda *given: ("cache", *given), start_trace=lambda it: it)
    with loading_on(machine):
        streaming: Any = ModelStreaming(Budget(5000))
    streaming.streamers = streamers
    streaming.feeds = {it: [] for it in streamers}
    streaming.plans = {
        it: SimpleNamespace(piece=piece, parts={"experts": 7}, vram=1000, used=900)
        for it, piece in ((ONE, 10), (TWO, 20), (THREE, 30))
    }
    streaming.route(model())
    assert given == [([made], 10, 7, 100), ([made], 30, 7, 100)]
    cache = ("cache", ONE, 300, streamers[ONE].device)
    assert log == [(cache, (0, 300, 100, 10))]
    assert [it.owned for it in streamers.values()] == [[cache], [], []]
    assert routes == [(made, "its experts")]
    assert list(streaming.experts) == [ONE]
    assert streaming.stats() == {
        "cuda:0": {"copied_bytes": 5, "expert_hits": 3},
        "cuda:1": {"copied_bytes": 5},
        "cuda:2": {"copied_bytes": 5},
    }
    log.clear()
    streaming.check()
    assert log == ["streamer checked"] * 3 + ["checked"]
    streaming.record()
    assert streaming.experts[ONE].trace == ["its trace"]
