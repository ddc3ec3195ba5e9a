"""Mixture-of-experts models of which only experts that are routed to are fetched: the plain model's bits."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from support.models import assert_same_bits, inputs, make, outputs, torch
from support.simulated import MemoryFeed, Probe, SimulatedDevice
from support.streamed import stream_model, write_blobs
from torch import nn

from tpde.errors import Corrupt, InvalidInput, ReadError
from tpde.nn import (
    PackedTensor,
    finish,
    pack_module,
    pack_tensor,
    packed_modules,
    replace_parameter,
    route_experts,
)
from tpde.nn.routing import fused
from tpde.streaming.experts import ExpertStore, expert_room
from tpde.streaming.streamer import Streamer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROOM, RING = 64 << 10, 4
MODELS = ["mixtral", "qwen3_moe"]
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def by_expert(model: Any) -> Any:
    """Pack fused weights as checkpoints of single experts give them: gate and up in blobs of their own."""
    for path, module in list(model.named_modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() != 3:
                continue
            sources = []
            for e, expert in enumerate(parameter.data):
                for i, half in enumerate(expert.chunk(2) if name == "gate_up_proj" else [expert]):
                    packed = pack_tensor(half.contiguous(), f"{path}.{e}.{name}.{i}")
                    assert packed is not None
                    sources += packed.sources
            replace_parameter(model, f"{path}.{name}", PackedTensor(sources, parameter.shape))
    return pack_module(model, min_bytes=1024)


class Routed:
    """A streamed model whose experts are fetched as routed to."""

    def __init__(
        self, model: Any, folder: Path, *, places: int = 64, split: bool = False, delay: float = 0.0
    ) -> None:
        packed = by_expert(model) if split else pack_module(model, min_bytes=1024)
        source, extents = write_blobs(packed, folder / "blobs")
        self.fetched: list[list[int]] = []
        self.places, self.feed = places, MemoryFeed()
        self.device = SimulatedDevice(RING * ROOM + (16 << 20), delay=delay)  # large enough for any cache
        self.streamer = Streamer(self.device, RING, ROOM)
        self.streamer.own(self.feed, source)
        self.model = stream_model(packed, extents, self.streamer, self.feed, torch.device("cpu"), self._route)
        self.spoil()

    def _route(self, model: Any) -> None:
        modules = [module for _, module in packed_modules(model) if fused(module)]
        room = max(expert_room(fused(module), ROOM) for module in modules)
        self.store = ExpertStore(self.device, RING * ROOM, self.places * room, room, ROOM)
        for module in modules:
            route_experts(module, Spy(self.store.module(fused(module)), self.fetched))

    def spoil(self) -> None:
        """Fill the workspace with NaN."""
        for _, module in packed_modules(self.model):
            for slot in module.tpde_slots.values():
                if slot.group is not None:
                    slot.group.workspace.buffer.fill_(0xFF)

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *error: object) -> None:
        self.streamer.close()


class Spy:
    def __init__(self, source: Any, fetched: list[list[int]]) -> None:
        self.source, self.fetched = source, fetched

    def fetch(self, numbers: Any, out: Any) -> None:
        self.fetched.append(list(numbers))
        self.source.fetch(numbers, out)


def routed_to(model: Any) -> list[list[int]]:
    """Note which experts a plain model's router chooses, call by call."""
    found: list[list[int]] = []
    for module in model.modules():
        if any(parameter.dim() == 3 for parameter in module._parameters.values() if parameter is not None):
            module.register_forward_pre_hook(
                lambda module, args: found.append(sorted(set(args[1].reshape(-1).tolist())))
            )
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("split", [False, True])
def test_only_routed_experts_are_fetched(name: str, implementation: str, split: bool, tmp_path: Path) -> None:
    plain = make(name)
    plain.set_experts_implementation(implementation)
    with Routed(copy.deepcopy(plain), tmp_path, split=split, delay=1e-4) as ours, torch.no_grad():
        wanted, copied = routed_to(plain), []
        for run in range(2):
            ours.spoil()
            ours.fetched.clear()
            wanted.clear()
            assert_same_bits(outputs(name, ours.model, 1), outputs(name, plain, 1), f"run {run}")
            assert ours.fetched == wanted
            copied.append(ours.store.copied_bytes)
        assert copied[0] == copied[1], "the second run found everything in the cache"
        experts = 12 if name == "qwen3_moe" else 4
        assert any(len(numbers) < experts for numbers in wanted)
        first = {(i % 2, n) for i, numbers in enumerate(wanted) for n in numbers}
        assert ours.store.cache.misses == len(first)
        assert ours.store.cache.hits == 2 * sum(map(len, wanted)) - len(first)


