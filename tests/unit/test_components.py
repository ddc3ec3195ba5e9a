"""Components of diffusers' pipelines: their files, their dtypes, what diffusers asks, and what is refused."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")

from support.contents import fill  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402

from tpde.errors import InvalidInput, MissingDependency, UnsupportedDevice  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.diffusers import load_model  # noqa: E402
from tpde.integrations.diffusers.config import TpdeConfig  # noqa: E402
from tpde.integrations.diffusers.dtypes import expected_dtype  # noqa: E402
from tpde.integrations.diffusers.load_model import weight_files  # noqa: E402
from tpde.integrations.diffusers.quantizer import TpdeQuantizer, belong  # noqa: E402
from tpde.loading.footprint import FIXED_BYTES, plain_bytes  # noqa: E402
from tpde.nn import PackedParameter, pack_module  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.units import Footprint  # noqa: E402

BF16, CPU = torch.bfloat16, torch.device("cpu")
WEIGHT = (TensorSpec("BF16", (64, 128)), fill("normal", TensorSpec("BF16", (64, 128))))
VECTOR = (TensorSpec("BF16", (8192,)), WEIGHT[1])

# ---- files ----


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


STEM = "diffusion_pytorch_model"


def test_files_of_a_component(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"has no `{STEM}.safetensors`"):
        weight_files(tmp_path, None)
    (tmp_path / f"{STEM}.safetensors").mkdir()
    with pytest.raises(InvalidInput, match="name the folder of one component"):
        weight_files(tmp_path, None)
    touch(tmp_path, f"{STEM}.fp16.safetensors")
    assert weight_files(tmp_path, "fp16") == [tmp_path / f"{STEM}.fp16.safetensors"]
    (tmp_path / f"{STEM}.safetensors").rmdir()
    touch(tmp_path, f"{STEM}.safetensors")
    assert weight_files(tmp_path, None) == [tmp_path / f"{STEM}.safetensors"]


@pytest.mark.parametrize(
    ("variant", "index"),
    [
        (None, f"{STEM}.safetensors.index.json"),
        ("fp16", f"{STEM}.fp16.safetensors.index.json"),
        ("fp16", f"{STEM}.safetensors.index.fp16.json"),
    ],
)
def test_shards_of_a_component(variant: str | None, index: str, tmp_path: Path) -> None:
    """The index goes before a file of all, which an older version may have left."""
    touch(tmp_path, f"{STEM}.safetensors", f"{STEM}.fp16.safetensors")
    names = {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / index).write_text(json.dumps({"weight_map": names}))
    assert sorted(weight_files(tmp_path, variant)) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    other = "fp16" if variant is None else None
    assert len(weight_files(tmp_path, other)) == 1


# ---- models ----


def specs(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name.replace("_", "."): TensorSpec(*it) for name, it in tensors.items()}


class Built:
    """A class of diffusers: of one model, or one that ends what comes after its files were looked at.

    Attributes
    ----------
    dtypes : list of torch.dtype
        The default one whenever it was built.
    """

    def __init__(self, model: Any = None) -> None:
        self.model, self.dtypes = model, list[torch.dtype]()

    def load_config(self, folder: Path) -> dict[str, Any]:
        return {}

    def from_config(self, config: dict[str, Any]) -> Any:
        self.dtypes.append(torch.get_default_dtype())
        return self.model()


def component(folder: Path, found: dict[str, TensorSpec], plain: str = "") -> Path:
    """Write the file of a component; one of its tensors does not shrink, and small ones do not."""
    tensors = {name: (it, fill("random" if name == plain else "normal", it)) for name, it in found.items()}
    (folder / f"{STEM}.safetensors").write_bytes(pack_bytes(safetensors_bytes(tensors)))
    return folder


def test_the_dtype_of_most_bytes(tmp_path: Path) -> None:
    """Of those that are floats, in which the model is built then."""
    kind: Any = Built(pytest.fail)
    many = ("I64", (8192,))  # so many that they are packed
    for found, needed in (
        (specs(a=("BF16", (9,)), b=("F32", (4,)), c=many), BF16),
        (specs(a=("BF16", (9,)), b=("F32", (5,)), c=many), torch.float32),
        (specs(a=("BF16", (9,)), b=("F32", (5,)), c=("BF16", (2,)), d=many), BF16),
        (specs(c=many), torch.get_default_dtype()),
    ):
        kind.dtypes.clear()
        with pytest.raises(pytest.fail.Exception):
            load_model.load(kind, component(tmp_path, found), "cpu")
        assert kind.dtypes == [needed]


def test_what_a_class_keeps_in_32_bits() -> None:
    for kept, name, dtype in (
        (None, "a.norm.weight", BF16),
        (["norm"], "a.norm.weight", torch.float32),
        (["norm"], "a.norm2.weight", BF16),
        (["x", "a"], "a.norm.weight", torch.float32),
    ):
        assert expected_dtype(kept, name, BF16) is dtype


def test_tensors_that_a_model_has_not_or_lacks(tmp_path: Path) -> None:
    found = specs(weight=("BF16", (64, 128)), bias=("BF16", (64,)))
    kind: Any = Built(lambda: torch.nn.Linear(128, 64))
    at, packed = re.escape(str(tmp_path)), TensorSpec("BF16", (8192,))
    for changed, said, where in (
        ({"bias": None}, f"`{at}` lacks `bias`, which a Linear has", "bias"),
        ({"bias": None, "weight": None}, r"lacks `weight`, which a Linear has \(2 tensors\)", "weight"),
        ({"more": packed}, f"`{at}` has `more`, which a Linear has not", "more"),
        ({"bias": packed}, rf"`bias` has shape \[8192\] in `{at}`.* needs \[64\]", "bias"),
    ):
        given = {name: it for name, it in (found | changed).items() if it is not None} or {"more": packed}
        with pytest.raises(InvalidInput, match=said) as caught:
            load_model.load(kind, component(tmp_path, given), "cpu")
        assert caught.value.where == where
        assert ("tensors)" in str(caught.value)) == ("2 tensors" in said)


def test_a_component_is_built_in_its_dtype(tmp_path: Path) -> None:
    """Which is the default one meanwhile, whatever happens; buffers are computed, parameters are not."""

    class Kind:
        fails = False

        @staticmethod
        def load_config(folder: Path) -> dict[str, Any]:
            assert folder == tmp_path
            return {"size": 3, "quantization_config": {"quant_method": "tpde"}}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            assert config == {"size": 3}
            if cls.fails:
                raise ValueError("no such model")
            made = torch.nn.Linear(3, 3)
            made.register_buffer("places", torch.ones(3))
            return made

    before = torch.get_default_dtype()
    made: Any = load_model.build(Kind, tmp_path, torch.float16)  # type: ignore[type-var]
    assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.float16)
    assert (made.places.device.type, made.places.dtype) == ("cpu", torch.float16)
    assert not made.training
    assert torch.get_default_dtype() is before
    Kind.fails = True
    with pytest.raises(ValueError, match="no such model"):
        load_model.build(Kind, tmp_path, torch.float16)  # type: ignore[type-var]
    assert torch.get_default_dtype() is before


@pytest.mark.parametrize("missing", ["diffusers", "accelerate"])
def test_libraries_that_are_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependency, match=r'pip install "tpde\[diffusers\]"'):
        load_model.build(torch.nn.Linear, Path("x"), BF16)


# ---- what diffusers asks ----


class Component(torch.nn.Module):
    """A linear layer, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(128, 64), torch.nn.LayerNorm(8192)
        self.register_buffer("places", torch.zeros(8192))


