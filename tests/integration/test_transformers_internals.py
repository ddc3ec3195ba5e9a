"""What is relied on of transformers beyond its documented interface is there in the installed version."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from support.models import make, torch

transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from tpde.integrations.transformers import internals  # noqa: E402
from tpde.integrations.transformers.internals import RELIED_ON, Reliance  # noqa: E402
from tpde.integrations.transformers.require import MIN_VERSION  # noqa: E402
from tpde.nn.routed import arguments_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

# What they are called with here.
ARGUMENTS = {
    "conversion_mapping.get_model_conversion_mapping": ["model"],
    "core_model_loading.dot_natural_key": ["s"],
    "core_model_loading.rename_source_key": [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ],
    "core_model_loading.revert_weight_conversion": ["model", "state_dict"],
    "integrations.moe.use_experts_implementation": ["experts_class"],
    "quantizers.base.HfQuantizer.remove_quantization_config": ["self", "model"],
    "._from_config": ["config"],
    ".save_pretrained": ["save_directory", "is_main_process", "state_dict"],
    "._get_dtype_plan": ["dtype"],
    "modeling_utils._get_dtype": ["dtype", "checkpoint_files"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model as transformers loads it."""
    folder = tmp_path_factory.mktemp("plain")
    made = make("mixtral")
    made.save_pretrained(folder)
    return type(made).from_pretrained(folder)


def _found(name: str, model: Any) -> Any:
    holder, _, leaf = name.rpartition(name[0] if name[0] in ".:" else ".")
    if name[0] == ".":
        return getattr(model, leaf)
    if name[0] == ":":
        return getattr(model.config, leaf)
    path = holder.split(".")
    classes = [it for it in path if it[0].isupper()]
    module = importlib.import_module(".".join(["transformers", *path[: len(path) - len(classes)]]))
    return functools.reduce(getattr, [*classes, leaf], module)


@pytest.mark.parametrize("it", RELIED_ON, ids=lambda it: it.name)
def test_what_is_relied_on(it: Reliance, model: Any) -> None:
    what = f"transformers {transformers.__version__} has another `{it.name}`; this breaks: {it.breaks}"
    assert tuple(map(int, it.since.split("."))) <= MIN_VERSION
    try:
        found = _found(it.name, model)
    except (AttributeError, ImportError):
        pytest.fail(what)
    if it.name in ARGUMENTS and callable(found):
        taken = list(inspect.signature(found).parameters)
        assert taken[: len(ARGUMENTS[it.name])] == ARGUMENTS[it.name], what


def test_they_do_what_they_are_used_for(model: Any) -> None:
    undo = internals.ignore_keys(model, ["x"])
    assert "x" in internals.ignored_keys(model)
    undo()
    assert "x" not in internals.ignored_keys(model)
    conversions = internals.take_conversions(model)
    assert any(isinstance(it, internals.WeightConverter) for it in conversions)
    names = set(internals.revert(model, dict(model.state_dict()), conversions))
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    assert set(internals.revert(model, dict(model.state_dict()), [])) == set(model.state_dict())
    internals.give_conversions(model, conversions)
    assert internals.take_conversions(model) is conversions
    internals.give_conversions(model, conversions)
    shape = internals.on_meta(type(model), model.config, torch.bfloat16)
    assert {it.device.type for it in shape.parameters()} == {"meta"}
    assert len(internals.conversion_mapping(shape)) >= len(conversions)  # of which those that did something
    assert internals.experts_of(model.config) is not None
    assert internals.attention_of(model.config) == "sdpa"
    assert internals.tied_weights(model) is model.all_tied_weights_keys


def test_what_save_pretrained_is_given_is_a_local_variable_of_what_asks_for_the_state(
    model: Any, tmp_path: Path
) -> None:
    """A quantizer is called by a function of that name itself: no other one lies in between."""
    found: list[Any] = []

    class Asked(transformers.quantizers.HfQuantizer):
        def __init__(self) -> None:
            pass

        def is_serializable(self) -> bool:
            return True

        is_trainable = True

        def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
            found.append(internals.given_state())
            return {}, {}

    given = dict(model.state_dict())
    model.hf_quantizer = Asked()
    try:
        model.save_pretrained(tmp_path, state_dict=given)
    finally:
        del model.hf_quantizer
    assert found[0] is given, f"transformers {transformers.__version__} asks for a state in another way"


def test_experts_say_what_is_between_their_products(model: Any) -> None:
    module = model.model.layers[0].mlp.experts
    assert arguments_of(type(module)) == ("hidden_states", "top_k_index", "top_k_weights")
    assert (module.has_gate, module.has_bias, module.is_transposed) == (True, False, False)
    assert callable(module._apply_gate)
    assert callable(module.act_fn)


def test_nothing_else_is_used() -> None:
    names = {it.name[1:] for it in RELIED_ON if it.name[0] in ".:"} - {"save_pretrained", "tie_weights"}
    private = "|".join({*names, "_is_hf_initialized", "_is_quantized"})
    used = re.compile(rf"transformers\.(core_model|conversion_map)|[.\"]({private})\b")
    for path in (ROOT / "src/tpde/integrations/transformers").glob("*.py"):
        if path.name != "internals.py":
            code = re.sub(r'""".*?"""', "", path.read_text("utf-8"), flags=re.DOTALL)
            assert not used.findall(code), path


def test_the_oldest_version_is_said_everywhere() -> None:
    least = ".".join(map(str, MIN_VERSION))
    assert f'"transformers>={least},<6"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert f"transformers {least} or later" in (ROOT / "docs/guides/run.md").read_text("utf-8")
