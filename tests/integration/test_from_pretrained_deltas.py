"""Several fine-tunes over one packed base: each has the bits of the fine-tune that is loaded plainly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checkpoints import Pair, checkpoint
from support.models import CAUSAL, NAMES, assert_same_bits, inputs, make, outputs, torch
from support.tunes import tuned

import tpde
from tpde.errors import InvalidInput, MissingBase, PackedWeight
from tpde.nn import plain_state_dict

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


class Folders(NamedTuple):
    """A base, and deltas of fine-tunes on it."""

    base: Pair
    deltas: dict[str, Path]
    plain: dict[str | None, Any]  # models

    def load(self, **options: Any) -> Any:
        return tpde.from_pretrained(self.base.packed, deltas=self.deltas, **options)


def write(folder: Path, name: str, dtype: Any = torch.bfloat16, **options: Any) -> Folders:
    base = checkpoint(folder, name, dtype, **options)
    model, deltas, plain = make(name, dtype), {}, dict[str | None, Any]()
    for seed, called in enumerate(("math", "law"), 1):
        tuned(model, seed).save_pretrained(folder / called, **options)
        for file in base.plain.iterdir():  # the tokenizer's
            if not (folder / called / file.name).exists():
                shutil.copy(file, folder / called)
        deltas[called] = folder / f"{called}.tpde"
        tpde.diff(base.plain, folder / called, deltas[called])
        plain[called] = base.kind.from_pretrained(folder / called)
    plain[None] = base.kind.from_pretrained(base.plain)
    return Folders(base, deltas, plain)


def check(name: str, model: Any, plain: Any, batch: int = 2) -> None:
    with torch.no_grad():
        assert_same_bits(outputs(name, model, batch), outputs(name, plain, batch), name)
    expected, found = plain.state_dict(), plain_state_dict(model)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*NAMES, "qwen3_moe"])
def test_bits(name: str, dtype: Any, tmp_path: Path) -> None:
    it = write(tmp_path, name, dtype)
    model = it.load()
    check(name, model, it.plain[None])
    for called in ("math", "law", "math", None):
        model.use(called)
        check(name, model, it.plain[called])


@pytest.mark.parametrize("name", CAUSAL)
def test_generation(name: str, tmp_path: Path) -> None:
    it = write(tmp_path, name)
    model, took = it.load(), inputs(name, 2, 5)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for called in ("law", None, "math"):
        model.use(called)
        assert torch.equal(model.generate(took, **options), it.plain[called].generate(took, **options))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write(tmp_path_factory.mktemp("llama"), "llama")


def test_sharded(tmp_path: Path) -> None:
    it = write(tmp_path, "qwen2", max_shard_size="120KB")
    model = it.load()
    model.use("math")
    check("qwen2", model, it.plain["math"])


def test_in_another_dtype_all_is_plain(llama: Folders) -> None:
    model = llama.load(dtype=torch.float32)
    for called in ("math", None):
        model.use(called)
        expected = llama.base.kind.from_pretrained(
            llama.base.plain if called is None else llama.base.plain.parent / called, dtype=torch.float32
        )
        check("llama", model, expected)


def test_deltas_as_bytes_and_the_hub_s_class(llama: Folders) -> None:
    deltas = {name: path.read_bytes() for name, path in llama.deltas.items()}
    model = tpde.from_pretrained(
        llama.base.packed, deltas=deltas, model_class=transformers.AutoModelForCausalLM
    )
    model.use("math")
    check("llama", model, llama.plain["math"])


def test_saved_is_the_fine_tune_in_use(llama: Folders, tmp_path: Path) -> None:
    model = llama.load()
    model.use("law")
    model.save_pretrained(tmp_path / "saved")
    assert tpde.verify(tmp_path / "saved") == []
    check("llama", tpde.from_pretrained(tmp_path / "saved"), llama.plain["law"])
    tpde.unpack_module(model)
    model.save_pretrained(tmp_path / "plain")
    again = llama.base.kind.from_pretrained(tmp_path / "plain")
    for key, value in llama.plain["law"].state_dict().items():
        assert_same_bits(again.state_dict()[key], value, key)


def test_what_a_base_model_of_a_larger_one_lacks(llama: Folders) -> None:
    """The head is in the files, and has no place in the model."""
    model = llama.load(model_class=transformers.AutoModel)
    model.use("math")
    took = inputs("llama", 2, 7)
    with torch.no_grad():
        expected = llama.plain["math"].model(**took).last_hidden_state
        assert_same_bits(model(**took).last_hidden_state, expected)


def test_footprint_counts_deltas(llama: Folders) -> None:
    base, model = tpde.from_pretrained(llama.base.packed), llama.load()
    before = base.get_memory_footprint()
    assert before < model.get_memory_footprint() <= before + model.tpde_deltas.nbytes


# ---- what is refused


def test_the_base_of_another(llama: Folders, tmp_path: Path) -> None:
    other = checkpoint(tmp_path, "llama", torch.float16)
    with pytest.raises(MissingBase, match=r"F16.*BF16"):
        tpde.from_pretrained(other.packed, deltas=llama.deltas)
    state = transformers.AutoModelForCausalLM.from_pretrained(llama.base.plain)
    with torch.no_grad():
        state.model.layers[1].mlp.up_proj.weight.view(torch.int16)[5, 5] += 1
    state.save_pretrained(tmp_path / "near")
    tpde.pack(tmp_path / "near", tmp_path / "near-packed")
    with pytest.raises(MissingBase, match=r"`model\.layers\.1\.mlp\.up_proj\.weight`"):
        tpde.from_pretrained(tmp_path / "near-packed", deltas=llama.deltas)


def test_another_configuration(llama: Folders, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(llama.base.plain.parent / "math", target)
    config = json.loads((target / "config.json").read_text())
    for changes, found in (({"use_cache": False}, None), ({"rms_norm_eps": 1e-5}, "`rms_norm_eps`")):
        (target / "config.json").write_text(json.dumps(config | changes))
        tpde.diff(llama.base.plain, target, tmp_path / "delta", force=True)
        if found is None:
            tpde.from_pretrained(llama.base.packed, deltas={"it": tmp_path / "delta"}).use("it")
            continue
        with pytest.raises(InvalidInput, match=found):
            tpde.from_pretrained(llama.base.packed, deltas={"it": tmp_path / "delta"})
    (target / "config.json").write_bytes(b"\xff{")
    tpde.diff(llama.base.plain, target, tmp_path / "delta", force=True)
    with pytest.raises(InvalidInput, match="is not JSON"):
        tpde.from_pretrained(llama.base.packed, deltas={"it": tmp_path / "delta"})


def test_what_does_not_go_together(llama: Folders) -> None:
    with pytest.raises(InvalidInput, match="no room"):
        llama.load(vram="8GiB")
    with pytest.raises(InvalidInput, match="deltas are called"):
        tpde.from_pretrained(llama.base.packed, deltas={})
    model = llama.load()
    with pytest.raises(PackedWeight, match="unpack that model"):
        tpde.unpack_module(model.model)
