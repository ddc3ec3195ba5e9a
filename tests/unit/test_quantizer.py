"""What transformers asks of the quantizer, and what `tpde.from_pretrained` tells it. No model is loaded."""

from __future__ import annotations

import json
import os
import shutil
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from safetensors.torch import load_file  # noqa: E402
from support.budgets import Opened, SimulatedMachine  # noqa: E402
from support.card import Card  # noqa: E402
from support.checkpoints import Pair, checkpoint  # noqa: E402
from support.cli import damage  # noqa: E402
from support.models import assert_same_bits  # noqa: E402
from support.pretended import OnHost  # noqa: E402

import tpde  # noqa: E402
from tpde.errors import (  # noqa: E402
    Corrupt,
    InvalidInput,
    MissingDependency,
    NotPacked,
    OutOfMemory,
    PackedWeight,
    UnsupportedDevice,
)
from tpde.integrations.transformers import load_model, packed_parameters  # noqa: E402
from tpde.integrations.transformers.config import TpdeConfig  # noqa: E402
from tpde.integrations.transformers.device_maps import spread  # noqa: E402
from tpde.integrations.transformers.load_target import load_target, loading_to  # noqa: E402
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer  # noqa: E402
from tpde.loading import live_models  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.nn import pack_module as nn_pack_module  # noqa: E402
from tpde.nn import packed_modules  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.torch import save_file  # noqa: E402

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny Llama, packed; nothing is written into its folder."""
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def shape_of(folder: Path) -> Any:
    """A model without weights, as transformers begins with."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
    return model.to(torch.bfloat16)


def prepared(model: Any, files: Any, it: Any = None, dtype: Any = torch.bfloat16) -> TpdeHfQuantizer:
    """A quantizer that knows a model and its files."""
    it = made() if it is None else it
    assert it._process_model_before_weight_loading(model, files, dtype) is model
    return it  # type: ignore[no-any-return]


def copied(pair: Pair, to: Path) -> Path:
    """A folder of one's own, and its file of weights."""
    return shutil.copytree(pair.packed, to / "copy") / "model.safetensors"


def open_files(folder: Path) -> int:
    links = [os.path.join("/proc/self/fd", it) for it in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(it).startswith(str(folder)) for it in links if os.path.lexists(it))