def test_closing_waits_for_experts_that_are_being_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Routed(make("mixtral"), tmp_path) as ours:
        probe, seen, fetch = Probe(ours.streamer._lock), [], ours.store.fetch
        ours.streamer._lock = probe

        def close() -> None:
            ours.streamer.close()
            probe.asked.set()  # had it not waited

        other = threading.Thread(target=close, daemon=True)

        def fetched(*args: Any) -> None:
            other.start()
            assert probe.asked.wait(60)
            seen.append(ours.feed.closed)
            fetch(*args)

        monkeypatch.setattr(ours.store, "fetch", fetched)
        with pytest.raises(ReadError, match="was closed"):  # by what is wanted next
            outputs("mixtral", ours.model, 1)
        other.join(60)
        assert not other.is_alive()
        assert seen == [0]
        assert ours.feed.closed == 1
        ours.streamer.ring.device = SimulatedDevice(ROOM)


@pytest.mark.parametrize("places", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_small_caches(name: str, places: int, tmp_path: Path) -> None:
    plain = make(name)
    with Routed(copy.deepcopy(plain), tmp_path, places=places, delay=1e-4) as ours, torch.no_grad():
        for _ in range(2):
            ours.spoil()
            assert_same_bits(outputs(name, ours.model, 2), outputs(name, plain, 2))
        assert len(ours.store.cache) == places
        assert ours.store.cache.misses > places


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_gradients(name: str, implementation: str, tmp_path: Path) -> None:
    plain = make(name)
    plain.set_experts_implementation(implementation)
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    bias = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))

    def loss(model: Any) -> Any:
        embedded = model.get_input_embeddings()(inputs(name, 2, 5)["input_ids"]) + bias
        return model(inputs_embeds=embedded).logits.float().square().sum()

    (expected,) = torch.autograd.grad(loss(plain), bias)
    with Routed(copy.deepcopy(plain), tmp_path) as ours:
        (found,) = torch.autograd.grad(loss(ours.model), bias)
        assert_same_bits(found, expected)


def test_the_backward_pass_decodes_only_experts_it_needs(tmp_path: Path) -> None:
    with Routed(make("qwen3_moe"), tmp_path, split=True) as ours:
        ours.model.set_experts_implementation("eager")
        embedded = torch.randn(1, 1, 64).to(torch.bfloat16).requires_grad_()
        loss = ours.model(inputs_embeds=embedded).logits.float().sum()
        before = len(ours.device.copied)
        loss.backward()
        experts = {name for name in ours.device.copied[before:] if ".experts." in name}
        assert {name.split(".experts.")[0] for name in experts} == {f"model.layers.{i}.mlp" for i in (0, 2)}
        assert len(experts) == 2 * 2 * 3  # layers, experts, blobs: all blobs are 72


def test_compiled_models_decode_all(tmp_path: Path) -> None:
    plain = make("mixtral")
    plain.set_experts_implementation("grouped_mm")
    took = inputs("mixtral", 2, 5)
    with Routed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
        expected = torch.compile(plain, backend="aot_eager", fullgraph=True)(**took).logits
        torch.compiler.reset()
        found = torch.compile(ours.model, backend="aot_eager", fullgraph=True)(**took).logits
        assert_same_bits(found, expected)
        assert not ours.fetched


def test_weights_read_from_elsewhere(tmp_path: Path) -> None:
    """From outside, and by other code inside of the block's forward pass, which sees all experts."""
    plain = make("mixtral")
    seen = []
    with Routed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
        experts = ours.model.model.layers[1].mlp.experts
        expected = plain.model.layers[1].mlp.experts
        assert_same_bits(experts.down_proj, expected.down_proj)
        # Hooks of the module run before and after its forward pass, inside of the block's.
        experts.register_forward_pre_hook(lambda *_: seen.append(experts.down_proj.clone()))
        experts.register_forward_hook(lambda *_: seen.append(experts.gate_up_proj.clone()))
        assert_same_bits(outputs("mixtral", ours.model, 1), outputs("mixtral", plain, 1))
        assert seen
        for before, after in zip(seen[::2], seen[1::2], strict=True):
            assert_same_bits(before, expected.down_proj)
            assert_same_bits(after, expected.gate_up_proj)


