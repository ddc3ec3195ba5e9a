"""What a model needs beside its packed weights, term by term, in numbers that were worked out by hand."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.card import DEVICE, Card  # noqa: E402
from support.checkpoints import write  # noqa: E402
from support.contents import fill  # noqa: E402
from support.craft import file_of, prefix_blob  # noqa: E402
from support.experts import moe  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402
from support.models import make  # noqa: E402
from support.pretended import OnHost  # noqa: E402
from support.simulated import MemoryFeed  # noqa: E402
from support.small import Block, Model  # noqa: E402

import tpde.torch as packed_torch  # noqa: E402
from tpde.errors import (  # noqa: E402
    Corrupt,
    InvalidInput,
    NotPacked,
    OutOfMemory,
    PackedWeight,
    ReadError,
    UnsupportedDevice,
    UnsupportedVersion,
)
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.transformers import budget_plan as model_planning  # noqa: E402
from tpde.integrations.transformers import expert_modules, model_footprint, run_memory  # noqa: E402
from tpde.integrations.transformers.activations import Activations, activations_of  # noqa: E402
from tpde.integrations.transformers.recurrent import Recurrent, Scan  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402
from tpde.io.sources import Extent  # noqa: E402
from tpde.loading import (  # noqa: E402
    devices,
    model_plan,
    reading,
)
from tpde.loading.assignment import assign  # noqa: E402
from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.feeds import Feeds  # noqa: E402
from tpde.loading.footprint import FIXED_BYTES, module_calls, plain_bytes  # noqa: E402
from tpde.loading.model_units import TABLES_BYTES, units_of  # noqa: E402
from tpde.loading.quantized import PackedConfig  # noqa: E402
from tpde.memory.allowance import Allowance  # noqa: E402
from tpde.nn import pack_module, packed_modules  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.layout import page_tables  # noqa: E402
from tpde.planning.units import Footprint  # noqa: E402
from tpde.streaming.experts import expert_room  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402

CPU = torch.device("cpu")
SPEC = TensorSpec("BF16", (64, 128))


def llama(**options: Any) -> Any:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**(sizes | heads | {"pad_token_id": 0} | options))
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def test_a_cache_of_keys_and_values() -> None:
    """Of 100 tokens: 2 heads x 16 x 2 x 2 bytes a token and layer; a quarter more, and a layer that grows."""
    layer = 2 * 16 * 2 * 2 * 100
    assert model_footprint.cache_bytes(llama(), 100, 2) == int(layer * 3 * 1.25) + layer
    assert (
        model_footprint.cache_bytes(llama(num_key_value_heads=4), 100, 2)
        == int(2 * layer * 3 * 1.25) + 2 * layer
    )
    only = {"model.layers.1.mlp.up_proj.weight"}
    assert model_footprint.cache_bytes(llama(), 100, 2, only) == int(layer * 1.25) + layer
    assert model_footprint.cache_bytes(llama(), 100, 2, set()) == 0


def test_a_cache_of_an_encoder_and_a_decoder() -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    layer = 4 * 16 * 4 * 100
    assert model_footprint.cache_bytes(model, 100, 4) == int(layer * 4 * 1.25) + layer


def test_states_and_the_one_that_is_replaced() -> None:
    """Of two convolutions of 64 channels over 3 tokens, in bfloat16; another layer has none."""
    model, states = make("lfm2"), 2 * 64 * 3 * 2
    assert model_footprint.state_bytes(model, 8) == 8 * (states + states // 2)
    one = [name for name, _ in model.named_parameters() if name.startswith("model.layers.2.")]
    assert model_footprint.state_bytes(model, 8, one) == 8 * (states // 2 + states // 4)
    assert model_footprint.state_bytes(llama(), 8) == 0


class _Scan:
    def bytes(self, tokens: int, batch: int) -> int:
        return 7 * tokens * batch


ROOM = Activations(states=10, inside=0, pair=0, experts=0, logits=0, sampling=0)


def test_the_largest_of_what_follows_each_other() -> None:
    assert ROOM.tokens(100, 4) == 1000
    assert ROOM._replace(inside=3, pair=2).tokens(100, 4) == 1000 + 300 + 20_000
    assert ROOM._replace(logits=5, sampling=6).tokens(100, 4) == 1000 + 500 + 24
    assert ROOM._replace(sampling=6).tokens(3, 8) == 30 + 18, "no more sequences than tokens"
    scanning = Recurrent(states=0, scan=_Scan())  # type: ignore[arg-type]
    assert ROOM._replace(recurrent=scanning).tokens(100, 4) == 1000 + 2800
    every = ROOM._replace(inside=3, logits=5, recurrent=scanning)
    assert every.tokens(100, 4) == 1000 + 2800, "one after the other"


def test_copies_of_experts_come_on_top() -> None:
    copying = ROOM._replace(experts=11, copies=True)
    assert copying.bytes(100, 4) == 1000 + 44
    assert copying.bytes(2, 4) == 20 + 22
    assert copying._replace(copies=False).bytes(100, 4) == 1000


def test_activations_of_a_model() -> None:
    found = activations_of(llama(), 2)
    assert found.states == 64 * (2 * 2 + 3 * 4)
    assert found.inside == 2 * 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    assert (found.logits, found.sampling, found.experts) == (2000, 40_000, 0)
    scaled = llama()
    scaled.config.final_logit_softcapping = 30.0
    assert activations_of(scaled, 2).logits == 4000, "and a copy that is scaled"


def test_plain_weights_are_counted_as_they_are_allocated() -> None:
    model = llama(tie_word_embeddings=True)
    names = dict(model.named_parameters(remove_duplicate=False))
    norms = 7 * 512  # of 128 bytes
    buffers = len({id(it) for it in model.buffers()}) * 512
    packed = {name for name, it in names.items() if it.dim() == 2} - {"lm_head.weight"}
    assert plain_bytes(model, packed) == norms + buffers, "the head is the embedding"
    assert plain_bytes(model, packed - {"model.embed_tokens.weight"}) == norms + buffers + 128_000
    assert plain_bytes(model, packed, {"model.norm.weight"}) == 512


def test_lists_of_modules_are_not_called() -> None:
    lists = [torch.nn.ModuleList([torch.nn.Linear(1, 1)]), torch.nn.ModuleDict({"a": torch.nn.ReLU()})]
    assert module_calls(torch.nn.Sequential(*lists)) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_only_rows_are_decoded_where_there_are_embeddings_alone(tied: bool, tmp_path: Path) -> None:
    """Neither of a head that is an embedding's weight, nor of a block that has one among others."""

    class Places(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.places = torch.nn.Embedding(300, width)

    model: Any = Model(block=Places).to(torch.bfloat16)
    state = {name: it.detach() for name, it in model.named_parameters() if it.dim() == 2}
    model.all_tied_weights_keys = {"head.weight": "embed.weight"} if tied else {}
    if not tied:
        state["head.weight"] = state["embed.weight"] * 2
    packed_torch.save_file(state, tmp_path / "model.safetensors")
    with Checkpoint([tmp_path / "model.safetensors"]) as checkpoint:
        assert set(checkpoint.packed) == set(state)
        found = units_of(model, {name: it.run for name, it in checkpoint.packed.items()})
    blocks = {f"blocks.{i}": False for i in range(3)}
    assert {it.name: it.rows for it in found} == blocks | {"head": False} | ({} if tied else {"embed": True})


@pytest.mark.parametrize("numbers", [[4], [8, 8], [4, 16, 2]])
def test_a_cache_of_experts_has_whole_places_for_those_that_there_are(
    numbers: list[int], tmp_path: Path
) -> None:
    """Each place is for the largest of any module."""
    weights = {
        f"{module}.{name}": (0.02 * torch.randn(count, 64, 32 * count)).to(torch.bfloat16)
        for module, count in enumerate(numbers)
        for name in ("up", "down")
    }
    packed_torch.save_file(weights, tmp_path / "model.safetensors")
    with Checkpoint([tmp_path / "model.safetensors"]) as found:
        slots = {
            name: SimpleNamespace(shape=it.shape, packed=PackedTensor(_streamed(it), it.shape), offset=0)
            for name, it in found.packed.items()
        }
        modules: Any = [
            SimpleNamespace(tpde_slots={it: slots[f"{module}.{it}"] for it in ("up", "down")})
            for module in range(len(numbers))
        ]
        largest = max(expert_room(list(it.tpde_slots.values()), 16384) for it in modules)
        for least in (40_000, 4 << 20):
            for spare in (0, 1000, (2 << 20) + 270_000, 1 << 30):
                size, room = expert_modules.cache_size(modules, 16384, least, spare)
                assert room == largest
                fit = (least + max(spare - (2 << 20), 0)) // room
                assert size == min(fit, sum(numbers)) * room


def _streamed(stored: Any) -> list[Any]:
    return [Streamed(stored.extent, None, CPU, MemoryFeed())]


def test_tables_of_what_is_on_the_device_have_room(tmp_path: Path) -> None:
    """Of each tensor once, though two parameters have it."""
    model: Any = Model(blocks=1).to(torch.bfloat16)
    state = {name: it.detach() for name, it in model.named_parameters() if it.dim() == 2}
    packed_torch.save_file(state, tmp_path / "model.safetensors")
    with Checkpoint([tmp_path / "model.safetensors"]) as found:
        runs = {name: it.run for name, it in found.packed.items()}
        runs["head.weight"] = runs["embed.weight"]
        for only, tensors in ((None, 3), ({"embed.weight", "head.weight"}, 1), (set(), 0)):
            made = model_plan.place_units(model, runs, Footprint(5, 0, 0, 0), 1 << 30, None, only)
            assert made.parts["plain"] == 5 + tensors * TABLES_BYTES


# ---- files and places ----


def _write(tmp_path: Path, *parts: dict[str, Any]) -> list[Path]:
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(parts))]
    for path, tensors in zip(paths, parts, strict=True):
        path.write_bytes(pack_bytes(safetensors_bytes(tensors)))
    return paths


