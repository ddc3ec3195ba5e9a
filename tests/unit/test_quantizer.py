"""What transformers asks of the quantizer before weights are read: devices, dtypes, kernels, room."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from support.card import Card  # noqa: E402
from support.pretended import OnHost  # noqa: E402
from support.quantizers import made  # noqa: E402

from tpde.errors import InvalidInput, NotPacked, OutOfMemory, PackedWeight  # noqa: E402
from tpde.integrations.transformers.config import TpdeConfig  # noqa: E402
from tpde.integrations.transformers.load_target import loading_to  # noqa: E402
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.torch import save_file  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BUDGET = Budget(1 << 30)


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


def test_a_dtype_that_no_configuration_names(tmp_path: Path) -> None:
    """Is what the file has in which transformers looked for one, if it did."""
    save_file({"weight": torch.zeros(64, 64, dtype=torch.float16)}, path := tmp_path / "model.safetensors")

    def _get_dtype(checkpoint_files: Any, state_dict: Any) -> Any:
        return made().update_dtype(torch.float32)

    assert _get_dtype([path], {}) is torch.float16
    for files, state in (([path], None), (None, {}), ([], {})):
        assert _get_dtype(files, state) is torch.float32


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
