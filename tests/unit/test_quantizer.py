"""What transformers asks of the quantizer, and what `tpde.from_pretrained` tells it. No model is loaded."""

from __future__ import annotations

import json
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

import tpde  # noqa: E402
from tpde.errors import InvalidInput, MissingDependency, NotPacked, PackedWeight  # noqa: E402
from tpde.integrations.transformers import load_model, packed_parameters, quantizer  # noqa: E402
from tpde.integrations.transformers.config import TpdeConfig  # noqa: E402
from tpde.integrations.transformers.load_target import load_target, loading_to  # noqa: E402
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer  # noqa: E402
from tpde.loading import live_models  # noqa: E402
from tpde.nn import pack_module as nn_pack_module  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BUDGET = Budget(1 << 30)


def made(target: Any = None, budget: Budget | None = None) -> TpdeHfQuantizer:
    with nullcontext() if target is None else loading_to(target, budget):
        return TpdeHfQuantizer(TpdeConfig(), pre_quantized=True)


def part(name: str, size: int) -> Any:
    return SimpleNamespace(name=name, packed_bytes=size)


def planned(**runs: tuple[int, list[Any]]) -> Any:
    """A plan, by names with `_` for `.`: plain bytes and parts."""
    found = {
        name.replace("_", "."): SimpleNamespace(nbytes=it[0], parts=it[1], shape=(1,))
        for name, it in runs.items()
    }
    return SimpleNamespace(runs=found)


def test_what_it_says_of_itself() -> None:
    it = made()
    assert it.is_serializable()
    assert it.is_trainable
    assert it.is_compileable
    assert not it.requires_calibration
    it.streamed = True
    assert not it.is_compileable
    with pytest.raises(PackedWeight, match="streams its weights"):
        it.require_bytes()
    with pytest.raises(NotPacked, match="packs none"):
        TpdeHfQuantizer(TpdeConfig(), pre_quantized=False)


@pytest.mark.parametrize(
    ("target", "asked", "used"),
    [
        (None, None, None),
        (None, {"": 1}, {"": 1}),
        (None, "auto", "auto"),
        (CPU, None, {"": CPU}),
        (CPU, {"": 1}, {"": 1}),
        (CPU, "auto", "auto"),
    ],
)
def test_where_a_model_goes(target: Any, asked: Any, used: Any) -> None:
    it = made(target)
    assert it.update_device_map(asked) == used
    assert it._device_map == used


def test_a_target_is_of_its_context_only() -> None:
    with loading_to(CPU):
        with loading_to(GPU):
            assert made().update_device_map(None) == {"": GPU}
        assert made().update_device_map(None) == {"": CPU}
    assert made().update_device_map(None) is None


def test_dtypes() -> None:
    it = made()
    for dtype in (torch.float16, torch.float64, "auto", None):
        assert it.update_dtype(dtype) == dtype
    for dtype in (torch.int8, torch.bool):
        with pytest.raises(InvalidInput, match="names no dtype"):
            it.update_dtype(dtype)


class Warmup:
    """Notes what it is made with."""

    def __init__(self, *given: Any) -> None:
        self.given, self.waited = given, 0

    def wait(self) -> None:
        self.waited += 1


class Config(SimpleNamespace):
    def get_text_config(self) -> Any:
        return "its text part"


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize(
    ("target", "budget", "warms"),
    [(GPU, BUDGET, True), (GPU, None, False), (CPU, BUDGET, False), (None, None, False)],
)
def test_kernels_are_loaded_ahead_under_a_budget_of_a_gpu(
    target: Any, budget: Any, warms: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Warmup] = []

    def warm(*given: Any) -> Warmup:
        found.append(Warmup(*given))
        return found[-1]

    monkeypatch.setattr(quantizer, "Warmup", warm)
    config = Config(dtype=dtype, name_or_path="")
    with nullcontext() if target is None else loading_to(target, budget):
        it = TpdeHfQuantizer(TpdeConfig(), pre_quantized=True)
        assert it.update_attn_implementation(config) is config
        assert it.update_tp_plan(config) is config
    assert config.dtype is dtype
    assert len(found) == warms, "once"
    for warmup in found:
        assert warmup.given == ("its text part", GPU, torch.float32 if dtype is None else dtype)
        assert warmup.waited == 1