def erase(file: Path) -> None:
    """Leave nothing of the tensors but what the header says."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + bytes(len(data) - start))


class GpuMachine(SimulatedMachine):
    """One with some GPUs, of which nothing is opened; notes which are asked for."""

    def __init__(self) -> None:
        super().__init__(Opened())
        self.asked: list[int | None] = []
        self.count = 2

    def gpu(self, number: int | None = None) -> Any:
        self.asked.append(number)
        return torch.device("cuda", number or 0) if (number or 0) < self.count else None


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


class TextConfig(SimpleNamespace):
    """Notes that it is asked for."""

    asked = 0

    @property
    def num_attention_heads(self) -> None:
        TextConfig.asked += 1


class Config(SimpleNamespace):
    def get_text_config(self) -> Any:
        return TextConfig()


class Zeros(OnHost):
    """A GPU's stream that is none: what is put there is on the host, and noted."""

    found: ClassVar[list[Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros:
            self.found.append((kwargs["device"], kwargs["dtype"]))
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize(
    ("target", "budget", "warms"),
    [(GPU, BUDGET, True), (GPU, None, False), (CPU, BUDGET, False), (None, None, False)],
)
def test_kernels_are_loaded_ahead_under_a_budget_of_a_gpu(
    target: Any, budget: Any, warms: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, of the text part's kind."""
    Card(monkeypatch)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: Zeros())
    monkeypatch.setattr(TextConfig, "asked", 0)
    Zeros.found.clear()
    config = Config(dtype=dtype, name_or_path="")
    with nullcontext() if target is None else loading_to(target, budget):
        it = TpdeHfQuantizer(TpdeConfig(), pre_quantized=True)
        assert it.update_attn_implementation(config) is config
        assert it.update_tp_plan(config) is config
    assert config.dtype is dtype
    assert set(Zeros.found) == ({(GPU, torch.float32 if dtype is None else dtype)} if warms else set())
    assert TextConfig.asked == warms, "by now it has ended"


@pytest.mark.parametrize(
    ("dtype", "there", "used"),
    [(None, True, torch.float16), (torch.bfloat16, True, torch.bfloat16), (None, False, None)],
)
def test_a_dtype_that_no_configuration_names(dtype: Any, there: bool, used: Any, tmp_path: Path) -> None:
    """Is what the files have."""
    save_file({"weight": torch.zeros(64, 64, dtype=torch.float16)}, tmp_path / "model.safetensors")
    if there:
        (tmp_path / "config.json").touch()
    config = Config(dtype=dtype, name_or_path=tmp_path)
    made().update_attn_implementation(config)
    assert config.dtype is used


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


def test_under_a_budget_a_model_is_spread(llama: Pair) -> None:
    """By what its elements take packed."""
    model = shape_of(llama.packed)
    it = prepared(model, llama.packed.glob("*.safetensors"), made(GPU, BUDGET))
    it.update_device_map("auto")
    it.update_weight_conversions([])
    found = it.adjust_max_memory({0: 5, 1: 5})
    assert found == spread({0: 5, 1: 5}, model, it.param_element_size)
    assert found[0] < spread({0: 5, 1: 5}, model, lambda *_: 2.0)[0]


@pytest.mark.parametrize("device_map", [{"": 0}, {"a": 0, "b": 1, "c": 0, "norm": 0}])
def test_what_a_device_must_have_free(device_map: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights, each tensor once, what is plain, and room for the largest block plain."""
    it = made()
    x, y, z = part("x", 100), part("y", 20), part("z", 3)
    plan = planned(a_weight=(1000, [x, y]), b_weight=(5000, [z]), c_weight=(1000, [x]))
    state = {name: torch.zeros(3) for name in ("a.weight", "b.weight", "c.weight", "norm.weight", "a.bias")}
    it._model, it._device_map = SimpleNamespace(state_dict=lambda: state), device_map
    card = Card(monkeypatch)
    card.free = (123 + 5000 if len(device_map) == 1 else 120 + 1000) + 24
    it._require(plan, GPU)
    card.free -= 1
    with pytest.raises(OutOfMemory, match="packed, with one block plain"):
        it._require(plan, GPU)


def test_weights_are_planned_once(llama: Pair, tmp_path: Path) -> None:
    """transformers may ask again, and does so of models that come without files."""
    file, conversions = copied(llama, tmp_path), list[Any]()
    model = shape_of(llama.packed)
    it = prepared(model, None)
    assert it.update_weight_conversions(conversions) is conversions
    assert it.param_element_size(model, "lm_head.weight", model.lm_head.weight) == 2
    prepared(model, [file], it)
    assert it.update_weight_conversions(conversions) is conversions
    assert it.param_element_size(model, "lm_head.weight", model.lm_head.weight) < 2
    file.unlink()
    assert it.update_weight_conversions(conversions) is conversions, "nothing is opened"


@pytest.mark.parametrize("late", [False, True])
def test_weights_are_loaded_when_it_is_known_where_they_go(late: bool, llama: Pair) -> None:
    model = shape_of(llama.packed)
    it = prepared(model, [os.fspath(it) for it in llama.packed.glob("*.safetensors")])
    it.validate_environment(device_map={"": "cpu"})  # nothing is planned
    if late:
        it.update_device_map("auto")
    it.update_weight_conversions([])
    assert (open_files(llama.packed) > 0) == late
    if late:
        it.validate_environment(device_map="auto")
        it.validate_environment()
        assert open_files(llama.packed)
        it.validate_environment(device_map={"": "cpu"})
        assert not open_files(llama.packed)
    it._process_model_after_weight_loading(model)
    plain = transformers.LlamaForCausalLM.from_pretrained(llama.plain).state_dict()
    found = {f"{path}.weight": it.weight for path, it in packed_modules(model)}
    assert len(found) == len([name for name, it in plain.items() if it.dim() == 2])
    for name, weight in found.items():
        assert_same_bits(weight.packed.decoded(), plain[name], name)


class Interrupts:
    """Whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("fails", ["planning", "places", "opening", "decoding", None])
def test_files_are_closed_however_loading_ends(fails: str | None, llama: Pair, tmp_path: Path) -> None:
    file = copied(llama, tmp_path)
    if fails == "opening":
        erase(file)
    model = shape_of(llama.packed)
    if fails == "decoding":  # of what is cast
        damage(file, "lm_head.weight")
        model = model.float()
    it = prepared(model, [file])
    if fails == "places":
        it.update_device_map({"lm_head": "cpu"})
    errors = {"planning": KeyboardInterrupt, "places": InvalidInput, "decoding": Corrupt, "opening": Corrupt}
    with nullcontext() if fails is None else pytest.raises(errors[fails]):
        it.update_weight_conversions([Interrupts()] if fails == "planning" else [])
    assert not open_files(tmp_path)


def test_what_has_no_place_is_told(llama: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By us: transformers knows nothing of what is packed."""
    file = copied(llama, tmp_path)
    tpde.from_pretrained(file.parent, device="cpu")
    assert not caplog.records
    state = load_file(llama.plain / "model.safetensors")
    head = state["lm_head.weight"]
    save_file(state | {"a.weight": head * 2, "b.weight": head * 3}, file)
    model = tpde.from_pretrained(file.parent, device="cpu")
    assert next(packed_modules(model), None) is not None
    (record,) = caplog.records
    assert "packed tensors that have no place in LlamaForCausalLM are left out: `a.weight`, `b.weight`" in (
        record.getMessage()
    )


@pytest.mark.parametrize("pack", [False, True])
def test_transformers_finds_nothing_amiss(pack: bool, llama: Pair) -> None:
    """Neither among blobs, nor among plain weights that are packed as they come."""
    options = {"output_loading_info": True} | ({"quantization_config": TpdeConfig()} if pack else {})
    with loading_to(CPU, pack=pack):
        model, info = llama.kind.from_pretrained(llama.plain if pack else llama.packed, **options)
    assert next(packed_modules(model), None) is not None
    assert not any(info.values()), info


# ---- `tpde.from_pretrained` ----


class Asked:
    """Loads `folder` on a machine with two GPUs: what a class of models is asked for, and where it goes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.machine, self.found = folder, GpuMachine(), list[Any]()

    def load(self, **options: Any) -> None:
        with loading_on(self.machine):
            tpde.from_pretrained(self.folder, model_class=self, **options)  # type: ignore[arg-type]

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        assert folder == self.folder
        self.found.append((options, load_target()))
        return SimpleNamespace()


@pytest.fixture
def asked(llama: Pair) -> Asked:
    return Asked(llama.packed)


@pytest.mark.parametrize(
    ("options", "given", "target", "budget"),
    [
        ({}, {}, GPU, False),
        ({"device": "cpu"}, {}, CPU, False),
        ({"device": "cuda:1"}, {}, torch.device("cuda:1"), False),
        ({"device_map": "auto"}, {"device_map": "auto"}, CPU, False),
        ({"vram": "1GiB"}, {}, GPU, True),
        ({"vram": "1GiB", "device": "cuda:1"}, {}, torch.device("cuda:1"), True),
        ({"vram": "1GiB", "device_map": "auto"}, {"device_map": "auto"}, CPU, True),
        ({"vram": "1GiB", "device_map": {"": 1}}, {"device_map": {"": 1}}, CPU, True),
    ],
)
def test_where_from_pretrained_has_a_model_go(
    options: dict[str, Any], given: dict[str, Any], target: Any, budget: bool, asked: Asked
) -> None:
    asked.load(**options)
    ((found, place),) = asked.found
    assert found == {"dtype": "auto"} | given
    assert (place.device, place.progress) == (target, None)
    assert (place.budget is not None) == budget


@pytest.mark.parametrize(
    "options", [{}, {"device_map": "auto"}, {"device_map": {"": 1}}, {"device": "cuda:1"}]
)
def test_a_budget_needs_a_gpu(options: dict[str, Any], asked: Asked) -> None:
    asked.machine.count = 0
    with pytest.raises(UnsupportedDevice, match="there is no CUDA device") as caught:
        asked.load(vram="1GiB", **options)
    assert "leave it out to run on the CPU" in str(caught.value.hint)
    assert not asked.found


def test_what_from_pretrained_passes_on(asked: Asked) -> None:
    told = print
    asked.load(
        dtype=torch.float16,
        vram=1 << 30,
        ram="2GiB",
        max_tokens=7,
        max_batch=3,
        progress=told,
        variant="fp16",
        attn_implementation="eager",
    )
    ((options, place),) = asked.found
    assert options == {"dtype": torch.float16, "variant": "fp16", "attn_implementation": "eager"}
    budget = place.budget
    assert (budget.vram, budget.ram, budget.max_tokens, budget.max_batch) == (1 << 30, 2 << 30, 7, 3)
    assert place.progress is told


def test_files_must_be_there_unless_they_have_other_names(llama: Pair, tmp_path: Path) -> None:
    file = copied(llama, tmp_path)
    file.unlink()
    asked = Asked(file.parent)
    asked.load(variant="fp16")
    assert len(asked.found) == 1
    with pytest.raises(InvalidInput):
        asked.load()
    assert len(asked.found) == 1


def test_a_class_that_is_passed_is_used(llama: Pair, tmp_path: Path) -> None:
    """Whatever is named elsewhere."""
    file = copied(llama, tmp_path)
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    asked = Asked(file.parent)
    asked.load()
    assert len(asked.found) == 1


@pytest.mark.parametrize(
    "options", [{"device": "cpu", "device_map": "auto"}, {"device": 0, "device_map": None, "vram": "1GiB"}]
)
def test_two_places_for_a_model(options: dict[str, Any], asked: Asked) -> None:
    with pytest.raises(InvalidInput, match="both say where the model goes"):
        asked.load(**options)
    assert not asked.found


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
def test_a_configuration_that_is_passed_says_that_weights_are_packed(
    quantized: Any, llama: Pair, asked: Asked
) -> None:
    """Or that they are not, as the folder does."""
    said = json.loads((llama.packed / "config.json").read_text())["quantization_config"]
    config = transformers.LlamaConfig(num_hidden_layers=3)
    if quantized is not None:
        config.quantization_config = quantized
    asked.load(config=config)
    plain = Asked(llama.plain)
    plain.load(config=config, pack=True)
    for it, packed in ((asked, True), (plain, False)):
        ((options, _),) = it.found
        passed = options["config"]
        assert passed is not config
        assert passed.num_hidden_layers == 3
        assert getattr(passed, "quantization_config", None) == (said if packed else None)
    assert getattr(config, "quantization_config", None) is quantized
    config.quantization_config = SimpleNamespace(quant_method="fp8")
    with pytest.raises(InvalidInput, match="quantized with `fp8`"):
        asked.load(config=config)


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


@pytest.mark.parametrize("there", [True, False])
def test_transformers_is_told_only_if_it_is_there(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too old to load packed models is not told either."""

    class Old(ModuleType):
        def __getattr__(self, name: str) -> Any:
            told.append(name)
            raise MissingDependency("too old")

    told: list[str] = []
    monkeypatch.setitem(sys.modules, "tpde.integrations.transformers.adopt", Old("adopt"))
    if not there:
        monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert live_models.unpack_module(live_models.pack_module(model)) is model
    assert told == (["adopt", "release"] if there else [])


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
def test_what_is_done_when_a_model_is_loaded(streams: bool) -> None:
    """Under a budget, the process is held to it and host memory is brought when all else is done."""
    log: list[Any] = []
    it, model = made(), _llama()
    nn_pack_module(model, min_bytes=0)
    for _, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            slot.leave()
    (head,) = model.lm_head.tpde_slots.values()
    model._weight_conversions = [7]
    for config in (model.config, model.model.config):
        config._is_quantized = True
    it._model, it._checkpoint, it._files, it._parts = model, object(), ["a"], {"a": object()}  # type: ignore[assignment,dict-item]
    it._placeholders = SimpleNamespace(close=lambda: log.append("shown"))  # type: ignore[assignment]

    def step(name: str, given: Any) -> None:
        assert given is model
        log.append((name, "finished" if head.group is not None else "not yet"))

    if streams:
        names = ("cut", "route", "attach", "begin")
        it._target.streaming = SimpleNamespace(**{name: partial(step, name) for name in names})  # type: ignore[assignment]
    assert it._process_model_after_weight_loading(model) is model
    before, after = (
        [("cut", "not yet"), ("route", "not yet")],
        [("attach", "finished"), ("begin", "finished")],
    )
    assert log == ["shown", *(before + after if streams else [])]
    assert head.group is not None
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
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.randn(64, 64).to(torch.bfloat16)
    save_file({EMBED: weight, HEAD: weight * (1 if same else 2)}, tmp_path / "x")
    model = SimpleNamespace(all_tied_weights_keys={HEAD: EMBED})
    found: dict[str, Any] = {name: name for name in parts}
    with Checkpoint([tmp_path / "x"]) as files:
        packed_parameters.tie(model, {name: files.packed[name].run for name in runs}, found)
    assert found == left
    assert model.all_tied_weights_keys == ({HEAD: EMBED} if tied else {})
    assert ("they are not tied" in caplog.text) == (not tied)


def test_weights_are_installed_under_all_of_their_names(tmp_path: Path) -> None:
    """Those that are tied become one; a second path to the same module changes nothing."""
    model: Any = torch.nn.Module()
    model.a, model.b, model.c = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
    model.b.weight = model.a.weight
    model.again = model.a
    model.c.weight.requires_grad_(False)
    save_file({"one": torch.randn(64, 64), "other": torch.randn(64, 64)}, tmp_path / "x")
    with Checkpoint([tmp_path / "x"]) as files:
        runs = {name: it.run for name, it in files.packed.items()}
        found = files.open(runs, dict.fromkeys(runs, CPU))
    parts = {"a.weight": found["one"], "b.weight": found["one"], "c.weight": found["other"]}
    packed_parameters.install(model, parts)
    assert model.a.weight is model.b.weight
    assert (model.a.weight.packed, model.c.weight.packed) == (found["one"], found["other"])
    assert (model.a.weight.plain_requires_grad, model.c.weight.plain_requires_grad) == (True, False)
    assert {path for path, _ in packed_modules(model)} == {"a", "b", "c"}


def test_each_device_is_asked_for_room_before_anything_is_read(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where anything is packed."""
    card, machine, file = Card(monkeypatch), GpuMachine(), copied(llama, tmp_path)
    it = prepared(shape_of(llama.packed), [file])
    it.update_device_map({"model.layers": 1, "": 0})
    card.free = 0
    erase(file)  # which would be told, were it read
    with pytest.raises(OutOfMemory, match="packed, with one block plain"), loading_on(machine):
        it.update_weight_conversions([])
    assert set(machine.asked) == {0, 1}, "they are there"