def _open_files(folder: Path) -> int:
    links = [os.path.join("/proc/self/fd", it) for it in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(it).startswith(str(folder)) for it in links if os.path.lexists(it))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_checkpoint_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    weight, bias = (SPEC, fill("normal", SPEC)), (TensorSpec("U8", (3,)), b"abc")
    for other in ({"w": weight}, {"b": bias}):
        paths = _write(tmp_path, {"w": weight, "b": bias}, other)
        with pytest.raises(Corrupt, match="is in another file too") as caught:
            Checkpoint(paths)
        assert _open_files(tmp_path) == 0
        assert caught.value.where == str(paths[1])
    with Checkpoint(paths[:1]) as found:
        assert _open_files(tmp_path) == 1
        assert (list(found.packed), list(found.plain)) == (["w"], ["b"])
    assert _open_files(tmp_path) == 0


def test_a_blob_of_another_shape_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_of(prefix_blob()))
    with Checkpoint([tmp_path / "x"]) as found:
        stored = found.packed["x"]
        (opened,) = found.read([stored], torch.device("cpu"))
        assert opened.shape == (3, 500)
        stored.spec = TensorSpec("BF16", (500, 3))
        with pytest.raises(Corrupt, match=r"is BF16 \[3, 500\], but BF16 \[500, 3\]") as caught:
            found.read([stored], torch.device("cpu"))
        assert caught.value.tensor == "x"


