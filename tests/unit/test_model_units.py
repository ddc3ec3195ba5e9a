"""Units that a plan cuts a model into: bytes, tiles, what is resident; and room for experts and tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.craft import file_of, prefix_blob  # noqa: E402
from support.experts import moe  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402
from support.simulated import MemoryFeed  # noqa: E402
from support.small import Block, Model  # noqa: E402

import tpde.torch as packed_torch  # noqa: E402
from tpde.errors import Corrupt  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.transformers import expert_modules  # noqa: E402
from tpde.loading import model_plan  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.model_units import TABLES_BYTES, units_of  # noqa: E402
from tpde.planning.units import Footprint  # noqa: E402
from tpde.streaming.experts import expert_room  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402

CPU = torch.device("cpu")


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
