"""Models whose weights are streamed through a simulated device: the bits of the plain ones."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
from support.models import NAMES, assert_same_bits, inputs, make, outputs, torch
from support.simulated import MemoryFeed, SimulatedDevice
from support.streamed import stream_model, write_blobs
from torch import nn

from tpde.errors import PackedWeight
from tpde.nn import pack_module, packed_modules
from tpde.nn.saved import _top_hooks
from tpde.streaming.streamer import Streamer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROOM = 64 << 10


class Streamed:
    """A streamed model, and what streams it."""

    def __init__(self, model: Any, folder: Path, places: int = 4, delay: float = 0.0) -> None:
        pack_module(model, min_bytes=1024)
        source, extents = write_blobs(model, folder / "blobs")
        self.device = SimulatedDevice(places * ROOM, delay=delay)
        self.streamer, self.feed = Streamer(self.device, places, ROOM), MemoryFeed()
        self.streamer.own(self.feed, source)
        self.model = stream_model(model, extents, self.streamer, self.feed, torch.device("cpu"))

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *error: object) -> None:
        self.streamer.close()


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    plain = make(name)
    with Streamed(copy.deepcopy(plain), tmp_path, delay=1e-4) as ours, torch.no_grad():
        expected = outputs(name, plain, 2)
        for run in range(2):
            assert_same_bits(outputs(name, ours.model, 2), expected, f"run {run}")
        assert ours.streamer.ring.copied_bytes


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_gradients(name: str, tmp_path: Path) -> None:
    """The backward pass streams again; adapters' gradients have the bits of those on the plain model."""
    plain = make(name)
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    bias = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))

    def loss(model: Any) -> Any:
        embedded = model.get_input_embeddings()(inputs(name, 2, 5)["input_ids"]) + bias
        return model(inputs_embeds=embedded).logits.float().square().sum()

    (expected,) = torch.autograd.grad(loss(plain), bias)
    with Streamed(copy.deepcopy(plain), tmp_path) as ours:
        (found,) = torch.autograd.grad(loss(ours.model), bias)
        assert_same_bits(found, expected)


def test_weights_read_from_outside(tmp_path: Path) -> None:
    plain = make("qwen2")
    with Streamed(copy.deepcopy(plain), tmp_path) as ours:
        for path, module in packed_modules(ours.model):
            assert_same_bits(module.weight, plain.get_submodule(path).weight, path)


def test_compiled(tmp_path: Path) -> None:
    plain = make("llama")
    took = inputs("llama", 2, 5)
    with Streamed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
        expected = torch.compile(plain, backend="aot_eager", fullgraph=True)(**took).logits
        torch.compiler.reset()
        found = torch.compile(ours.model, backend="aot_eager", fullgraph=True)(**took).logits
        assert_same_bits(found, expected)


def test_an_exception_in_a_forward_leaves_the_model_usable(tmp_path: Path) -> None:
    plain = make("llama")
    with Streamed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
        expected = outputs("llama", plain, 2)
        failing = ours.model.model.layers[1].mlp.register_forward_hook(_fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            outputs("llama", ours.model, 2)
        failing.remove()
        assert_same_bits(outputs("llama", ours.model, 2), expected)


def _fail(*_: object) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("where", ["forward", "decoding"])
def test_ctrl_c_in_a_forward_leaves_the_model_usable(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any thread, and no hooks on saved tensors stay."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    plain = make("llama")
    with Streamed(copy.deepcopy(plain), tmp_path) as ours:
        expected = outputs("llama", plain, 2)
        mlp = ours.model.model.layers[1].mlp
        with monkeypatch.context() as patch:
            if where == "forward":
                patch.setattr(mlp, "forward", interrupt)
            else:
                patch.setattr(mlp.up_proj.tpde_group(), "fill", interrupt)
            with pytest.raises(KeyboardInterrupt):
                outputs("llama", ours.model, 2)
        assert _top_hooks() is None
        assert mlp.up_proj.tpde_group().workspace.thread == 0
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(outputs("llama", ours.model, 2)), daemon=True)
        other.start()
        other.join(60)
        assert_same_bits(found[0], expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
def test_errors_in_hooks_of_others_leave_the_model_usable(
    where: str, earlier: bool, error: type[BaseException], tmp_path: Path
) -> None:
    """Of hooks that a block had before its weights were packed, or was given later."""
    plain, failing = make("llama"), False

    def fail(*_: object) -> None:
        if failing:
            raise error("theirs")

    def hook(block: nn.Module) -> None:
        if where == "before":
            block.register_forward_pre_hook(fail)
        else:
            block.register_forward_hook(fail)

    expected = outputs("llama", plain, 2)
    if earlier:
        hook(plain.model.layers[1])
    with Streamed(plain, tmp_path) as ours:
        block = ours.model.model.layers[1]
        if not earlier:
            hook(block)
        failing = True
        with pytest.raises(error, match="theirs"):
            outputs("llama", ours.model, 2)
        failing = False
        assert _top_hooks() is None
        assert block.mlp.up_proj.tpde_group().workspace.thread == 0
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(outputs("llama", ours.model, 2)), daemon=True)
        other.start()
        other.join(60)
        assert_same_bits(found[0], expected)


def test_two_models_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = make("llama"), make("gpt2")
    with (
        Streamed(copy.deepcopy(first), tmp_path / "a") as a,
        Streamed(copy.deepcopy(second), tmp_path / "b") as b,
        torch.no_grad(),
    ):
        for _ in range(2):
            for plain, ours, name in ((first, a, "llama"), (second, b, "gpt2")):
                assert_same_bits(outputs(name, ours.model, 1), outputs(name, plain, 1), name)


def test_what_a_streamed_model_refuses(tmp_path: Path) -> None:
    with Streamed(make("llama"), tmp_path) as ours:
        with pytest.raises(PackedWeight, match="to copy, pickle or save it"):
            copy.deepcopy(ours.model)
        with pytest.raises(PackedWeight, match="cannot be cast"):
            ours.model.half()
        ours.model.to("cpu")
        for away in (
            lambda it: it.to("meta"),
            lambda it: it.to(device="meta"),
            lambda it: it.model.to("meta"),
        ):
            with pytest.raises(PackedWeight, match=r"is streamed .* to move it from cpu"):
                away(ours.model)
            assert {it.device.type for it in ours.model.parameters()} == {"cpu"}, "nor what is plain"