@pytest.mark.parametrize(
    ("dtype", "there", "used"),
    [(None, True, torch.float16), (torch.bfloat16, True, torch.bfloat16), (None, False, None)],
)
def test_a_dtype_that_no_configuration_names(
    dtype: Any, there: bool, used: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizer, "stored_dtype", lambda folder: torch.float16 if folder == tmp_path else 0)
    if there:
        (tmp_path / "config.json").touch()
    config = Config(dtype=dtype, name_or_path=tmp_path)
    made().update_attn_implementation(config)
    assert config.dtype is used


def test_a_map_that_is_chosen_late_loads_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(TpdeHfQuantizer, "_load", lambda self: loaded.append(self._device_map))
    it = made()
    it.validate_environment(device_map={"": 0})
    assert not loaded, "nothing is planned"
    it._weights = planned()
    it.validate_environment(device_map="auto")
    it.validate_environment()
    assert not loaded
    it.validate_environment(device_map={"": 1})
    assert loaded == [{"": 1}]


def test_elements_of_packed_weights_take_less() -> None:
    it, weight = made(), torch.zeros(10, dtype=torch.float32)
    assert it.param_element_size(None, "a", weight) == 4
    it._weights = planned(a=(40, [part("x", 10), part("y", 15)]))
    assert it.param_element_size(None, "a", weight) == 2.5
    assert it.param_element_size(None, "b", weight) == 4
    assert it.param_element_size(None, "a", torch.zeros(0)) == 25


def test_gpus_keep_room_for_a_plain_block() -> None:
    limits = {0: 1000, 1: 50, "cpu": 70, 2: "1GiB"}
    it = made()
    assert it.adjust_max_memory(limits) == limits, "nothing is planned"
    it._weights = planned(layers_0_a=(100, []), layers_0_b=(200, []), head=(250, []))
    assert it.adjust_max_memory(limits) == {0: 700, 1: 0, "cpu": 70, 2: "1GiB"}


def test_under_a_budget_a_model_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    it = made(GPU, BUDGET)
    it._weights, it._model = planned(), "the model"
    seen: list[Any] = []
    monkeypatch.setattr(quantizer, "spread", lambda *given: seen.append(given) or {0: 7})
    assert it.adjust_max_memory({0: 5}) == {0: 7}
    assert seen == [({0: 5}, "the model", it.param_element_size)]