def test_others_read_no_more_after_an_error() -> None:
    one_by_one = partial(reading.Reader, piece=10, threads=1)
    reads: list[int] = []

    class Source:
        name, size = "x", 1000

        def read_into(self, offset: int, out: memoryview) -> None:
            reads.append(offset)
            if len(reads) == 2:
                raise ReadError("the disk failed")

    with pytest.raises(ReadError, match="the disk failed"):
        reading.read_extents([Extent(Source(), 0, 1000, "x")], torch.device("cpu"), make_reader=one_by_one)
    assert len(reads) == 2


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert devices.checked_device("cuda") == torch.device("cuda", 1)
    assert devices.checked_device(0) == torch.device("cuda", 0)
    for index in (2, 3):
        with pytest.raises(
            UnsupportedDevice, match=f"there is no `cuda:{index}`, the last device is `cuda:1`"
        ):
            devices.checked_device(index)
    with pytest.raises(UnsupportedDevice, match="not on `meta`"):
        devices.checked_device("meta")


@pytest.mark.parametrize(("before", "frozen", "after"), [(1, 0, 1), (1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_what_was_frozen_stays_so_where_that_is_asked_for(before: int, frozen: int, after: int) -> None:
    layer = torch.nn.Linear(4, 3)
    layer.weight.requires_grad_(bool(before))
    assign(layer, "weight", torch.ones(3, 4), frozen=bool(frozen))
    assert layer.weight.requires_grad == bool(after)
    with pytest.raises(
        InvalidInput, match=r"has shape \[4, 3\] in the packed files, the model needs \[3, 4\]"
    ):
        assign(layer, "weight", torch.ones(4, 3))


def test_configurations_that_cannot_run() -> None:
    PackedConfig()
    with pytest.raises(UnsupportedVersion, match="format version 2"):
        PackedConfig(2)
    for source in ({"quant_method": "fp8"}, "fp8"):
        with pytest.raises(InvalidInput, match="quantized with `fp8` before it was packed"):
            PackedConfig(source=source)


# ---- memory of a device ----


def test_a_peak_counts_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.reserved = card.allocated = 20
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 50)
    peak = run_memory.Peak(DEVICE)
    card.free -= 25
    assert peak.bytes() == 25 + 30


def test_a_footprint_is_of_weights_and_buffers() -> None:
    model: Any = torch.nn.Linear(4, 3)
    model.register_buffer("more", torch.zeros(10, dtype=torch.int64))
    footprint = run_memory.MemoryFootprintMethod(model)
    assert footprint() == 4 * 15 + 80
    assert footprint(return_buffers=False) == 4 * 15


def test_a_closed_model_gives_its_budget_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    streaming = Streaming(Budget(4 << 30))
    plan: Any = SimpleNamespace(parts={"pages": 2 << 20})
    streaming.decide(DEVICE, lambda _: plan)
    assert card.fraction < 1
    streaming.close()
    assert card.fraction == 1
    Allowance(DEVICE, 8 << 30, 0)  # what it had is there again
    gc.collect()


def test_two_experts_have_room_with_a_margin() -> None:
    """Of the largest module; an expert may be larger than the mean, and shares chunks with its neighbours."""
    model: Any = torch.nn.Module()
    with torch.device("meta"):
        model.a, model.b = (next(it for it in moe("mixtral").modules() if _routes(it)) for _ in range(2))
        model.dense = torch.nn.Linear(1, 1)
    runs: Any = {
        name: SimpleNamespace(
            shape=(8, 1, 1), parts=[SimpleNamespace(extent=SimpleNamespace(size=size)) for size in sizes]
        )
        for name, sizes in {
            "a.up": [40 << 20, 40 << 20],
            "a.down": [80 << 20],
            "b.up": [8 << 20],
            "dense.weight": [1 << 40],
        }.items()
    }
    largest = 20 << 20
    assert expert_modules.cache_least(model, runs, None) == -(
        -2 * (largest * 17 // 16 + (64 << 10)) // (2 << 20)
    ) * (2 << 20)
    small = -(-2 * ((1 << 20) * 17 // 16 + (64 << 10)) // (2 << 20)) * (2 << 20)
    assert expert_modules.cache_least(model, runs, {"b.up"}) == small
    assert expert_modules.cache_least(model, runs, {"dense.weight"}) == 0


def _routes(module: Any) -> bool:
    return type(module).__name__ == "MixtralExperts"


def test_what_streams_a_model_is_not_copied() -> None:
    """Though nothing of it were packed: its files and memory are this process's."""
    for duplicate in (pickle.dumps, copy.deepcopy):
        with pytest.raises(PackedWeight, match="cannot be copied or pickled"):
            duplicate(Streaming(Budget(4 << 30)))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_feeds_that_cannot_be_opened_are_closed(tmp_path: Path) -> None:
    """At once: whoever has the error may keep it, and with it all that was opened."""
    closed: list[str] = []

    def refuse(*_: Any) -> None:
        raise OutOfMemory("no buffers")

    memory = SimpleNamespace(close=lambda: closed.append("memory"))
    machine: Any = SimpleNamespace(memory=lambda *_: memory, disk=refuse)
    weight = (SPEC, fill("normal", SPEC))
    with Checkpoint(_write(tmp_path, {"a": weight}, {"b": weight})) as found:
        host, disk = [found.packed["a"]], [found.packed["b"]]
        plan: Any = SimpleNamespace(staging=1 << 20, piece=1 << 20)
        with pytest.raises(OutOfMemory, match="no buffers") as caught:
            Feeds(torch.device("cpu"), plan, host, disk, machine)
        assert closed == ["memory"]
        assert _open_files(tmp_path) == 2, "the checkpoint's own"
        assert caught.value.message == "no buffers"


# ---- terms that few models have ----


def test_the_larger_of_two_scans() -> None:
    one, other = Scan(1, 5.0, 3), Scan(4, 2.0, 6)
    assert one.most(other) == other.most(one) == Scan(4, 5.0, 6)
    assert Scan(7, 0.5, 11).bytes(10, 3) == 70 + 50 + 33


@pytest.mark.parametrize(
    ("named", "copies"),
    [
        ({}, 1),
        ({"final_logit_softcapping": None}, 1),
        ({"final_logit_softcapping": 30.0}, 2),
        ({"logit_scale": 0.25}, 2),
        ({"logits_scaling": 8.0}, 2),
        ({"output_multiplier": 2.0}, 2),
        ({"lm_head_multiplier": 2.0}, 2),
        ({"softcap": 20.0}, 2),
        ({"attn_logit_softcapping": 50.0}, 1),
        ({"router_logits_scale": 50.0}, 1),
        ({"logit_scale_init_value": 2.6}, 1),
    ],
)
def test_logits_that_are_scaled_are_there_twice(named: dict[str, Any], copies: int) -> None:
    model = llama()
    for name, value in named.items():
        setattr(model.config, name, value)
    assert activations_of(model, 2).logits == copies * 2000


def test_latent_attention_is_cached_expanded() -> None:
    """For each head: keys of both kinds and values, of 100 tokens in two bytes."""
    model = llama()
    for name, value in {"qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7}.items():
        setattr(model.config, name, value)
    layer = 4 * (5 + 3 + 7) * 2 * 100
    assert model_footprint.cache_bytes(model, 100, 2) == int(layer * 3 * 1.25) + layer


def test_models_that_cache_nothing() -> None:
    class NoCache(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any) -> Any:
            return input_ids

    model = llama()
    assert model_footprint.cache_bytes(NoCache(model.config), 100, 2) == 0
    model.config.is_decoder = True
    assert model_footprint.cache_bytes(model, 100, 2) > 0
    model.config.is_decoder = False
    assert model_footprint.cache_bytes(model, 100, 2) == 0, "an encoder"
    model = llama()
    vars(model.config)["num_attention_heads"] = None
    assert model_footprint.cache_bytes(model, 100, 2) == 0, "no attention"


def test_blocks_of_unknown_kinds_cache_all() -> None:
    """Where there are more blocks than layers, it is not known which of them cache."""
    model, only = llama(num_hidden_layers=4), {"model.layers.1.mlp.up_proj.weight"}
    every = model_footprint.cache_bytes(model, 100, 2)
    assert model_footprint.cache_bytes(model, 100, 2, only) < every
    model.config.num_hidden_layers = 3
    every = model_footprint.cache_bytes(llama(), 100, 2)
    assert model_footprint.cache_bytes(model, 100, 2, only) == every


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", "`max_tokens`"),
        ("mixtral", "`max_tokens` or `max_batch`"),  # whose experts are copied
        ("lfm2", "`max_tokens` or `max_batch`"),  # whose layers have states
    ],
)
def test_all_that_a_model_needs(name: str, said: str) -> None:
    model = moe(name, "grouped_mm") if name == "mixtral" else make(name)
    needs = model_footprint.footprint_of(model, set(), 100, 4, torch.bfloat16)
    assert needs.plain == plain_bytes(model, set())
    states = model_footprint.state_bytes(model, 4)
    assert (states > 0) == (name == "lfm2")
    assert needs.cache == model_footprint.cache_bytes(model, 100, 2) + states
    made = activations_of(model, 2)
    assert needs.activations == made.bytes(100, 4)
    assert made.copies == (name == "mixtral")
    assert (needs.fixed, needs.column, needs.argument) == (FIXED_BYTES, 200, said)
    one = [it for it, _ in model.named_parameters() if ".layers.1." in it]
    here = model_footprint.footprint_of(model, set(), 100, 4, torch.bfloat16, one)
    assert here.plain == plain_bytes(model, set(), one)
    assert here.cache == (
        model_footprint.cache_bytes(model, 100, 2, one) + model_footprint.state_bytes(model, 4, one)
    )
    assert here.activations == needs.activations


def test_the_dtype_of_most_numbers() -> None:
    many, few = torch.zeros(10, dtype=torch.float16), torch.zeros(9, dtype=torch.bfloat16)
    assert model_footprint.activation_dtype([few, many]) is torch.float16
    assert model_footprint.activation_dtype([few, many, few]) is torch.bfloat16, "all of one dtype together"
    assert model_footprint.activation_dtype([]) is torch.float32


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager", None])
def test_experts_are_copied_where_generate_does(implementation: str | None) -> None:
    for model, experts in ((llama(), False), (moe("mixtral"), True)):
        model.config._experts_implementation = implementation
        copies = experts and implementation in ("grouped_mm", "batched_mm")
        assert activations_of(model, 2).copies == copies


def test_attention_that_is_never_fused_has_scores() -> None:
    model = llama()
    assert activations_of(model, 2).pair == 1 + 2
    model.set_attn_implementation("eager")
    assert activations_of(model, 2).pair == 1 + 2 + 4 * (2 * 2 + 4)


def test_what_a_plan_of_a_model_counts(tmp_path: Path) -> None:
    """Of several devices: what the others have comes through page tables only."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 9}
    with opened_shape(write(tmp_path, moe("mixtral", **sizes)).packed) as (shape, files, plan):
        budget = Budget(1 << 40, None, 64)
        assert not model_planning.plan_streaming(shape, files, plan, budget).parts["pages"]
        here = {name for name in plan.runs if ".layers." in name and ".layers.0." not in name}
        plan.runs["again"] = plan.runs[min(here)]  # of the same bytes
        parts = {it: name in here for name, run in plan.runs.items() for it in run.parts}
        parts |= dict.fromkeys(plan.runs["again"].parts, True)
        others = [it for it, ours in parts.items() if not ours]
        for it in others:  # nobody reads them
            it.extent = it.extent._replace(size=it.extent.size << 16)
        made = model_planning.plan_streaming(shape, files, plan, budget, only=here)
        assert made.parts["pages"] == page_tables(sum(it.extent.size for it in others)) > 100 << 20
        assert not made.parts["experts"], "nothing is streamed"
        packed = sum(it.extent.size for it, ours in parts.items() if ours)
        budget = replace(budget, vram=made.used - made.parts["decoded"] + packed)
        made = model_planning.plan_streaming(shape, files, plan, budget, only=here)
        assert made.parts["experts"] == expert_modules.cache_least(shape, plan.runs, here) > 0


# ---- what runs take ----


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_a_peak_of_the_process(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="needs POSIX")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    assert run_memory.Peak(torch.device("cpu")).bytes() == 3000 * unit


def test_a_footprint_counts_packed_weights_once_as_what_they_take() -> None:
    torch.manual_seed(0)
    model: Any = Model().to(torch.bfloat16)
    plain = sum(it.nbytes for it in model.parameters())
    pack_module(model, min_bytes=0)
    sizes = run_memory.weight_bytes(model)
    packed = {
        id(slot.packed): slot.packed for _, it in packed_modules(model) for slot in it.tpde_slots.values()
    }
    assert sizes["packed_bytes"] == sum(it.packed_bytes for it in packed.values())
    assert sizes["unpacked_bytes"] == sum(it.nbytes for it in packed.values())
    assert sizes["unpacked_bytes"] + sizes["plain_bytes"] == plain
    assert run_memory.MemoryFootprintMethod(model)(False) == sizes["packed_bytes"] + sizes["plain_bytes"]


def test_a_footprint_keeps_no_model_and_goes_with_its_copy() -> None:
    model = torch.nn.Linear(4, 3)
    model.footprint = run_memory.MemoryFootprintMethod(model)
    gone, other = weakref.ref(model), copy.deepcopy(model)
    other.bias = None
    assert (model.footprint(), other.footprint()) == (60, 48)
    del model
    assert gone() is None


# ---- units of a plan ----


def _units(model: Any, folder: Path, names: list[str], only: Any = None) -> dict[str, Any]:
    state = {name: it.detach() for name, it in model.named_parameters() if name in names}
    packed_torch.save_file(state, folder / "model.safetensors")
    with Checkpoint([folder / "model.safetensors"]) as checkpoint:
        sizes = {name: it.extent.size for name, it in checkpoint.packed.items()}
        found = units_of(model, {name: it.run for name, it in checkpoint.packed.items()}, only)
        assert set(sizes) == set(names)
    return {it.name: (it, sizes) for it in found}


def _layers(width: int = 96) -> Any:
    torch.manual_seed(0)
    made = torch.nn.Module()
    made.head, made.tied = torch.nn.Linear(width, 70), torch.nn.Linear(width, 70)
    made.tied.weight = made.head.weight
    made.conv = torch.nn.Conv1d(32, 33, 3)
    made.blocks = torch.nn.ModuleList([Block(32)])
    return made.to(torch.bfloat16)


def test_a_layer_outside_of_blocks_may_be_tiled(tmp_path: Path) -> None:
    """By itself only: not a block's, nor one that is tied, nor what has no rows."""
    names = ["head.weight", "conv.weight", "blocks.0.up.weight", "blocks.0.down.weight"]
    model = _layers()
    found = {name: it for name, (it, _) in _units(model, tmp_path, names).items()}
    assert (found["head"].tile, found["head"].row) == (16 << 20, 96 * 2)
    assert [(found[it].tile, found[it].row) for it in ("conv", "blocks.0")] == [(0, 0)] * 2
    model.all_tied_weights_keys = {"tied.weight": "head.weight"}
    found = {name: it for name, (it, _) in _units(model, tmp_path, names).items()}
    assert (found["head"].tile, found["head"].row) == (0, 0)
    with torch.device("meta"):
        model.head = torch.nn.Linear((9 << 20) + 1, 70, dtype=torch.bfloat16)
    model.all_tied_weights_keys = {}
    with Checkpoint([tmp_path / "model.safetensors"]) as checkpoint:
        (wide,) = units_of(model, {"head.weight": checkpoint.packed["head.weight"].run})
    assert wide.row == (18 << 20) + 2
    assert wide.tile > wide.row + 512, "and what the chunks that it begins and ends in have beside it"
    assert wide.tile % 512 == 0


def test_bytes_of_a_unit(tmp_path: Path) -> None:
    names = ["head.weight", "blocks.0.up.weight", "blocks.0.down.weight"]
    found = _units(_layers(), tmp_path, names)
    for unit, (it, sizes) in found.items():
        here = [name for name in names if name.startswith(unit)]
        assert it.packed == sum(sizes[name] for name in here)
        plain = {"head.weight": 70 * 96 * 2, "blocks.0.up.weight": 6144, "blocks.0.down.weight": 6144}
        assert it.plain == sum(-(-plain[name] // 512) * 512 for name in here)
        assert it.index == len(here) * (512 + (16 << 10) + (2 << 10)), "of a chunk each"
        assert not it.resident
        assert not it.rows
    assert list(_units(_layers(), tmp_path, names, {"head.weight"})) == ["head"]
    assert list(found) == ["blocks.0", "head"], "in the order of a forward pass"


def test_experts_have_pieces_of_their_own(tmp_path: Path) -> None:
    """Where it is known which of them a call needs."""
    model: Any = torch.nn.Module()
    model.routed = next(it for it in moe("mixtral", num_local_experts=7).modules() if _routes(it))
    model.other = torch.nn.Module()
    for name, it in model.routed.named_parameters():
        model.other.register_parameter(name, torch.nn.Parameter(it.detach() * 2))
    names = [f"{kind}.{name}" for kind in ("routed", "other") for name in ("gate_up_proj", "down_proj")]
    found = {name: it for name, (it, _) in _units(model, tmp_path, names).items()}
    assert found["routed"].index == found["other"].index + 2 * 7 * 512


def test_what_no_gpu_decodes_in_pieces_is_resident(tmp_path: Path) -> None:
    """Though it were one of a block's tensors."""
    model = _layers()
    state = {name: it for name, it in model.named_parameters() if it.dim() == 2}
    paths = []
    for name, codec in (("head", "zstd"), ("blocks.0.up", "prefix"), ("blocks.0.down", "zstd")):
        weight = state[f"{name}.weight"].detach()
        stored = TensorSpec("BF16", tuple(weight.shape)), weight.view(torch.int16).numpy().tobytes()
        paths.append(tmp_path / name)
        paths[-1].write_bytes(pack_bytes(safetensors_bytes({f"{name}.weight": stored}), codec=codec))  # type: ignore[arg-type]
    with Checkpoint(paths) as found:
        runs = {name: it.run for name, it in found.packed.items()}
        assert {it.name: it.resident for it in units_of(model, runs)} == {"blocks.0": True, "head": True}
        del runs["blocks.0.down.weight"]
        assert {it.name: it.resident for it in units_of(model, runs)} == {"blocks.0": False, "head": True}


def test_a_damaged_header_names_its_tensor(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_of(prefix_blob()))
    with Checkpoint([tmp_path / "x"]) as found:
        stored = found.packed["x"]
        with (tmp_path / "x").open("r+b") as file:
            file.seek(stored.extent.offset)
            file.write(b"????")
        model: Any = torch.nn.Module()
        model.x = torch.nn.Linear(500, 3, bias=False)
        stored.name = "x.weight"
        with pytest.raises(Corrupt) as caught:
            units_of(model, {"x.weight": stored.run})
    assert caught.value.tensor == "x.weight"


# ---- a checkpoint's tensors ----


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    for name, hint in (("model.bin", "make a plain model of it"), ("model.safetensors", "fetch it again")):
        (tmp_path / name).write_bytes(b"\x80\x02}q\x00." * 100)
        with pytest.raises(NotPacked) as caught:
            Checkpoint([tmp_path / name])
        assert hint in str(caught.value.hint)
        assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize("plain_first", [True, False])
def test_one_packed_file_makes_a_checkpoint_packed(plain_first: bool, tmp_path: Path) -> None:
    paths = _write(tmp_path, {"w": (SPEC, fill("normal", SPEC))})
    (tmp_path / "plain").write_bytes(safetensors_bytes({"b": (TensorSpec("U8", (3,)), b"abc")}))
    paths.insert(0 if plain_first else 1, tmp_path / "plain")
    with Checkpoint(paths) as found:
        assert found.is_packed
        assert found.plain_tensor("b", torch.device("cpu")).tolist() == [97, 98, 99]
    with Checkpoint([tmp_path / "plain"]) as found:
        assert not found.is_packed


class Noted(Checkpoint):
    """Notes what is read, and where to; reads it to the CPU."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.reads: list[tuple[list[str], Any]] = []

    def read(self, stored: Any, device: Any) -> Any:
        self.reads.append(([it.name for it in stored], device))
        return super().read(stored, torch.device("cpu"))


def test_large_tensors_are_decoded_on_the_gpu_that_they_go_to(tmp_path: Path) -> None:
    """Small ones by a processor, without a blob's way to the device."""
    small, large = (TensorSpec("BF16", (rows, 1024)) for rows in (512, 513))
    data = {name: fill("normal", spec) for name, spec in (("small", small), ("large", large))}
    paths = _write(tmp_path, {"small": (small, data["small"]), "large": (large, data["large"])})
    with Noted(paths) as found, OnHost():
        for name, device, reads in (("large", DEVICE, 1), ("small", DEVICE, 0), ("large", CPU, 0)):
            run = found.packed[name].run
            (made,) = found.decode([run], device)
            assert made.view(torch.uint8).numpy().tobytes() == data[name]
            assert found.reads == [([name], DEVICE)] * reads
            (cast,) = found.decode([run], device, torch.float64)
            assert torch.equal(cast, made.double())
            found.reads.clear()


def test_each_device_is_read_to_once(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    with Noted(_write(tmp_path, {it: (SPEC, fill("normal", SPEC)) for it in names})) as found:
        runs = {it: found.packed[it].run for it in names} | {"again": found.packed["a"].run}
        made = found.open(runs, {"a": DEVICE, "b": CPU, "c": DEVICE, "again": DEVICE})
        assert found.reads == [(["a", "c"], DEVICE), (["b"], CPU)]
    assert list(made) == list(runs)
    assert made["a"].sources[0] is made["again"].sources[0]


def test_buffers_have_their_places_too() -> None:
    norm = torch.nn.BatchNorm1d(3)
    assign(norm, "running_mean", torch.full((3,), 7.0))
    assert norm.running_mean.tolist() == [7.0] * 3
    assert "running_mean" in dict(norm.named_buffers())
    for name, shape, needed in (
        ("running_mean", (4,), r"\[3\]"),
        ("nothing", (3,), "none"),
        ("weight", (4,), r"\[3\]"),
    ):
        with pytest.raises(InvalidInput, match=rf"has shape .* the model needs {needed}") as caught:
            assign(norm, name, torch.zeros(shape))
        assert caught.value.where == name
    whole = torch.nn.Linear(2, 2)
    whole.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    assign(whole, "weight", torch.ones(2, 2, dtype=torch.int8))
    assert not whole.weight.requires_grad, "integers have none"
