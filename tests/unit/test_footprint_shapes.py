"""Shapes that are used, at full width on tensors without data: what plans keep covers what is alive."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.libraries import installed  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from benchmarks.data.shapes import SHAPES, forward_inputs, model_of  # noqa: E402
from tpde.integrations.transformers import recurrent  # noqa: E402
from tpde.integrations.transformers.activations import Activations, activations_of  # noqa: E402
from tpde.integrations.transformers.model_footprint import cache_bytes, footprint_of, state_bytes  # noqa: E402

TEXT = ["llama", "gemma3", "qwen3-moe", "mixtral", "gpt-oss", "phi3", "falcon-h1"]
EXPERTS = {"qwen3-moe": 8 * 3 * 768 * 2048, "mixtral": 2 * 3 * 14336 * 4096, "gpt-oss": 4 * 3 * 2880 * 2880}
BATCH = 8


class Live(TorchDispatchMode):
    """Adds up the bytes that are alive after each operation, except those of known tensors."""

    def __init__(self, known: Sequence[Any]) -> None:
        super().__init__()
        self.peak, self._live = 0, dict[int, Any]()
        self._known = {it.untyped_storage()._cdata for it in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for it in tree_leaves(out):
            if isinstance(it, torch.Tensor) and it.untyped_storage()._cdata not in self._known:
                storage = it.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: it for key, it in self._live.items() if not it[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def meta(name: str) -> Any:
    with torch.device("meta"):
        return model_of(SHAPES[name], False)


def inputs(name: str, batch: int) -> dict[str, Any]:
    return forward_inputs(
        SHAPES[name],
        False,
        batch,
        lambda below, size: torch.randint(3, below, size),
        lambda *size: torch.randn(*size).bfloat16(),
    )


def alive(model: Any, took: dict[str, Any], **more: Any) -> tuple[int, Any]:
    """Bytes alive at the peak of a forward pass, beside the model and what it is given; and what it gives."""
    known = [it for it in tree_leaves([took, more]) if isinstance(it, torch.Tensor)]
    with torch.no_grad(), Live([*model.parameters(), *model.buffers(), *known]) as live:
        made = model(**took, **more)
    return live.peak, made


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("name", [*TEXT, "t5", "whisper"])
def test_forward_passes_are_covered(name: str, batch: int) -> None:
    """With as many tokens as may be, their keys and values, and the logits of all of them."""
    tokens, shape = SHAPES[name].max_tokens, meta(name)
    footprint = footprint_of(shape, (), tokens, BATCH, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        peak, _ = alive(model_of(SHAPES[name], False), inputs(name, batch))
    assert peak <= footprint.activations + footprint.cache
    if batch == 1 and name == "gemma3":
        assert peak >= 2048 * 2 * 262_144  # logits of the whole vocabulary
        assert footprint.activations + footprint.cache <= 1.2 * peak


@pytest.mark.parametrize("name", TEXT)
def test_generation_is_covered(name: str) -> None:
    """A prompt of all tokens, and then one token of each sequence, with copies of their experts."""
    footprint = footprint_of(meta(name), (), 2048, BATCH, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(SHAPES[name], False)
        took = inputs(name, BATCH)
        mask = torch.ones_like(took["input_ids"])
        first, made = alive(model, took, attention_mask=mask, logits_to_keep=1)
        one = {"input_ids": took["input_ids"][:, :1], "past_key_values": made.past_key_values}
        if name in EXPERTS:
            model.set_experts_implementation("batched_mm")
        peak, _ = alive(model, one, attention_mask=torch.ones(BATCH, 257, dtype=torch.long))
    assert first <= footprint.activations + footprint.cache
    assert peak <= footprint.activations + footprint.cache
    if name in EXPERTS:
        assert peak >= BATCH * 2 * EXPERTS[name]


@pytest.mark.parametrize("name", list(EXPERTS))
def test_copies_of_experts(name: str) -> None:
    """Those of `max_batch` sequences, at any number of tokens, and no more than are alive."""
    made = activations_of(meta(name), 2)
    assert made.copies
    biases = 4 * (2 * 2880 + 2880) if name == "gpt-oss" else 0
    assert made.experts == 2 * EXPERTS[name]
    assert made.bytes(2048, 8) - made.tokens(2048, 8) == 8 * made.experts
    assert made.bytes(2048, 1) - made.tokens(2048, 1) == made.experts
    assert made.bytes(4, 8) - made.tokens(4, 8) == 4 * made.experts
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(SHAPES[name], False)
        model.set_experts_implementation("batched_mm")
        peaks = [alive(model, {"input_ids": torch.ones(n, 1, dtype=torch.long)})[0] for n in (1, 9)]
    each = (peaks[1] - peaks[0]) / 8
    assert made.experts + 2 * biases <= each <= made.experts + made.states + made.inside


def test_pictures_are_covered() -> None:
    """Of eight, with their places in the text: the tower takes less than the text does."""
    shape = SHAPES["llava"]
    footprint = footprint_of(meta("llava"), (), shape.max_tokens, BATCH, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(shape, False)
        took = inputs("llava", BATCH)
        tower, _ = alive(model.model.vision_tower, {"pixel_values": took["pixel_values"]})
        hidden = torch.zeros(BATCH, 640, 4096, dtype=torch.bfloat16)
        text, _ = alive(model, {"inputs_embeds": hidden})
    features = 8 * 576 * 4096 * 2
    assert max(tower, text + hidden.nbytes + features) <= footprint.activations + footprint.cache


@pytest.mark.skipif(
    any(importlib.util.find_spec(it) is not None for it in recurrent.KERNELS), reason="kernels are installed"
)
def test_recurrent_layers_are_run() -> None:
    """Of a layer of Falcon-H1, a sequence of any length, filled up to chunks of 128 tokens."""
    shape = meta("falcon-h1")
    found = activations_of(shape, 2).recurrent
    state = 24 * 128 * 256 * 4 + (3072 + 2 * 256) * 4 * 2
    assert found.states == 4 * state
    assert state_bytes(shape, 8) == 8 * 5 * state
    layer = [name for name, _ in shape.named_parameters() if ".layers.1." in name]
    assert state_bytes(shape, 8, layer) == 8 * (state + state // 4)
    for batch, length in ((1, 2), (1, 128), (1, 129), (1, 2000), (3, 300), (8, 130)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            mixer = model_of(SHAPES["falcon-h1"], False).model.layers[0].mamba
            took = {"hidden_states": torch.zeros(batch, length, 3072, dtype=torch.bfloat16)}
            peak, _ = alive(mixer, took)
        said = found.scan.bytes(batch * length, batch)
        assert peak <= said
        assert said <= 2.6 * peak  # the largest tensor counts twice


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Qwen3Next"])
def test_other_recurrent_layers(name: str) -> None:
    """Loops over tokens, chunks of them, and linear attention."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    sizes |= {"num_heads": 8, "head_dim": 16, "state_size": 16} if name == "Mamba2" else {}
    sizes |= {"num_experts": 4, "layer_types": ["linear_attention"] * 2} if name == "Qwen3Next" else {}
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    found = recurrent.recurrent_of(model)
    assert found.states > 0
    (_, layer), _ = recurrent.recurrent_layers(model)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        for batch, length in ((1, 70), (2, 90)):
            hidden = torch.zeros(batch, length, 64, dtype=torch.bfloat16)
            peak, _ = alive(layer, {"hidden_states": hidden})
            if not any(importlib.util.find_spec(it) is not None for it in recurrent.KERNELS):
                assert peak <= found.scan.bytes(batch * length, batch)


def test_kernels_keep_to_themselves_what_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "fla")
    found = recurrent.recurrent_of(meta("falcon-h1"))
    assert found.scan == recurrent.Scan()
    assert found.states > 0


def test_a_layer_that_cannot_be_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = meta("falcon-h1")

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("more is wanted")

    monkeypatch.setattr(type(shape.model.layers[0].mamba), "forward", lambda self, cache_params: refuse())
    assert recurrent.recurrent_of(shape) == recurrent.NONE
    assert activations_of(shape, 2).recurrent == Activations._field_defaults["recurrent"]


def test_keys_and_values_of_eight_sequences() -> None:
    """As many as of one: of encoder-decoders both sides'."""
    assert cache_bytes(meta("t5"), 2048, 2) == 4 * 2 * 64 * 64 * 2 * 2048 * 1.25 + 2 * 64 * 64 * 2 * 2048
