"""Models of transformers that hold packed weights have our quantizer, and lose it when they are unpacked."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from support.models import assert_same_bits  # noqa: E402
from support.quantizers import made  # noqa: E402

import tpde  # noqa: E402
from tpde.errors import MissingDependency, PackedWeight  # noqa: E402
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer  # noqa: E402
from tpde.loading import live_models  # noqa: E402
from tpde.nn import pack_module as nn_pack_module  # noqa: E402
from tpde.nn import packed_modules  # noqa: E402


def test_a_model_nothing_of_which_is_packed_is_left_alone() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    tpde.pack_module(torch.nn.ModuleList([model]), min_bytes=1 << 40)
    for it in (model, model.model):
        assert getattr(it, "hf_quantizer", None) is None
        assert "get_memory_footprint" not in vars(it)


@pytest.mark.parametrize(("there", "its"), [(True, True), (False, True), (True, False)])
def test_transformers_is_told_only_of_its_models(
    there: bool, its: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too old to load packed models is not told either."""

    class Old(ModuleType):
        def __getattr__(self, name: str) -> Any:
            told.append(name)
            raise MissingDependency("too old")

    told: list[str] = []
    monkeypatch.setitem(sys.modules, "tpde.integrations.transformers.adopt", Old("adopt"))
    if not there:
        monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    model = torch.nn.Sequential(transformers.BertModel(config) if its else torch.nn.Linear(8, 8))
    assert live_models.unpack_module(live_models.pack_module(model)) is model
    assert told == (["adopt", "release"] if there and its else [])


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


def _llama(**more: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1, **more)
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


def test_a_given_state_is_the_models_own(tmp_path: Path) -> None:
    """transformers looks at none of a quantized model: other weights would be saved as these."""
    model = _llama()
    plain = {name: it.clone() for name, it in model.state_dict().items()}
    live_models.pack_module(model, min_bytes=0)
    for number, state in enumerate((None, model.state_dict(), plain)):
        model.save_pretrained(tmp_path / str(number), state_dict=state)
    saved = [(tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(3)]
    assert saved[1:] == saved[:1] * 2
    name, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    others = (
        plain | {name: plain[name] * 2},
        plain | {norm: plain[norm] * 2},
        plain | {name: plain[name].float()},
        plain | {name: plain[name][:1]},
        plain | {"more": plain[name]},
        {it: value for it, value in plain.items() if it != name},
        {it: value for it, value in plain.items() if it != norm},
    )
    for owner in (model, copy.deepcopy(model)):
        for state in others:
            with pytest.raises(PackedWeight, match=r"a state that is not the model's: 1 of 1\d tensors"):
                owner.save_pretrained(tmp_path / "other", True, state)
    assert not list((tmp_path / "other").iterdir())
    live_models.unpack_module(model).save_pretrained(tmp_path / "other", state_dict=others[0])


def test_models_that_nothing_else_holds(tmp_path: Path) -> None:
    """Their methods are called when they would be gone; a copy counts its own weights."""
    live_models.pack_module(_llama(), min_bytes=0).save_pretrained(tmp_path)
    wanted = sum(it.nbytes for it in _llama().parameters())
    model = live_models.pack_module(_llama(), min_bytes=0)
    assert tpde.from_pretrained(tmp_path, device="cpu").get_memory_footprint() < wanted
    assert live_models.pack_module(_llama(), min_bytes=0).get_memory_footprint() < wanted
    before = model.get_memory_footprint()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.get_memory_footprint() == before
        other.add_module("more", torch.nn.Linear(8, 8, bias=False))
        assert other.get_memory_footprint() == before + 256
    assert model.get_memory_footprint() == before


def test_a_given_state_has_tied_weights_once(tmp_path: Path) -> None:
    model = _llama(tie_word_embeddings=True)
    live_models.pack_module(model, min_bytes=0)
    state = model.state_dict()
    del state["lm_head.weight"]
    model.save_pretrained(tmp_path, state_dict=state)


def test_dequantize(tmp_path: Path) -> None:
    """The plain model: no dtype but the one that is asked for."""
    model = _llama()
    model.model.norm.float()
    plain = {name: it.clone() for name, it in model.state_dict().items()}
    live_models.pack_module(model, min_bytes=0)
    assert model.dequantize() is model
    assert next(packed_modules(model), None) is None
    for name, it in model.state_dict().items():
        assert_same_bits(it, plain[name])
    live_models.pack_module(model, min_bytes=0)
    assert {it.dtype for it in model.dequantize(torch.float64).parameters()} == {torch.float64}


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
    it._placeholders = SimpleNamespace(close=lambda: log.append("shown"), written=[])  # type: ignore[assignment]

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
