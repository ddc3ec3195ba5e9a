"""What diffusers asks of the quantizer of a component that it loads or saves, and what is refused."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")

from support.components import WEIGHT, Component  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402

from tpde.errors import InvalidInput, PackedWeight, UnsupportedDevice  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.diffusers.config import TpdeConfig  # noqa: E402
from tpde.integrations.diffusers.quantizer import TpdeQuantizer, belong  # noqa: E402
from tpde.nn import PackedParameter, pack_module  # noqa: E402

BF16 = torch.bfloat16
VECTOR = (TensorSpec("BF16", (8192,)), WEIGHT[1])


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
    found, metadata = made.get_state_dict_and_metadata(state, safe_serialization=True)
    assert set(found) == {"linear.weight_tpde", "linear.bias", "norm.weight", "norm.bias"}
    assert found["linear.weight_tpde"].dtype is torch.uint8
    assert found["linear.bias"] is state["linear.bias"]
    assert metadata == {}
    assert made.is_serializable
    assert made.is_trainable
    assert not made.supports_parallel_loading


def test_a_packed_component_is_not_saved_to_pickles() -> None:
    made = TpdeQuantizer(TpdeConfig(), pre_quantized=True)
    model = Component().to(BF16)
    plain = dict(model.named_parameters())
    assert made.get_state_dict_and_metadata(plain, safe_serialization=False)[0].keys() == plain.keys()
    pack_module(model, min_bytes=0)
    with pytest.raises(PackedWeight, match=r"`linear.weight` is packed, and would be saved to a pickle"):
        made.get_state_dict_and_metadata(dict(model.named_parameters()), safe_serialization=False)


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


def test_a_loaded_component_is_finished_and_let_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its blocks decode together from then on."""
    module = importlib.import_module("tpde.integrations.diffusers.quantizer")
    finished: list[Any] = []
    monkeypatch.setattr(module, "finish", lambda model: finished.append(model) or model)
    made, model, _ = asked(tmp_path, {"linear.weight": WEIGHT})
    assert made._process_model_after_weight_loading(model) is model
    assert finished == [model]
    assert made._model is None
