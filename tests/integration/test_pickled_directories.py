"""Directories whose weights are in pickles, of adapters, with code, or that say what they are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint
from support.commands import invoke
from support.models import assert_same_bits, outputs, torch

import tpde
import tpde.torch
from tpde.errors import AlreadyPacked, InvalidInput, NotPacked, UnsafePickle
from tpde.files.operations import pack, unpack, verify
from tpde.format.constants import MANIFEST

transformers = pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny Llama, plain and packed."""
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _pickled(llama: Pair, folder: Path, parts: int) -> Path:
    """The same model with its weights as `torch.save` writes them, in one file or in shards."""
    shutil.copytree(llama.plain, folder)
    weights = tpde.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for i in range(parts):
        name = f"pytorch_model-{i + 1:05}-of-{parts:05}.bin"
        part = {key: weights[key] for key in sorted(weights)[i::parts]}
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("parts", [1, 3])
def test_weights_in_pickles_pack_like_others(parts: int, llama: Pair, tmp_path: Path) -> None:
    source, packed, back = _pickled(llama, tmp_path / "source", parts), tmp_path / "packed", tmp_path / "back"
    assert pack(source, packed).packed > 0
    assert not list(packed.glob("*.bin*"))
    assert verify(packed) == verify(packed, against=source) == []
    unpack(packed, back)
    with torch.no_grad():
        expected = outputs("llama", llama.kind.from_pretrained(source), 2)
        assert_same_bits(outputs("llama", tpde.from_pretrained(packed), 2), expected)
        assert_same_bits(outputs("llama", llama.kind.from_pretrained(back), 2), expected)
    names = {it.name for it in back.iterdir()}
    shards = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    assert names >= ({"model.safetensors"} if parts == 1 else {*shards, "model.safetensors.index.json"})
    (other,) = source.glob("pytorch_model*1*.bin") if parts > 1 else source.glob("*.bin")
    weights = torch.load(other)
    next(iter(weights.values())).view(torch.uint8).view(-1)[0] ^= 1
    torch.save(weights, other)
    assert len(verify(packed, against=source)) == 1


def test_pickles_beside_safetensors_are_copied(llama: Pair, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama.plain, source)
    (source / "pytorch_model.bin").write_bytes(b"whatever")
    (source / "training_args.bin").write_bytes(b"more")
    pack(source, tmp_path / "packed")
    for name in ("pytorch_model.bin", "training_args.bin"):
        assert (tmp_path / "packed" / name).read_bytes() == (source / name).read_bytes()


class _Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_pickles_in_directories_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    torch.save({"w": torch.zeros(9), "x": _Code()}, "model/pytorch_model.bin")
    with pytest.raises(UnsafePickle):
        pack("model", "packed")
    assert [it.name for it in tmp_path.iterdir()] == ["model"]


def test_a_name_that_is_taken_is_not_packed_over(llama: Pair, tmp_path: Path) -> None:
    source = _pickled(llama, tmp_path / "source", 1)
    (source / "model.safetensors").mkdir()
    with pytest.raises(InvalidInput, match=r"would be packed as `model\.safetensors`, which is there"):
        pack(source, tmp_path / "packed")


