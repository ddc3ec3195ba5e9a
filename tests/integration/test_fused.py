"""Models loaded into the window layout: on the CPU they compute as plain ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint
from support.commands import invoke
from support.models import assert_same_bits, inputs, outputs, torch

import tpde
from tpde.errors import InvalidInput
from tpde.loading import checkpoint_files as checkpoint_module
from tpde.nn import packed_modules

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
    ours, theirs = (json.loads(invoke(*args, "--kernels", it).stdout) for it in ("fused", "exact"))
    assert (ours["kernels"], theirs["kernels"]) == ("fused", "exact")
    assert ours["tokens"] == theirs["tokens"]
    assert ours["packed_bytes"] > theirs["packed_bytes"]
    refused = invoke(*args, "--kernels", "fast")
    assert refused.exit_code == 2
    assert 'say "exact" or "fused"' in refused.stderr