def test_experts_called_alone(tmp_path: Path) -> None:
    plain = make("mixtral")
    x = torch.randn(3, 64).to(torch.bfloat16)
    index = torch.tensor([[0, 2], [2, 0], [0, 2]])
    weights = torch.full((3, 2), 0.5, dtype=torch.bfloat16)
    with Routed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
        expected = plain.model.layers[0].mlp.experts(x, index, weights)
        experts = ours.model.model.layers[0].mlp.experts
        assert_same_bits(experts(x, top_k_weights=weights, top_k_index=index), expected)
        assert ours.fetched == [[0, 2]]


class Dense(nn.Module):
    """Experts that all compute, as in a class that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 96))

    def forward(self, x: Any, top_k_index: Any) -> Any:
        every = torch.einsum("td,edf->etf", x, self.up)
        return every[top_k_index[:, 0], torch.arange(x.shape[0])]


def test_unknown_modules_are_given_all_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Dense()).to(torch.bfloat16)
    x = torch.randn(3, 64).to(torch.bfloat16)
    index = torch.tensor([[1], [1], [3]])
    with Routed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same_bits(ours.model[0](x, index), plain[0](x, index))
        assert ours.fetched == [[0, 1, 2, 3]] * 2
    assert [it.getMessage() for it in caplog.records if it.name == "tpde"] == [
        "which experts a `Dense` needs is not known: all of them are fetched for each call"
    ]


def test_unknown_implementations_are_given_all_experts(tmp_path: Path) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    plain = make("mixtral")
    ALL_EXPERTS_FUNCTIONS.register("somebodys", batched_mm_experts_forward)
    try:
        with Routed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
            for model in (plain, ours.model):
                model.set_experts_implementation("somebodys")
            assert_same_bits(outputs("mixtral", ours.model, 1), outputs("mixtral", plain, 1))
            assert ours.fetched == [[0, 1, 2, 3]] * 6
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("somebodys", None)
        ALL_EXPERTS_FUNCTIONS._local_mapping.pop("somebodys", None)


def test_damage_is_named_and_not_kept(tmp_path: Path) -> None:
    plain = make("mixtral")
    with Routed(copy.deepcopy(plain), tmp_path, split=True) as ours, torch.no_grad():
        experts = ours.model.model.layers[0].mlp.experts
        packed = experts.down_proj.packed.sources[2]
        whole = ours.feed.whole(packed.extent)
        at = packed.extent.offset + packed.header.chunks_at + 40
        whole[at] ^= 0x10
        index, weights = torch.tensor([[2, 1]]), torch.ones(1, 2, dtype=torch.bfloat16)
        x = torch.randn(1, 64).to(torch.bfloat16)
        with pytest.raises(Corrupt, match=r"`model\.layers\.0\.mlp\.experts\.2\.down_proj\.0`, chunk 0"):
            experts(x, index, weights)
        assert not len(ours.store.cache)
        whole[at] ^= 0x10
        assert_same_bits(experts(x, index, weights), plain.model.layers[0].mlp.experts(x, index, weights))
        assert_same_bits(outputs("mixtral", ours.model, 1), outputs("mixtral", plain, 1))


def test_a_failing_feed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make("mixtral")
    with Routed(copy.deepcopy(plain), tmp_path) as ours, torch.no_grad():
        count = [0]
        wait = ours.feed.wait

        def failing(ticket: Any) -> int:
            count[0] += 1
            if count[0] == 9:
                raise OSError("on purpose")
            return wait(ticket)

        monkeypatch.setattr(ours.feed, "wait", failing)
        with pytest.raises(OSError, match="on purpose"):
            outputs("mixtral", ours.model, 2)
        assert_same_bits(outputs("mixtral", ours.model, 2), outputs("mixtral", plain, 2))
        assert not ours.store._asked


def test_what_cannot_be_routed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 64, 96)), nn.Parameter(torch.randn(3, 64, 96))

    linear = pack_module(nn.Sequential(nn.Linear(64, 64)), min_bytes=0)
    with pytest.raises(InvalidInput, match=r"fused weights of a .*Linear are of \[\] experts"):
        route_experts(linear[0], Spy(None, []))
    model = pack_module(nn.Sequential(Odd()).to(torch.bfloat16), min_bytes=0)
    with pytest.raises(InvalidInput, match=r"Odd are of \[4, 3\] experts"):
        route_experts(model[0], Spy(None, []))
    finish(model)