def test_a_folder_with_code_packs_like_others(llama: Pair, tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(llama.plain, source)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "theirs",
        "architectures": ["Theirs"],
        "auto_map": {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.Theirs"},
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "theirs.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class TheirConfig(LlamaConfig):\n    model_type = 'theirs'\n\n\n"
        "class Theirs(LlamaForCausalLM):\n    config_class = TheirConfig\n"
    )
    pack(source, packed)
    assert verify(packed, against=source) == []
    auto, options = transformers.AutoModelForCausalLM, {"trust_remote_code": True, "dtype": "auto"}
    with torch.no_grad():
        expected = outputs("llama", auto.from_pretrained(source, **options), 2)
        loaded = tpde.from_pretrained(packed, model_class=auto, trust_remote_code=True)
        assert_same_bits(outputs("llama", loaded, 2), expected)
    unpack(packed, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def _stale(llama: Pair, folder: Path) -> Path:
    """A directory that says that it is packed, and is not."""
    shutil.copytree(llama.plain, folder)
    shutil.copy(llama.packed / "config.json", folder)
    return folder


def test_a_folder_that_says_it_is_packed_and_is_plain(llama: Pair, tmp_path: Path) -> None:
    stale = _stale(llama, tmp_path / "stale")
    for action in (tpde.from_pretrained, lambda it: pack(it, tmp_path / "packed")):
        with pytest.raises(InvalidInput, match="`tpde unpack`"):
            action(stale)
    unpack(stale, tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    with torch.no_grad():
        expected = outputs("llama", llama.kind.from_pretrained(llama.plain), 2)
        for folder, load in (("plain", llama.kind.from_pretrained), ("packed", tpde.from_pretrained)):
            assert_same_bits(outputs("llama", load(tmp_path / folder), 2), expected)


def test_packed_files_without_a_configuration_that_says_so(llama: Pair, tmp_path: Path) -> None:
    folder, back = tmp_path / "folder", tmp_path / "back"
    shutil.copytree(llama.packed, folder)
    (folder / MANIFEST).unlink()
    shutil.copy(llama.plain / "config.json", folder)
    with pytest.raises(NotPacked, match="`tpde unpack`"):
        tpde.from_pretrained(folder)
    with pytest.raises(AlreadyPacked, match=r"`tpde unpack .* folder-plain`"):
        pack(folder, tmp_path / "packed")
    unpack(folder, back)
    names = {it.name for it in back.iterdir()}
    assert names == {it.name for it in llama.plain.iterdir()}
    assert (back / "model.safetensors").read_bytes() == (llama.plain / "model.safetensors").read_bytes()


def test_a_resaved_pipeline_becomes_plain(llama: Pair, tmp_path: Path) -> None:
    folder, back = tmp_path / "pipeline", tmp_path / "back"
    shutil.copytree(llama.packed, folder / "text_encoder")
    (folder / "text_encoder" / MANIFEST).unlink()
    (folder / "model_index.json").write_text("{}")
    unpack(folder, back)
    assert "quantization_config" not in json.loads((back / "text_encoder" / "config.json").read_text())
    with torch.no_grad():
        expected = outputs("llama", llama.kind.from_pretrained(llama.plain), 2)
        found = outputs("llama", llama.kind.from_pretrained(back / "text_encoder"), 2)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("target", ["file", "folder"])
def test_unpacking_a_resaved_folder_follows_no_links_out_of_it(
    target: str, llama: Pair, tmp_path: Path
) -> None:
    folder, back = tmp_path / "folder", tmp_path / "back"
    shutil.copytree(llama.packed, folder)
    (folder / MANIFEST).unlink()
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (folder / "notes").symlink_to(secret / "key" if target == "file" else secret)
    (folder / "inside").symlink_to("config.json")
    found = unpack(folder, back).left_out
    assert [it.name for it in found] == ["notes"]
    assert "secret" not in [it.read_text() for it in back.rglob("*") if it.suffix in ("", ".json")]
    assert (back / "inside").is_symlink()
    said = invoke("unpack", folder, tmp_path / "again")
    assert "note: `notes` is left out: a link" in said.stderr


def test_a_resaved_model_in_the_hubs_cache(llama: Pair, tmp_path: Path) -> None:
    """There, every file is a link to its content."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for it in llama.packed.iterdir():
        if it.name != MANIFEST:
            shutil.copy(it, blobs / it.name[::-1])
            (snapshot / it.name).symlink_to(f"../../blobs/{it.name[::-1]}")
    assert not unpack(snapshot, tmp_path / "back").left_out
    assert {it.name for it in (tmp_path / "back").iterdir()} == {it.name for it in llama.plain.iterdir()}


def _adapter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    weights = {"base_model.model.q.lora_A.weight": torch.randn(64, 512).bfloat16()}
    tpde.torch.save_file(weights, folder / "packed")
    tpde.unpack(folder / "packed", folder / "adapter_model.safetensors")
    (folder / "packed").unlink()


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    """Packed, PEFT would take it for one that changes nothing."""
    _adapter(tmp_path / "adapter")
    with pytest.raises(InvalidInput, match="holds an adapter, which PEFT and diffusers read"):
        pack(tmp_path / "adapter", tmp_path / "packed")
    for command in (["verify"], ["unpack"]):
        paths = [tmp_path / "adapter", tmp_path / "t"][: 1 + (command == ["unpack"])]
        said = invoke(*command, *paths)
        assert said.exit_code == 2
        assert "tpde pack" not in said.stderr


def test_an_adapter_in_a_model_stays_as_it_is(llama: Pair, tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(llama.plain, source)
    _adapter(source)
    _adapter(source / "checkpoint-5")
    pack(source, packed)
    for name in ("adapter_model.safetensors", "checkpoint-5/adapter_model.safetensors"):
        assert (packed / name).read_bytes() == (source / name).read_bytes()
    assert verify(packed, against=source) == []


def test_an_adapter_that_is_no_safetensors_file_is_restored(llama: Pair, tmp_path: Path) -> None:
    """Such as what git has in the place of a large file."""
    source, packed, back = tmp_path / "source", tmp_path / "packed", tmp_path / "back"
    shutil.copytree(llama.plain, source)
    (source / "adapter_model.safetensors").write_text("version https://example.org/spec\noid sha256:0\n")
    pack(source, packed)
    assert verify(packed, against=source) == []
    unpack(packed, back)
    name = "adapter_model.safetensors"
    assert (back / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
def test_an_adapter_on_a_packed_model_changes_what_it_should(llama: Pair, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    peft.get_peft_model(llama.kind.from_pretrained(llama.plain), lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInput, match="use it as it is, on a packed model too"):
        pack(tmp_path / "adapter", tmp_path / "packed")
    found = []
    with torch.no_grad():
        for model in (llama.kind.from_pretrained(llama.plain), tpde.from_pretrained(llama.packed)):
            adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
            found.append(outputs("llama", adapted, 2))
        plain = outputs("llama", llama.kind.from_pretrained(llama.plain), 2)
    assert_same_bits(found[1], found[0])
    assert not all(torch.equal(a, b) for a, b in zip(found[0], plain, strict=True))
