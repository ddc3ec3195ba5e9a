"""What `tpde.from_pretrained` makes of its options: device, budget, class, configuration. None is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from support.checkpoints import Pair  # noqa: E402
from support.quantizers import GpuMachine, copied  # noqa: E402

import tpde  # noqa: E402
from tpde.errors import InvalidInput, UnsupportedDevice  # noqa: E402
from tpde.integrations.transformers import load_model  # noqa: E402
from tpde.integrations.transformers.load_target import load_target  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
