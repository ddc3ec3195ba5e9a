"""Loading a component: what goes where, in which dtype and order, streamed or not."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")

from support.components import WEIGHT, Built, Component, component  # noqa: E402

from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.diffusers import load_model  # noqa: E402
from tpde.loading.footprint import FIXED_BYTES, plain_bytes  # noqa: E402
from tpde.nn import PackedParameter  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.units import Footprint  # noqa: E402

BF16 = torch.bfloat16


class World:
    """What `load` uses, made up: a model of some tensors, their files, what streams them. All is `meta`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.fails, self.packed = "", {"linear.weight": SimpleNamespace(run="run", spec=WEIGHT[0])}
        self.meta = torch.device("meta")
        for name, value in {
            "weight_files": lambda folder, variant: [folder / f"{variant}"],
            "checked_device": lambda *_: self.meta,
            "check_gpu": lambda device, hint: self.log.append("checked"),
            "Checkpoint": self._checkpoint,
            "build": self._build,
            "planned": self._planned,
            "replace_parameter": lambda model, name, weight: self.log.append(("packed", name, weight)),
            "finish": lambda model: self._step("finish"),
        }.items():
            monkeypatch.setattr(load_model, name, value)
        quantizer = importlib.import_module("tpde.integrations.diffusers.quantizer")
        monkeypatch.setattr(quantizer, "belong", lambda model: self.log.append("belongs"))

    def _step(self, name: str) -> None:
        if name == self.fails:
            raise KeyboardInterrupt
        self.log.append(name)

    def _checkpoint(self, files: list[Path]) -> Any:
        self.log.append(files)
        norm = {f"norm.{it}": TensorSpec("BF16", (8192,)) for it in ("weight", "bias")}
        plain = norm | {"linear.bias": TensorSpec("BF16", (64,)), "places": TensorSpec("BF16", (8192,))}

        class Files:
            is_packed = True

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                world.log.append("files closed")

            def plain_tensor(self, name: str, device: Any) -> Any:
                return torch.zeros(plain[name].shape, dtype=BF16, device=device)

            def decode(self, runs: Any, device: Any, dtype: Any) -> Any:
                return [torch.zeros(WEIGHT[0].shape, dtype=dtype, device=device) for _ in runs]

            def open(self, runs: Any, where: Any) -> Any:
                world.log.append(("opened", dict(runs), where))
                return dict.fromkeys(runs, "here")

        world, made = self, Files()
        made.plain, made.packed = plain, self.packed  # type: ignore[attr-defined]
        return made

    def _build(self, kind: Any, folder: Path, dtype: Any) -> Any:
        model = Component().to(dtype).eval()
        model.register_buffer("computed", torch.ones(3), persistent=False)
        model.register_buffer("absent", None)
        self.model: Any = model
        return model

    def _planned(self, model: Any, packed: Any, device: Any, budget: Any) -> Any:
        self.log.append(("planned", list(packed), device, budget.vram))
        return SimpleNamespace(
            close=lambda: self.log.append("closed"),
            load=lambda model, checkpoint, runs, where: self.log.append(("loaded", where)) or {"x": "there"},
            cut=lambda model: self._step("cut"),
            attach=lambda model: self._step("attach"),
            begin=lambda model: self._step("begin"),
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_where_all_of_a_component_goes(world: World) -> None:
    """What is in no file, too; each in the dtype that is asked for, or most have."""
    model = load_model.load(Component, "x", variant="fp16")
    assert world.log == [
        [Path("x/fp16")],
        ("opened", {"linear.weight": "run"}, {"linear.weight": world.meta}),
        ("packed", "linear.weight", "here"),
        "finish",
        "files closed",
        "belongs",
    ]
    assert model is world.model
    assert model.absent is None
    found = {name: (it.device, it.dtype) for name, it in model.state_dict().items()}
    assert set(found.values()) == {(world.meta, BF16)}, "of most bytes"
    assert model.computed.device == world.meta


def test_a_dtype_that_is_asked_for(world: World) -> None:
    model = load_model.load(Component, "x", dtype=torch.float32)
    assert {it.dtype for it in model.state_dict().values()} == {torch.float32}
    assert ("opened", {}, {}) in world.log, "what is cast is plain"


def test_a_streamed_component_is_loaded_in_this_order(world: World) -> None:
    """Host memory is brought when all else is there."""
    load_model.load(Component, "x", vram="1GiB", dtype=BF16)
    assert world.log == [
        "checked",
        [Path("x/None")],
        ("planned", ["linear.weight"], world.meta, 1 << 30),
        ("loaded", {"linear.weight": world.meta}),
        ("packed", "x", "there"),
        "cut",
        "finish",
        "attach",
        "begin",
        "files closed",
        "belongs",
    ]


@pytest.mark.parametrize("fails", ["cut", "finish", "attach", "begin"])
def test_a_streamed_component_that_fails_gives_all_back(fails: str, world: World) -> None:
    world.fails = fails
    with pytest.raises(KeyboardInterrupt):
        load_model.load(Component, "x", vram="1GiB", dtype=BF16)
    assert world.log[-2:] == ["closed", "files closed"]


def test_what_stays_packed_and_in_which_dtype_the_rest_is(tmp_path: Path) -> None:
    class Kept(Component):
        """Keeps its norm in 32 bits; how many it has seen is a whole number."""

        _keep_in_fp32_modules = ("norm",)

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

        def register_to_config(self, **given: Any) -> None:
            """Take what diffusers would keep."""

    found = {name: TensorSpec("BF16", tuple(it.shape)) for name, it in Component().state_dict().items()}
    folder = component(tmp_path, found | {"count": TensorSpec("I64", (3,))})
    model: Any = load_model.load(Built(Kept), folder, "cpu", dtype=BF16)  # type: ignore[arg-type]
    assert isinstance(model.linear.weight, PackedParameter)
    kept = {"norm.weight": torch.float32, "norm.bias": torch.float32, "count": torch.int64}
    plain = {"linear.bias": BF16, "places": BF16} | kept
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name: it.dtype for name, it in named.items()} == plain | {"linear.weight": BF16}
    model = load_model.load(Built(Kept), folder, "cpu", dtype=torch.float16)  # type: ignore[arg-type]
    assert not isinstance(model.linear.weight, PackedParameter), "of another dtype"
    assert model.linear.weight.dtype is torch.float16
    component(folder, found | {"count": TensorSpec("I64", (3,))}, plain="linear.weight")
    model = load_model.load(Built(Kept), folder, "cpu", dtype=BF16)  # type: ignore[arg-type]
    assert not isinstance(model.linear.weight, PackedParameter), "not so in the file"


def test_a_budget_of_a_component_has_room_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is its own: other components come on top."""
    module = importlib.import_module("tpde.integrations.diffusers.streamed")
    planned: list[Any] = []
    made: list[Any] = []

    class Streaming:
        def __init__(self, budget: Budget, *, whole: bool) -> None:
            made.append((budget, whole))

        def decide(self, device: Any, planner: Any) -> None:
            made.append((device, planner(77)))

    monkeypatch.setattr(module, "Streaming", Streaming)
    monkeypatch.setattr(module, "place_units", lambda *given: planned.append(given) or "plan")
    budget, model, runs = Budget(1 << 30, 5, activations=9), Component(), {"linear.weight": "run"}
    device = torch.device("cuda", 0)
    assert isinstance(module.planned(model, runs, device, budget), Streaming)
    assert made == [(budget, False), (device, "plan")]
    ((of, what, needs, vram, ram),) = planned
    assert (of, what, vram, ram) == (model, runs, 77, 5)
    assert needs == Footprint(plain_bytes(model, runs), 0, 9, FIXED_BYTES, argument="`activations`")
