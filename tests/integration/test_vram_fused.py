"""Models under a budget of device memory with fused kernels: on the CPU they compute as plain ones do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.budgets import Opened, every, load, simulated
from support.checkpoints import Pair, checkpoint, write
from support.commands import invoke
from support.models import CAUSAL, NAMES, VOCAB, assert_same_bits, inputs, outputs, torch

import tpde
from tpde.errors import OutOfMemory, PackedWeight
from tpde.loading import window_weights
from tpde.nn import packed_modules, set_kernels
from tpde.weights.windowed import Windowed

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.integrations.transformers.budget_plan import plan_streaming  # noqa: E402
from tpde.integrations.transformers.fused import fused_names  # noqa: E402
from tpde.integrations.transformers.shape import opened_shape  # noqa: E402
from tpde.integrations.transformers.streamed import ModelStreaming  # noqa: E402
from tpde.loading import homes  # noqa: E402
from tpde.loading.model_units import header_of, is_routed, unit_of, units_of  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402
from tpde.planning.layout import MIB  # noqa: E402
from tpde.planning.units import Placement  # noqa: E402

MIXED = ("windows", "host", "packed", "windows", "disk", "plain")


def weights(model: Any) -> dict[str, Any]:
    return {
        f"{name}.{leaf}": slot.packed
        for name, module in packed_modules(model)
        for leaf, slot in module.tpde_slots.items()
    }


@pytest.mark.parametrize("kinds", [("windows",), ("host", "windows"), MIXED], ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = checkpoint(tmp_path, name)
    plain = pair.kind.from_pretrained(pair.plain)
    with simulated(monkeypatch, every(*kinds)):
        model = load(pair.packed, kernels="fused")
        with torch.no_grad():
            for batch in (2, 1):
                assert_same_bits(outputs(name, model, batch), outputs(name, plain, batch), name)
        there = {it for it in weights(model).values() if it.multiplies}
        (stats,) = model.tpde_streamer.stats().values() or ({},)
        assert stats.get("window_weights", 0) == len(there)
        assert stats.get("window_bytes", 0) == sum(it.packed_bytes for it in there)
        if kinds == ("windows",):
            assert there or not any(isinstance(it, torch.nn.Linear) for it in plain.modules())


@pytest.mark.parametrize("name", CAUSAL)
def test_generation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = checkpoint(tmp_path, name)
    took = inputs(name, 3, 5)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = pair.kind.from_pretrained(pair.plain)
    with simulated(monkeypatch, every(*MIXED)):
        model = load(pair.packed, kernels="fused")
        assert torch.equal(model.generate(took, **options), plain.generate(took, **options))


def test_where_weights_are(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one unit some are in windows, and those that would not gain are packed beside them."""
    kinds = dict(zip(["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "lm_head"],
                     ["host", "windows", "disk", "packed", "windows"], strict=True))  # fmt: skip
    with simulated(monkeypatch, lambda names: {name: kinds[name] for name in names}):
        model = load(llama.packed, kernels="fused")
    found = {name: it.sources[0] for name, it in weights(model).items()}
    with opened_shape(llama.packed) as (shape, _, plan):
        able = {
            name
            for name in fused_names(shape, plan.runs)
            if window_weights.window_room(part := plan.runs[name].parts[0], header_of(part))
        }
    for name, it in found.items():
        unit = next(key for key in kinds if name.startswith(f"{key}."))
        assert isinstance(it, Windowed) == (kinds[unit] == "windows" and name in able), name
        assert it.settled == (kinds[unit] not in ("host", "disk"))
    assert {name for name in able if name.startswith("model.layers.0.")} > {
        "model.layers.0.mlp.up_proj.weight"
    }
    assert found["model.layers.0.self_attn.k_proj.weight"].settled
    assert "model.layers.0.self_attn.k_proj.weight" not in able


def test_a_tied_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One blob for both: rows are looked up where it is."""
    pair = checkpoint(tmp_path, "qwen2")
    plain = pair.kind.from_pretrained(pair.plain)
    with torch.no_grad():
        expected = outputs("qwen2", plain, 2)
    for kind in ("windows", "host", "plain"):
        with simulated(monkeypatch, every(kind)):
            model = load(pair.packed, kernels="fused")
            model.tie_weights()
            assert model.model.embed_tokens.weight is model.lm_head.weight
            if kind != "plain":
                packed = model.lm_head.tpde_slots["weight"].packed
                assert packed is model.model.embed_tokens.tpde_slots["weight"].packed
                assert packed.multiplies == (kind == "windows")
            with torch.no_grad():
                assert_same_bits(outputs("qwen2", model, 2), expected)


def test_experts_stay_as_they_were(experts: tuple[str, Pair], hosted: Opened) -> None:
    name, pair = experts
    with opened_shape(pair.packed) as (shape, files, plan):
        fused = fused_names(shape, plan.runs)
        made = plan_streaming(shape, files, plan, Budget(1 << 30, None, 256), fused=fused)
        assert made.units(Placement.WINDOWS) == ["lm_head"]
        able = [it.name for it in units_of(shape, plan.runs, None, fused) if it.windows]
        routed = {unit_of(shape, it) for it in plan.runs if is_routed(shape, plan.runs, it)}
        assert len(routed) == 2
        assert able == [it for it in made.placements if it not in routed and it != "model.embed_tokens"]
    model = load(pair.packed, kernels="fused")
    with torch.no_grad():
        plain = pair.kind.from_pretrained(pair.plain)
        assert_same_bits(outputs(name, model, 2), outputs(name, plain, 2), name)
    (stats,) = model.tpde_streamer.stats().values()
    assert stats["expert_misses"] > 0


def test_kernels_are_not_changed(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has room for weights as they are."""
    with simulated(monkeypatch, every("windows")):
        model = load(llama.packed, kernels="fused")
    before = {name: it.sources for name, it in weights(model).items()}
    with pytest.raises(PackedWeight, match=r"is kept under a VRAM budget.*nothing was changed"):
        set_kernels(model, "exact")
    assert {name: it.sources for name, it in weights(model).items()} == before
    with simulated(monkeypatch, every("host")):
        model = load(llama.packed)
        with pytest.raises(PackedWeight, match="is streamed under a VRAM budget"):
            set_kernels(model, "fused")


def test_saving_a_model_that_fits(llama: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files are those of a model that was loaded without a budget."""
    with simulated(monkeypatch, every("windows")):
        model = load(llama.packed, kernels="fused")
    model.save_pretrained(tmp_path / "ours")
    tpde.from_pretrained(llama.packed).save_pretrained(tmp_path / "theirs")
    files = [sorted((tmp_path / it).glob("*.safetensors")) for it in ("ours", "theirs")]
    assert [it.read_bytes() for it in files[0]] == [it.read_bytes() for it in files[1]]
    torch.save(model.state_dict(), tmp_path / "state")
    there = sum(it.packed_bytes for it in set(weights(model).values()))
    assert (tmp_path / "state").stat().st_size < 2 * there, "not the memory of all weights with each"


def test_none_in_windows_is_told(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, told in (("host", True), ("windows", False)):
        caplog.clear()
        with simulated(monkeypatch, every(kind)), caplog.at_level(logging.WARNING, "tpde"):
            load(llama.packed, kernels="fused")
        assert ("no weight is multiplied as it is packed: under this budget" in caplog.text) == told
    caplog.clear()
    with simulated(monkeypatch), caplog.at_level(logging.WARNING, "tpde"):
        load(llama.packed, kernels="fused", dtype=torch.float32)
    assert "those of `nn.Linear` layers in bfloat16 can be" in caplog.text


# ---- plans of a model that is large enough ----


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Blocks of 8 MiB, 6 of them; all linear layers gain by the window layout."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    torch.manual_seed(0)
    return write(tmp_path_factory.mktemp("larger"), transformers.LlamaForCausalLM(config).to(torch.bfloat16))


def test_exact_plans_know_of_no_windows(larger: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a budget in which fused ones have some."""
    windows = {}
    with simulated(monkeypatch):
        for kernels in ("exact", "fused"):
            model = load(larger.packed, kernels=kernels, vram=296 * MIB, max_tokens=128)
            (plan,) = model.tpde_streamer.plans.values()
            windows[kernels] = plan.parts["windows"]
    assert not windows["exact"]
    assert windows["fused"]


def test_a_plan_is_loaded_as_it_is(larger: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the room that it keeps for windows all is taken, and they are in it; the least budget works."""
    rooms: list[tuple[int, int]] = []
    bring = homes.bring_windows

    def brought(sizes: Any, device: Any, room: int, *more: Any) -> Any:
        rooms.append((sum(sizes.values()), room))
        return bring(sizes, device, room, *more)

    monkeypatch.setattr(homes, "bring_windows", brought)
    with simulated(monkeypatch):
        with pytest.raises(OutOfMemory) as caught:
            load(larger.packed, kernels="fused", vram=MIB, max_tokens=128)
        least = caught.value.least
        assert least is not None
        seen = set()
        for vram in (least, least + 8 * MIB, least + 24 * MIB, 1 << 30):
            model = load(larger.packed, kernels="fused", vram=vram, max_tokens=128)
            (plan,) = model.tpde_streamer.plans.values()
            assert plan.used <= vram
            there_then = ("plain", "fixed", "pages", "index", "decoded", "windows")
            left = vram - sum(plan.parts[it] for it in there_then)
            assert rooms[-1] == (plan.parts["windows"], left)
            there = [it for it in weights(model).values() if it.multiplies]
            assert sum(it.packed_bytes for it in there) <= plan.parts["windows"]
            assert len(there) == sum(1 if it == "lm_head" else 7 for it in plan.units(Placement.WINDOWS))
            seen.add(len(there))
    assert max(seen) == 6 * 7 + 1
    assert len(seen) > 1


def test_several_devices(larger: Pair) -> None:
    """Each plans for what is there."""
    with opened_shape(larger.packed) as (shape, files, plan):
        fused = fused_names(shape, plan.runs)
        where = {
            name: torch.device("cpu", int(name.startswith(("model.layers.4", "model.layers.5", "lm_head"))))
            for name, _ in shape.named_parameters()
        }
        made = ModelStreaming(Budget(1 << 30, None, 128), fused=fused)
        made.plan(shape, files, plan, where)
    one, two = (made.plans[torch.device("cpu", i)] for i in (0, 1))
    assert one.units(Placement.WINDOWS) == [f"model.layers.{i}" for i in range(4)]
    assert two.units(Placement.WINDOWS) == ["model.layers.4", "model.layers.5", "lm_head"]
    assert one.parts["windows"] > 3 * (two.parts["windows"] // 3)


# ---- commands ----

RATES = ("--copy-rate", "55", "--memory-rate", "4200")


def test_the_plan_command(larger: Pair) -> None:
    args = ("plan", larger.packed, "--vram", "1GiB", "--max-tokens", "128", *RATES)
    text = invoke(*args, "--kernels", "fused")
    assert text.exit_code == 0, text.output
    assert "windows: model.layers 0-5, lm_head" in text.stdout
    assert "weights in the window layout " in text.stdout
    assert "rows of weights in the window layout, decoded " in text.stdout
    found = json.loads(invoke(*args, "--kernels", "fused", "--json").stdout)
    assert found["kernels"] == "fused"
    assert found["used_bytes"] == sum(found["device_bytes"].values())
    assert found["device_bytes"]["windows"] > 0 < found["device_bytes"]["strips"]
    assert found["rates"]["windows"] == pytest.approx(1.02 * 4200e9)
    exact, default = (
        json.loads(invoke(*args, *more, "--json").stdout) for more in (("--kernels", "exact"), ())
    )
    assert exact == default
    assert exact["device_bytes"]["windows"] == exact["device_bytes"]["strips"] == 0
    assert found["seconds_per_token"] <= exact["seconds_per_token"]
    refused = invoke(*args, "--kernels", "fast")
    assert refused.exit_code == 2
    assert 'say "exact" or "fused"' in refused.stderr


def test_the_run_command(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    args = (llama.packed, "--prompt", "Hello", "--max-new-tokens", "5")
    expected = json.loads(invoke("run", *args, "--device", "cpu", "--json").stdout)
    with simulated(monkeypatch, every("host", "windows")):
        budget = ("--vram", "1GiB", "--max-tokens", "9", "--kernels", "fused")
        done = invoke("run", *args, *budget, "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["kernels"], found["tokens"]) == ("fused", expected["tokens"])
        assert found["streaming"]["cpu"]["window_weights"] > 0 < found["streaming"]["cpu"]["copied_bytes"]
        told = invoke("run", *args, *budget, "--stats")
        assert told.stdout == expected["text"] + "\n"
        assert "cpu: in the window layout, multiplied without being decoded: " in told.stderr
