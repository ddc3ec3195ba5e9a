"""Plans and budgets of transformers models on one or several devices, which are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.budgets import Opened, SimulatedMachine, every, load, placed, simulated  # noqa: E402
from support.card import DEVICE, GIB, Card  # noqa: E402
from support.checkpoints import checkpoint, write  # noqa: E402

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.integrations.transformers.activations import activations_of  # noqa: E402
from tpde.integrations.transformers.budget_plan import plan_streaming  # noqa: E402
from tpde.integrations.transformers.expert_modules import cache_size, routed_modules  # noqa: E402
from tpde.integrations.transformers.packed_parameters import install  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402
from tpde.integrations.transformers.streamed import ModelStreaming  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.nn import packed_modules  # noqa: E402
from tpde.nn.routing import fused  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402

ONE, TWO, THREE = (torch.device("cpu", it) for it in range(3))
Shape = tuple[Any, Any, Any]  # a model without weights, its files, and which of their tensors are whose


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed models of three layers; of the large one, each has 10 MiB."""
    sizes = {"hidden_size": 512, "intermediate_size": 2560, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=300, num_hidden_layers=6, num_key_value_heads=8, **sizes)
    torch.manual_seed(0)
    large = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    made = {it: checkpoint(tmp_path_factory.mktemp(it), it).packed for it in ("llama", "qwen3_moe")}
    return made | {"large": write(tmp_path_factory.mktemp("large"), large).packed}


@pytest.fixture
def opened(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Shape]:
    with opened_shape(folders[request.param]) as found:
        yield found


def _where(plan: Any, shape: Any, packed: list[Any]) -> dict[str, Any]:
    """Layers by their numbers on devices, other packed weights on the first; plain ones of each beside."""
    found = {}
    for name, _ in shape.named_parameters():
        number = int(name.split(".")[2]) if ".layers." in name else 0
        found[name] = packed[number % len(packed)] if name in plan.runs else (ONE, TWO, THREE)[number % 3]
    return found


@pytest.mark.parametrize("opened", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("packed", "ram", "share"),
    [
        ([ONE, TWO], 90, 45),
        ([ONE], 90, 90),
        ([ONE, TWO, THREE], 91, 30),
        ([ONE, TWO], None, None),
    ],
)
def test_each_device_with_packed_weights_has_a_share_of_host_memory(
    packed: list[Any], ram: int | None, share: int | None, opened: Shape
) -> None:
    """What no map names may be on any device, and counts on all."""
    shape, files, plan = opened
    where = _where(plan, shape, packed)
    streaming = ModelStreaming(Budget(1 << 30, ram))
    streaming.plan(shape, files, plan, where)
    assert list(streaming.plans) == [ONE, TWO, THREE], "also those that keep all of theirs plain"
    buffers = {name for name, _ in shape.named_buffers()}
    for device, made in streaming.plans.items():
        assert (made.vram, made.ram) == (1 << 30, share)
        only = buffers | {name for name, it in where.items() if it == device}
        budget = Budget(1 << 30, share)
        assert made == plan_streaming(shape, files, plan, budget, only=only)
        assert bool(made.placements) == (device in packed)