def asked(
    tmp_path: Path, tensors: dict[str, Any], **options: Any
) -> tuple[TpdeQuantizer, Any, dict[str, Any]]:
    """A quantizer that diffusers has come to files with, the model, and what it would read of these."""
    (tmp_path / "x").write_bytes(pack_bytes(safetensors_bytes(tensors)))
    made = TpdeQuantizer(TpdeConfig(), pre_quantized=True)
    names = [f"{it}_tpde" for it in tensors]
    assert made.maybe_update_loaded_keys([*names, "plain"], [tmp_path / "x"]) == [*tensors, "plain"]  # type: ignore[list-item]
    assert made.update_torch_dtype(options.get("dtype", BF16)) is options.get("dtype", BF16)
    made.validate_environment(device_map=options.get("device_map"))
    model = Component().to(BF16)
    keep = options.get("keep")
    assert made._process_model_before_weight_loading(model, keep_in_fp32_modules=keep) is model
    return made, model, dict.fromkeys(names, None)


def test_what_stays_packed_of_a_file(tmp_path: Path) -> None:
    made, model, state = asked(tmp_path, {"linear.weight": WEIGHT})
    plain = torch.zeros(1)
    model.linear.weight.requires_grad_(False)
    assert made.maybe_update_state_dict(state | {"norm.bias": plain}) == {"norm.bias": plain}
    assert isinstance(model.linear.weight, PackedParameter)
    assert not model.linear.weight.plain_requires_grad
    assert bytes(model.linear.weight.packed.decoded().view(torch.uint8).numpy().ravel()) == WEIGHT[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("norm.weight", {}),
        ("places", {}),
        ("linear.weight", {"dtype": torch.float16}),
        ("linear.weight", {"keep": ["linear"]}),
    ],
)
def test_what_cannot_stay_packed_is_given_plain(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In the dtype of the files: diffusers casts it, as it does all that is plain."""
    one = WEIGHT if name == "linear.weight" else VECTOR
    made, model, state = asked(tmp_path, {name: one}, **options)
    given = made.maybe_update_state_dict(state)
    assert list(given) == [name]
    assert given[name].dtype is BF16
    assert bytes(given[name].view(torch.uint8).numpy().ravel()) == one[1]
    assert not isinstance(model.linear.weight, PackedParameter)


def test_what_diffusers_is_left_to_say(tmp_path: Path) -> None:
    """Of tensors that a model has no place for."""
    for name in ("nowhere.weight", "linear.nothing"):
        made, _, state = asked(tmp_path, {name: WEIGHT})
        assert made.maybe_update_state_dict(state) == {}


def test_what_is_refused_of_a_file(tmp_path: Path) -> None:
    made, _, state = asked(tmp_path, {"linear.weight": WEIGHT})
    with pytest.raises(InvalidInput, match=r"`norm\.weight_tpde` is no packed tensor"):
        made.maybe_update_state_dict(state | {"norm.weight_tpde": None})
    turned = (TensorSpec("BF16", (128, 64)), WEIGHT[1])
    made, _, state = asked(tmp_path, {"linear.weight": turned})
    with pytest.raises(
        InvalidInput, match=r"has shape \[128, 64\] in the packed files, the model needs \[64"
    ):
        made.maybe_update_state_dict(state)


@pytest.mark.parametrize(
    ("device_map", "found"),
    [
        (None, "cpu"),
        ({}, "cpu"),
        ("cuda", "cuda:1"),
        (torch.device("cuda", 0), "cuda:0"),
        ({"": 1}, "cuda:1"),
        ({"linear": 0, "": "cpu"}, "cuda:0"),
        ({"norm": 0}, "cpu"),
        ({"norm": "disk", "linear": "cuda:1"}, "cuda:1"),
    ],
)
def test_where_a_weight_of_a_component_goes(
    device_map: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    made = TpdeQuantizer(TpdeConfig(), pre_quantized=True)
    made.validate_environment(device_map=device_map)
    assert made._device("linear.weight") == torch.device(found)


def test_where_a_weight_of_a_component_cannot_go() -> None:
    made = TpdeQuantizer(TpdeConfig(), pre_quantized=True)
    for device_map, said in (
        ({"": "disk"}, "puts `the model` on disk"),
        ({"linear": "disk"}, "puts `linear`"),
    ):
        made.validate_environment(device_map=device_map)
        with pytest.raises(InvalidInput, match=said):
            made._device("linear.weight")
    made.validate_environment(device_map="meta")
    with pytest.raises(UnsupportedDevice):
        made._device("linear.weight")


def test_what_is_saved_of_a_component() -> None:
    made = TpdeQuantizer(TpdeConfig(), pre_quantized=True)
    model = Component().to(BF16)
    pack_module(model, min_bytes=0)
    state = dict(model.named_parameters())
    found, metadata = made.get_state_dict_and_metadata(state)
    assert set(found) == {"linear.weight_tpde", "linear.bias", "norm.weight", "norm.bias"}
    assert found["linear.weight_tpde"].dtype is torch.uint8
    assert found["linear.bias"] is state["linear.bias"]
    assert metadata == {}
    assert made.is_serializable
    assert made.is_trainable
    assert not made.supports_parallel_loading


@pytest.mark.parametrize("streamed", [False, True])
def test_a_component_belongs_to_us_if_any_of_it_is_packed(streamed: bool) -> None:
    registered: list[Any] = []
    model: Any = Component().to(BF16)
    model.register_to_config = lambda **given: registered.append(given)
    belong(model)
    assert not hasattr(model, "hf_quantizer")
    assert not registered
    pack_module(model, min_bytes=0)
    if streamed:
        model.tpde_streamer = SimpleNamespace()
    belong(model)
    assert registered == [{"quantization_config": model.hf_quantizer.quantization_config}]
    assert model.hf_quantizer.streamed == streamed


@pytest.mark.parametrize("asks", [True, False])
def test_an_old_diffusers_is_told_nothing(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()
    kinds: dict[str, Any] = {}
    quantizers: dict[str, Any] = {"tpde": theirs}
    module = importlib.import_module("tpde.integrations.diffusers.register")
    monkeypatch.setattr(module, "IS_ASKED", asks)
    monkeypatch.setattr(module, "AUTO_QUANTIZATION_CONFIG_MAPPING", kinds)
    monkeypatch.setattr(module, "AUTO_QUANTIZER_MAPPING", quantizers)
    module.register()
    assert kinds == ({"tpde": TpdeConfig} if asks else {})
    assert quantizers == {"tpde": theirs}, "what is there stays"
    quantizers.clear()
    module.register()
    assert quantizers == ({"tpde": TpdeQuantizer} if asks else {})


# ---- loading one ----


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


def test_a_loaded_component_is_finished_and_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its blocks decode together from then on."""
    module = importlib.import_module("tpde.integrations.diffusers.quantizer")
    finished: list[Any] = []
    monkeypatch.setattr(module, "finish", lambda model: finished.append(model) or model)
    made, model, _ = asked(tmp_path, {"linear.weight": WEIGHT})
    assert made._process_model_after_weight_loading(model) is model
    assert finished == [model]
    assert made._model is None


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
