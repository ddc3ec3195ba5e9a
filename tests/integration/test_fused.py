"""Models loaded into the window layout: on the CPU they compute as plain ones do."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint, write
from support.commands import invoke
from support.emulated import windows_on_cpu  # noqa: F401
from support.experts import NAMES as MOE
from support.experts import WAYS, as_on_gpu, experts_of, moe  # noqa: F401
from support.models import assert_same_bits, inputs, outputs, torch

import tpde
from tpde.errors import InvalidInput
from tpde.loading import checkpoint_files as checkpoint_module
from tpde.nn import packed_modules, set_kernels
from tpde.weights import experts_in_windows

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

# How many weights go to windows: linear layers' that are tensors of the files by themselves.
WEIGHTS = {"llama": 3 * 7 + 1, "qwen2": 2 * 6 + 1, "gpt2": 1, "mixtral": 2 * 4 + 1, "bert": 2 * 6 + 1}


def multiplied(model: Any) -> set[Any]:
    found = {slot.packed for _, module in packed_modules(model) for slot in module.tpde_slots.values()}
    return {it for it in found if it.multiplies}


@pytest.mark.parametrize("name", WEIGHTS)
def test_outputs_and_saved_files(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    plain, model = pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed, kernels="fused")
    assert len(multiplied(model)) == WEIGHTS[name]
    with torch.no_grad():
        assert_same_bits(outputs(name, model, 2), outputs(name, plain, 2))
    model.save_pretrained(tmp_path / "fused")
    tpde.from_pretrained(pair.packed).save_pretrained(tmp_path / "exact")
    one, other = (sorted((tmp_path / it).glob("*.safetensors")) for it in ("fused", "exact"))
    assert [it.read_bytes() for it in one] == [it.read_bytes() for it in other]
    again = tpde.from_pretrained(tmp_path / "fused")
    with torch.no_grad():
        assert_same_bits(outputs(name, again, 2), outputs(name, plain, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*adapter.*:UserWarning")
def test_generation_and_adapters(llama: Pair) -> None:
    plain, model = (
        llama.kind.from_pretrained(llama.plain),
        tpde.from_pretrained(llama.packed, kernels="fused"),
    )
    took = inputs("llama", 2, 5)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(took, **options), plain.generate(took, **options))
    peft = pytest.importorskip("peft", reason="needs peft")
    losses = []
    for it in (plain, model):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
        tuned = peft.get_peft_model(it, config)
        step = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], 0.1)
        for _ in range(2):
            loss = tuned(input_ids=took, labels=took).loss
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.detach())
    assert_same_bits(losses[:2], losses[2:])


def test_a_few_at_a_time(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "GROUP_BYTES", 1)
    model = tpde.from_pretrained(llama.packed, kernels="fused")
    assert len(multiplied(model)) == WEIGHTS["llama"]


def test_another_dtype_is_plain(llama: Pair, caplog: pytest.LogCaptureFixture) -> None:
    model = tpde.from_pretrained(llama.packed, kernels="fused", dtype=torch.float32)
    assert "no weight is multiplied as it is packed" in caplog.text
    assert not multiplied(model)
    plain = llama.kind.from_pretrained(llama.plain, dtype=torch.float32)
    with torch.no_grad():
        assert_same_bits(outputs("llama", model, 1), outputs("llama", plain, 1))


def test_what_it_does_not_go_with(llama: Pair) -> None:
    with pytest.raises(InvalidInput, match=r'`kernels="fused"` .*`deltas`'):
        tpde.from_pretrained(llama.packed, kernels="fused", deltas={"math": "math.tpde"})


def test_what_it_may_be(llama: Pair) -> None:
    with pytest.raises(InvalidInput, match="`kernels` is 'fast'"):
        tpde.from_pretrained(llama.packed, kernels="fast")  # type: ignore[arg-type]


def test_the_command(llama: Pair) -> None:
    args = ("run", llama.packed, "--prompt", "hi", "--max-new-tokens", "4", "--device", "cpu", "--json")
    done = [invoke(*args, "--kernels", it) for it in ("fused", "exact")]
    ours, theirs = (json.loads(it.stdout) for it in done)
    assert (ours["kernels"], theirs["kernels"]) == ("fused", "exact")
    assert ours["tokens"] == theirs["tokens"]
    notes = [[line for line in it.stderr.splitlines() if line.startswith("note: ")] for it in done]
    assert ["the CPU decodes them" in note for note in notes[0]] == [True]
    assert notes[1] == []
    assert ours["packed_bytes"] > theirs["packed_bytes"]
    refused = invoke(*args, "--kernels", "fast")
    assert refused.exit_code == 2
    assert 'say "exact" or "fused"' in refused.stderr


# ---- experts ----


@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize("name", MOE)
def test_experts(name: str, plainly: bool, tmp_path: Path) -> None:
    """From packed files, and as they come: every implementation's bits, and the same files again."""
    pair = write(tmp_path, moe(name))
    folder = pair.plain if plainly else pair.packed
    plain = pair.kind.from_pretrained(pair.plain)
    model = tpde.from_pretrained(folder, kernels="fused", pack=plainly)
    assert [it.multiplies for it in experts_of(model)] == [True] * 4
    sources = {"gpt_oss": (1, 1)}.get(
        name, (2 * plain.config.num_local_experts, plain.config.num_local_experts)
    )
    assert {len(it.sources) for it in experts_of(model)} == set(sources)
    for how in WAYS:
        for it in (plain, model):
            it.set_experts_implementation(how)
        with torch.no_grad():
            assert_same_bits(outputs(name, model, 2), outputs(name, plain, 2), how)
    model.save_pretrained(tmp_path / "fused")
    tpde.from_pretrained(folder, pack=plainly).save_pretrained(tmp_path / "exact")
    one, other = (sorted((tmp_path / it).glob("*.safetensors")) for it in ("fused", "exact"))
    assert [it.read_bytes() for it in one] == [it.read_bytes() for it in other]
    back = set_kernels(model, "exact")
    assert not any(it.multiplies for it in experts_of(back))
    back.save_pretrained(tmp_path / "back")
    assert [it.read_bytes() for it in sorted((tmp_path / "back").glob("*.safetensors"))] == [
        it.read_bytes() for it in other
    ]