@pytest.mark.parametrize("opened", ["llama"], indirect=True)
@pytest.mark.parametrize(("device", "counts"), [(DEVICE, GIB // 4), (ONE, GIB)])
def test_what_was_there_before_kernels_were_loaded(
    device: Any, counts: int, opened: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their device."""
    Card(monkeypatch).keep(GIB)
    shape, files, plan = opened
    warmup: Any = SimpleNamespace(device=device, reserved=GIB // 4)
    streaming = ModelStreaming(Budget(8 * GIB), warmup=warmup)
    streaming.plan(shape, files, plan, dict.fromkeys(dict(shape.named_parameters()), DEVICE))
    assert streaming.plans[DEVICE].vram == 8 * GIB - counts
    streaming.close()


@pytest.mark.parametrize("opened", ["large"], indirect=True)
def test_too_little_host_memory_is_told_of_all_devices(opened: Shape) -> None:
    shape, files, plan = opened
    where = _where(plan, shape, [ONE, TWO])

    only = {name for name, _ in shape.named_buffers()} | {name for name, it in where.items() if it == ONE}

    def alone(budget: Budget) -> Any:
        return plan_streaming(shape, files, plan, budget, only=only)

    def both(budget: Budget) -> Any:
        return ModelStreaming(budget).plan(shape, files, plan, where)

    def least(planner: Callable[[Budget], Any], budget: Budget, argument: str) -> int:
        with pytest.raises(OutOfMemory, match=f"`{argument}` is .*, the least .* is .* MiB") as caught:
            planner(budget)
        assert caught.value.budget == argument
        assert caught.value.least is not None
        return caught.value.least

    budget = Budget(1 << 20, None, 64)
    vram = least(alone, budget, "vram")
    assert least(both, budget, "vram") == vram, "of each device"
    budget = replace(budget, vram=vram)
    ram = least(alone, replace(budget, ram=1), "ram")
    assert least(both, replace(budget, ram=3), "ram") == 2 * ram
    both(replace(budget, ram=2 * ram))


@pytest.mark.parametrize("opened", ["qwen3_moe"], indirect=True)
def test_a_model_is_held_to_its_budget(opened: Shape) -> None:
    shape, files, plan = opened
    shape.set_experts_implementation("batched_mm")
    streaming = ModelStreaming(Budget(1 << 30, None, 70, max_batch=3))
    streaming.plan(shape, files, plan, dict.fromkeys(dict(shape.named_parameters()), ONE))
    streaming.attach(shape)
    assert shape.tpde_streamer is streaming
    with torch.device("meta"):
        with pytest.raises(OutOfMemory, match="1 x 71 = 71 tokens"):
            shape(torch.zeros(1, 71, dtype=torch.int64))
        with pytest.raises(OutOfMemory, match="experts of 4 x 1 tokens") as caught:
            shape(torch.zeros(4, 1, dtype=torch.int64))
    assert caught.value.found == 3 * activations_of(shape, 2).experts, "in bfloat16"


# ---- experts ----


class Other(torch.nn.Module):
    """Not known to need some of its experts only."""


@pytest.mark.parametrize(
    ("kind", "routed"), [("host", True), ("disk", False), ("packed", False), ("plain", False)]
)
def test_experts_that_are_fetched_one_by_one(
    kind: str, routed: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that lie in host memory as a whole, and are brought from there by the streamer that asks."""
    with simulated(monkeypatch, every(kind)):
        model = load(folders["qwen3_moe"])
        streamer = model.tpde_streamer.streamers.get(torch.device("cpu"))
        found = routed_modules(model, streamer)
        there = [module for _, module in packed_modules(model) if fused(module)]
        assert found == (there if routed else [])
        if not routed:
            return
        assert len(there) == 2
        assert routed_modules(model, object()) == []
        there[0].tpde_base = Other
        assert routed_modules(model, streamer) == [there[1]]
        (source, *_) = fused(there[1])[0].packed.sources
        source.bind(None, None)
        assert routed_modules(model, streamer) == [], "a part of them is elsewhere"


@pytest.mark.parametrize("opened", ["qwen3_moe"], indirect=True)
def test_a_cache_of_experts_takes_what_is_planned_and_left(
    opened: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each device that has any, its own."""
    shape, files, plan = opened
    rooms: list[Any] = []

    class Machine(SimulatedMachine):
        def device(self, device: torch.device, size: int, beside: Any = None) -> Any:
            rooms.append((device, size, beside))
            return super().device(device, size, beside)

    placed(monkeypatch, every("host"), parts={"experts": 1 << 16}, vram=(3 << 16) + (2 << 20))
    machine = Opened()
    with loading_on(Machine(machine)):
        streaming = ModelStreaming(Budget(1 << 30))
    where = _where(plan, shape, [ONE, TWO, THREE])  # of the layers, the second has no experts
    streaming.plan(shape, files, plan, where)
    install(shape, streaming.load(shape, files, plan.runs, where))
    assert [it[0] for it in rooms] == [ONE, TWO, THREE]
    rings = dict(zip((ONE, TWO, THREE), machine.devices, strict=True))
    rooms.clear()
    streaming.route(shape)
    expected = []
    for device in (ONE, THREE):
        modules = routed_modules(shape, streaming.streamers[device])
        assert len(modules) == 1
        size, _ = cache_size(modules, streaming.plans[device].piece, 1 << 16, (2 << 16) + (2 << 20))
        assert size > 1 << 16
        expected.append((device, size, rings[device]))
    assert rooms == expected
    assert list(streaming.experts) == [ONE, THREE]
    for device, found in streaming.stats().items():
        assert "copied_bytes" in found
        assert ("expert_hits" in found) == (device != "cpu:1")
    streaming.record()
    caches = machine.devices[3:]
    assert [it.trace for it in caches] == [rings[ONE].trace, rings[THREE].trace]
    assert None not in [it.trace for it in caches]
    streaming.check()
    streaming.close()
    assert all(it.closed for it in caches)
    machine.close()
