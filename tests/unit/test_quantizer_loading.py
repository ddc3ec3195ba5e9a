"""The quantizer plans, reads and installs a model's weights, once, and closes its files however that ends."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from safetensors.torch import load_file  # noqa: E402
from support.card import Card  # noqa: E402
from support.checkpoints import Pair  # noqa: E402
from support.cli import damage  # noqa: E402
from support.models import assert_same_bits  # noqa: E402
from support.open_files import open_files  # noqa: E402
from support.quantizers import GpuMachine, copied, made  # noqa: E402

import tpde  # noqa: E402
from tpde.errors import Corrupt, InvalidInput, OutOfMemory  # noqa: E402
from tpde.integrations.transformers.config import TpdeConfig  # noqa: E402
from tpde.integrations.transformers.device_maps import spread  # noqa: E402
from tpde.integrations.transformers.load_target import loading_to  # noqa: E402
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer  # noqa: E402
from tpde.loading.machine import loading_on  # noqa: E402
from tpde.nn import packed_modules  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.torch import save_file  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BUDGET = Budget(1 << 30)


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


def erase(file: Path) -> None:
    """Leave nothing of the tensors but what the header says."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + bytes(len(data) - start))


def test_under_a_budget_a_model_is_spread(llama: Pair) -> None:
    """By what its elements take packed."""
    model = shape_of(llama.packed)
    it = prepared(model, llama.packed.glob("*.safetensors"), made(GPU, BUDGET))
    it.update_device_map("auto")
    it.update_weight_conversions([])
    found = it.adjust_max_memory({0: 5, 1: 5})
    assert found == spread({0: 5, 1: 5}, model, it.param_element_size)
    assert found[0] < spread({0: 5, 1: 5}, model, lambda *_: 2.0)[0]


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