@pytest.mark.parametrize("name", MOE)
def test_loaded_experts_by_kernels(name: str, tmp_path: Path, as_on_gpu: Any) -> None:  # noqa: F811
    """What is made of several tensors an expert computes as what is made of one, and decodes to it."""
    pair = write(tmp_path, moe(name))
    loaded, made = (
        tpde.from_pretrained(pair.packed, kernels="fused"),
        set_kernels(tpde.pack_module(pair.kind.from_pretrained(pair.plain)), "fused"),
    )
    plain = pair.kind.from_pretrained(pair.plain)
    for model in (loaded, made):
        as_on_gpu(model)
    for ours, theirs in zip(experts_of(loaded), experts_of(made), strict=True):
        assert_same_bits(ours.decoded(), theirs.decoded())
        assert_same_bits(ours.decoded(), plain.get_parameter(theirs.name))
    with torch.no_grad():
        assert_same_bits(outputs(name, loaded, 2), outputs(name, made, 2))
        took = inputs(name, 2, 40)  # more tokens than the kernels take
        assert_same_bits(loaded(**took).logits, plain(**took).logits)


def test_loaded_experts_are_copied_and_pickled(tmp_path: Path) -> None:
    pair = write(tmp_path, moe("mixtral"))
    plain, model = pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed, kernels="fused")
    exact = tpde.from_pretrained(pair.packed)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    exact.load_state_dict(torch.load(file, weights_only=True))
    for made in (exact, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert_same_bits(outputs("mixtral", made, 2), outputs("mixtral", plain, 2))
    state = model.state_dict()
    size = sum(it.packed.packed_bytes for it in state.values() if hasattr(it, "packed"))
    assert len(file.getvalue()) < 1.2 * size + (1 << 20)  # parts in one memory are saved each alone
    assert [it.multiplies for it in experts_of(copy.deepcopy(model))] == [True] * 4


def test_experts_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = write(tmp_path, moe("qwen3_moe"))
    whole = tpde.from_pretrained(pair.packed, kernels="fused")
    monkeypatch.setattr(checkpoint_module, "GROUP_BYTES", 1)
    monkeypatch.setattr(experts_in_windows, "_TOGETHER_BYTES", 1)
    few = tpde.from_pretrained(pair.packed, kernels="fused")
    again = set_kernels(tpde.from_pretrained(pair.packed), "fused")
    mine = {it.name: it for it in experts_of(whole)}
    for other in (few, again):
        theirs = {it.name: it for it in experts_of(other)}
        assert mine.keys() == theirs.keys()
        for name, it in mine.items():
            pairs = zip(it.sources, theirs[name].sources, strict=True)
            assert all(torch.equal(a.memory, b.memory) for a, b in pairs), name


def test_experts_that_are_too_large_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    with torch.no_grad():  # one of four experts of a layer has escapes everywhere
        it = model.model.layers[1].mlp.experts.down_proj
        it[1] = torch.exp2(torch.randint(-60, 60, it[1].shape).float()).bfloat16()
    pair = write(tmp_path, model)
    plain, ours = pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed, kernels="fused")
    assert [it.multiplies for it in experts_of(ours)] == [True, True, False, False]
    assert "experts of `MixtralExperts` are decoded" in caplog.text
    with torch.no_grad():
        assert_same_bits(outputs("mixtral", ours, 2), outputs("mixtral", plain, 2))
    ours.save_pretrained(tmp_path / "again")
    again = pair.kind.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert_same_bits(outputs("mixtral", again, 2), outputs("mixtral", plain, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*adapter.*:UserWarning")
def test_adapters_beside_experts(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    pair = write(tmp_path, moe("mixtral"))
    took, losses = inputs("mixtral", 2, 5)["input_ids"], []
    for it in (pair.kind.from_pretrained(pair.plain), tpde.from_pretrained(pair.packed, kernels="fused")):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights="gaussian")
        tuned = peft.get_peft_model(it, config)
        step = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], 0.1)
        for _ in range(2):
            loss = tuned(input_ids=took, labels=took).loss
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.detach())
    assert_same_bits(losses[:2], losses[2:])


def test_kernels_of_experts_are_compiled_for_what_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts that are multiplied from the left, rows are columns."""
    from tpde.integrations.transformers import fused

    begun: list[tuple[int, ...]] = []
    for module in (fused.window_products, fused.window_experts):
        monkeypatch.setattr(module, "compile_ahead", lambda *shape: begun.append(shape))
    for shape, turned in (((64, 128), False), ((8, 64, 128), False), ((8, 64, 128), True), ((64,), False)):
        fused._compile_ahead(shape, turned, 3)
    assert begun == [(64, 128, 3), (8, 64, 128, 3), (8, 128, 64, 3)]