@pytest.mark.parametrize("device_map", [{"": 0}, {"a": 0, "b": 1, "c": 0, "norm": 0}])
def test_what_a_device_must_have_free(device_map: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights, each tensor once, what is plain, and room for the largest block plain."""
    required: list[tuple[int, Any]] = []
    monkeypatch.setattr(quantizer, "require", lambda size, device, what: required.append((size, device)))
    it = made()
    x, y, z = part("x", 100), part("y", 20), part("z", 3)
    plan = planned(a_weight=(1000, [x, y]), b_weight=(5000, [z]), c_weight=(1000, [x]))
    state = {name: torch.zeros(3) for name in ("a.weight", "b.weight", "c.weight", "norm.weight", "a.bias")}
    it._model, it._device_map = SimpleNamespace(state_dict=lambda: state), device_map
    it._require(plan, GPU)
    alone = len(device_map) == 1
    assert required == [((123 + 5000 if alone else 120 + 1000) + 24, GPU)]


def test_weights_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers may ask again, and does so of models that come without files."""
    opened: list[Any] = []

    class Files:
        is_packed = True

        def __init__(self, files: Any, *, pack: bool) -> None:
            opened.append(files)

        def close(self) -> None:
            opened.append("closed")

    loads: list[int] = []
    monkeypatch.setattr(quantizer, "Checkpoint", Files)
    monkeypatch.setattr(quantizer, "map_weights", lambda *given: planned())
    monkeypatch.setattr(TpdeHfQuantizer, "_load", lambda self: loads.append(1))
    it, conversions, model = made(), [1, 2], object()
    assert it.update_weight_conversions(conversions) is conversions
    it._process_model_before_weight_loading(model, None)
    assert it.update_weight_conversions(conversions) is conversions
    assert not opened
    it._process_model_before_weight_loading(model, [Path("a"), "b"], torch.float16)
    assert it._dtype is torch.float16
    for _ in range(2):
        assert it.update_weight_conversions(conversions) is conversions
    assert (opened, loads) == ([["a", "b"]], [1])
    late = made()
    late._device_map = "auto"
    late._process_model_before_weight_loading(model, ["a"])
    assert late._dtype is torch.get_default_dtype()
    late.update_weight_conversions([])
    assert loads == [1], "it is not known yet where they go"


@pytest.mark.parametrize("fails", ["map_weights", "_load"])
def test_files_are_closed_where_planning_fails(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    files = SimpleNamespace(is_packed=True, close=lambda: closed.append(1))
    monkeypatch.setattr(quantizer, "Checkpoint", lambda _, pack: files)

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantizer, "map_weights", fail if fails == "map_weights" else lambda *_: planned())
    monkeypatch.setattr(TpdeHfQuantizer, "_load", fail)
    it = made()
    it._process_model_before_weight_loading(object(), ["a"])
    with pytest.raises(KeyboardInterrupt):
        it.update_weight_conversions([])
    assert closed == [1]


@pytest.mark.parametrize("fails", ["open", "_decode", None])
def test_files_are_closed_after_loading(fails: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    files = SimpleNamespace(
        close=lambda: closed.append(1), open=fail if fails == "open" else lambda *_: {"a": "packed"}
    )
    monkeypatch.setattr(TpdeHfQuantizer, "_decode", fail if fails == "_decode" else lambda *_: [])
    monkeypatch.setattr(quantizer, "Placeholders", lambda *given: given)
    it: Any = made()
    it._model = torch.nn.Linear(2, 2)
    it._model.all_tied_weights_keys = {}
    it._checkpoint = files
    it._weights = SimpleNamespace(runs={}, unexpected=[], halves=lambda _: [], of_plain=list)
    with nullcontext() if fails is None else pytest.raises(KeyboardInterrupt):
        it._load()
    assert closed == [1]


def test_what_has_no_place_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(quantizer, "Placeholders", lambda *given: given)
    it: Any = made()
    it._model = torch.nn.Linear(2, 2)
    it._model.all_tied_weights_keys = {}
    it._checkpoint = SimpleNamespace(close=lambda: None, open=lambda *_: {}, packed={})
    monkeypatch.setattr(TpdeHfQuantizer, "_decode", lambda *_: ["decoded"])
    plan = SimpleNamespace(runs={}, unexpected=[], halves=lambda _: ["half"], of_plain=lambda: ["come"])
    it._weights = plan
    it._load()
    assert not caplog.records
    model, names, seen, done = it._placeholders
    assert (model, names, seen, done) == (it._model, ["decoded"], ["half", "come"], it._install)
    plan.unexpected = ["a", "b"]
    it._load()
    assert "packed tensors that have no place in Linear are left out: `a`, `b`" in caplog.text


# ---- `tpde.from_pretrained` ----


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What a class of models is asked for: its options, and where the model goes."""
    found: list[Any] = []

    class Kind:
        @staticmethod
        def from_pretrained(folder: Path, **options: Any) -> Any:
            target = load_target()
            found.append((folder, options, target.device, target.budget, target.progress))
            return SimpleNamespace()

    devices: list[Any] = []

    def checked(device: Any, *_: str) -> Any:
        devices.append(device)
        return CPU if device is None else torch.device(device)

    monkeypatch.setattr(load_model, "model_directory", lambda path, **_: (Path(path), {}))
    monkeypatch.setattr(load_model, "require_files", lambda folder: found.append("files"))
    monkeypatch.setattr(load_model, "model_class_of", lambda folder: Kind)
    monkeypatch.setattr(load_model, "checked_device", checked)
    monkeypatch.setattr(load_model, "devices", devices, raising=False)
    return found


@pytest.mark.parametrize(
    ("options", "given", "target", "budget"),
    [
        ({}, {}, CPU, False),
        ({"device": "cuda:1"}, {}, torch.device("cuda:1"), False),
        ({"device_map": "auto"}, {"device_map": "auto"}, CPU, False),
        ({"vram": "1GiB"}, {}, torch.device("cuda"), True),
        ({"vram": "1GiB", "device": "cuda:1"}, {}, torch.device("cuda:1"), True),
        ({"vram": "1GiB", "device_map": "auto"}, {"device_map": "auto"}, CPU, True),
        ({"vram": "1GiB", "device_map": {"": 1}}, {"device_map": {"": 1}}, CPU, True),
    ],
)
def test_where_from_pretrained_has_a_model_go(
    options: dict[str, Any], given: dict[str, Any], target: Any, budget: bool, asked: list[Any]
) -> None:
    tpde.from_pretrained("x", **options)
    files, (folder, found, device, kept, progress) = asked
    assert (files, folder, progress) == ("files", Path("x"), None)
    assert found == {"dtype": "auto"} | given
    assert device == target
    assert (kept is not None) == budget
    assert ("cuda" in load_model.devices) == budget, "there must be one"


def test_what_from_pretrained_passes_on(asked: list[Any]) -> None:
    told = print
    tpde.from_pretrained(
        "x",
        dtype=torch.float16,
        vram=1 << 30,
        ram="2GiB",
        max_tokens=7,
        max_batch=3,
        progress=told,
        variant="fp16",
        attn_implementation="eager",
    )
    ((_, options, _, budget, progress),) = asked  # the files of a variant have other names
    assert options == {"dtype": torch.float16, "variant": "fp16", "attn_implementation": "eager"}
    assert (budget.vram, budget.ram, budget.max_tokens, budget.max_batch) == (1 << 30, 2 << 30, 7, 3)
    assert progress is told


def test_a_class_that_is_passed_is_used(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = load_model.model_class_of(Path())
    monkeypatch.setattr(load_model, "model_class_of", lambda _: pytest.fail("it was passed"))
    tpde.from_pretrained("x", model_class=kind)
    assert len(asked) == 2


@pytest.mark.parametrize(
    "options", [{"device": "cpu", "device_map": "auto"}, {"device": 0, "device_map": None, "vram": "1GiB"}]
)
def test_two_places_for_a_model(options: dict[str, Any], asked: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="both say where the model goes"):
        tpde.from_pretrained("x", **options)
    assert asked == ["files"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "names no class"),
        ({"architectures": []}, "names no class"),
        ({"architectures": None}, "names no class"),
        ({"architectures": ["NoSuchModel"]}, "which transformers .* lacks"),
        ({"architectures": ["LlamaConfig"]}, "lacks"),
        ({"architectures": ["__version__"]}, "lacks"),
        ({"architectures": [7]}, "lacks"),
    ],
)
def test_a_class_that_is_none(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=said):
        load_model.model_class_of(tmp_path)


@pytest.mark.parametrize("names", [["LlamaForCausalLM", "Other"], "LlamaForCausalLM"])
def test_the_class_that_a_configuration_names(names: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    assert load_model.model_class_of(tmp_path) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("quantized", [None, {"quant_method": "tpde"}, SimpleNamespace(quant_method="tpde")])
def test_a_configuration_that_is_passed_says_that_weights_are_packed(quantized: Any, tmp_path: Path) -> None:
    said = {"quant_method": "tpde", "version": 1}
    config = transformers.LlamaConfig(num_hidden_layers=3)
    if quantized is not None:
        config.quantization_config = quantized
    made = load_model._given_config(config, tmp_path, said)
    assert made is not config
    assert made.num_hidden_layers == 3
    assert made.quantization_config == said
    assert not hasattr(load_model._given_config(config, tmp_path, None), "quantization_config")
    assert getattr(config, "quantization_config", None) is quantized
    config.quantization_config = SimpleNamespace(quant_method="fp8")
    with pytest.raises(InvalidInput, match="quantized with `fp8`"):
        load_model._given_config(config, tmp_path, said)


# ---- models that are packed in memory ----


def test_a_model_nothing_of_which_is_packed_is_left_alone() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    tpde.pack_module(torch.nn.ModuleList([model]), min_bytes=1 << 40)
    for it in (model, model.model):
        assert getattr(it, "hf_quantizer", None) is None
        assert "get_memory_footprint" not in vars(it)


@pytest.mark.parametrize("old", [True, False])
def test_transformers_is_told_only_if_it_is_there(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too old to load packed models is not told either."""
    imported: list[str] = []

    def importing(name: str) -> Any:
        imported.append(name)
        raise MissingDependency("too old")

    monkeypatch.setattr(live_models, "importlib", SimpleNamespace(import_module=importing))
    if not old:
        monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert live_models.unpack_module(live_models.pack_module(model)) is model
    assert len(imported) == 2 * old


def test_a_model_whose_quantizer_is_another_is_left_alone() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    theirs = model.hf_quantizer = object()
    tpde.pack_module(model, min_bytes=0)
    assert model.hf_quantizer is theirs
    assert "hf_quantizer" not in vars(model.model)
    tpde.unpack_module(model)
    assert model.hf_quantizer is theirs
    gone = weakref.ref(model)
    del model
    assert gone() is None


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def test_an_unpacked_model_is_as_it_was() -> None:
    model = _llama()
    before = [set(vars(it)) for it in (model, model.model)]
    live_models.pack_module(model, min_bytes=0)
    for it in (model, model.model):
        assert isinstance(it.hf_quantizer, TpdeHfQuantizer)
        assert it.get_memory_footprint() < 0.9 * sum(p.nbytes for p in it.parameters())
    live_models.unpack_module(model)
    for it, names in zip((model, model.model), before, strict=True):
        assert set(vars(it)) - {"hf_quantizer"} <= names
        assert not hasattr(it.config, "quantization_config")
        assert it.get_memory_footprint() == sum(p.nbytes for p in it.parameters()) + sum(
            b.nbytes for b in it.buffers()
        )


def test_a_part_that_stays_packed_stays_ours() -> None:
    model = _llama()
    live_models.pack_module(torch.nn.ModuleList([model]), min_bytes=0)
    live_models.unpack_module(torch.nn.ModuleList([model.lm_head]))
    assert isinstance(model.hf_quantizer, TpdeHfQuantizer)
    live_models.unpack_module(torch.nn.ModuleList([torch.nn.ModuleList([model])]))
    assert getattr(model, "get_memory_footprint", None) == type(model).get_memory_footprint.__get__(model)


@pytest.mark.parametrize("streamed", [True, False])
def test_the_model_within_a_streamed_one_is_streamed(streamed: bool) -> None:
    model = _llama()
    nn_pack_module(model, min_bytes=0)
    it = made()
    it.streamed = streamed
    it.adopt_inner(model)
    assert "hf_quantizer" not in vars(model)
    assert model.model.hf_quantizer.streamed == streamed
    theirs = model.model.hf_quantizer
    it.adopt_inner(model)
    assert model.model.hf_quantizer is theirs


@pytest.mark.parametrize("streams", [True, False])
def test_what_is_done_when_a_model_is_loaded(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a budget, the process is held to it and host memory is brought when all else is done."""
    log: list[str] = []
    monkeypatch.setattr(quantizer, "finish", lambda model: log.append("finish"))
    it, model = made(), _llama()
    nn_pack_module(model, min_bytes=0)
    model._weight_conversions = [7]
    for config in (model.config, model.model.config):
        config._is_quantized = True
    it._model, it._checkpoint, it._files, it._parts = model, object(), ["a"], {"a": object()}  # type: ignore[assignment,dict-item]
    it._placeholders = SimpleNamespace(close=lambda: log.append("shown"))  # type: ignore[assignment]
    if streams:
        names = ("cut", "route", "attach", "begin")
        streaming = {name: lambda given, name=name: log.append(name) or given is model for name in names}
        it._target.streaming = SimpleNamespace(**streaming)  # type: ignore[assignment]
    assert it._process_model_after_weight_loading(model) is model
    brought = ["attach", "begin"] if streams else []
    assert log == ["shown", *(["cut", "route"] if streams else []), "finish", *brought]
    assert it.pre_quantized
    assert (it.conversions, model._weight_conversions) == ([7], [])
    assert not hasattr(model.config, "_is_quantized")
    assert model.get_memory_footprint() < sum(p.nbytes for p in model.parameters())
    assert isinstance(model.model.hf_quantizer, TpdeHfQuantizer)
    held = {name: value for name, value in vars(it).items() if value and name[0] == "_"}
    assert set(held) == {"_dtype", "_target"}, "nothing of the files, nor of the model"
    assert held["_target"].streaming is None


EMBED, HEAD = "embed.weight", "head.weight"


@pytest.mark.parametrize(
    ("runs", "parts", "same", "left", "tied"),
    [
        ([EMBED, HEAD], [EMBED, HEAD], True, {EMBED: EMBED, HEAD: EMBED}, True),
        ([EMBED, HEAD], [EMBED, HEAD], False, {EMBED: EMBED, HEAD: HEAD}, False),
        ([EMBED, HEAD], [HEAD], True, {}, True),  # under a budget, the embedding is plain
        ([EMBED, HEAD], [], True, {}, True),
        ([EMBED], [EMBED], False, {EMBED: EMBED}, True),
        ([HEAD], [HEAD], False, {HEAD: HEAD}, True),
        ([], [], False, {}, True),
    ],
)
def test_tied_weights_that_are_both_in_the_files(
    runs: list[str],
    parts: list[str],
    same: bool,
    left: dict[str, str],
    tied: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packed_parameters, "same_bytes", lambda a, b: same)
    model = SimpleNamespace(all_tied_weights_keys={HEAD: EMBED})
    found: dict[str, Any] = {name: name for name in parts}
    packed_parameters.tie(model, {name: name for name in runs}, found)  # type: ignore[misc]
    assert found == left
    assert model.all_tied_weights_keys == ({HEAD: EMBED} if tied else {})
    assert ("they are not tied" in caplog.text) == (not tied)


def test_weights_are_installed_under_all_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are tied become one; a second path to the same module changes nothing."""
    model: Any = torch.nn.Module()
    model.a, model.b, model.c = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
    model.b.weight = model.a.weight
    model.again = model.a
    model.c.weight.requires_grad_(False)
    installed: list[Any] = []

    def replace(model: Any, name: str, parameter: Any) -> None:
        installed.append((name, parameter))
        path, _, leaf = name.rpartition(".")
        del model.get_submodule(path)._parameters[leaf]  # as packed ones are elsewhere

    monkeypatch.setattr(packed_parameters, "replace_parameter", replace)
    monkeypatch.setattr(packed_parameters, "PackedParameter", lambda packed, grad: (packed, grad))
    parts: Any = {"a.weight": "one", "b.weight": "one", "c.weight": "other"}
    packed_parameters.install(model, parts)
    assert installed == [
        ("a.weight", ("one", True)),
        ("b.weight", ("one", True)),
        ("c.weight", ("other", False)),
    ]


def test_each_device_is_asked_for_room_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(quantizer, "Placeholders", lambda *given: given)
    monkeypatch.setattr(quantizer, "checked_device", lambda device: log.append(("checked", device)))
    monkeypatch.setattr(TpdeHfQuantizer, "_require", lambda self, plan, device: log.append(("room", device)))
    monkeypatch.setattr(TpdeHfQuantizer, "_decode", lambda *_: [])
    it: Any = made()
    it._model, it._device_map = torch.nn.Linear(2, 2), {"weight": 1, "bias": 0}
    it._model.all_tied_weights_keys = {}
    it._checkpoint = SimpleNamespace(close=lambda: None, open=lambda *_: log.append("read") or {})
    it._weights = SimpleNamespace(
        runs={"weight": object()}, unexpected=[], halves=lambda _: [], of_plain=list
    )
    it._load()
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    assert set(log[:2]) == {("checked", one), ("checked", two)}
    assert log[2:] == [("room", two), "read"], "where anything is packed"
