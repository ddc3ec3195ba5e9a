"""Model directories round trip byte for byte, with everything in them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from pathlib import Path

import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import (
    AlreadyPacked,
    Corrupt,
    DestinationExists,
    InvalidDestination,
    InvalidInput,
    MissingShard,
    NotPacked,
)
from tpde.files.operations import pack, unpack, verify
from tpde.format.constants import MANIFEST
from tpde.io.sinks import FileSink

SPEC = spec_of("BF16", 5_000)


def _shard(names: list[str]) -> bytes:
    return safetensors_bytes(
        {n: (SPEC, fill("random" if "noise" in n else "normal", SPEC)) for n in names}, {"format": "pt"}
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a model of two shards, an index, a tokenizer and a folder of another model."""
    folder = tmp_path / "model"
    (folder / "vae" / "deep").mkdir(parents=True)
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    shards = {
        "model-00001-of-00002.safetensors": ["a.0.w", "a.0.noise"],
        "model-00002-of-00002.safetensors": ["a.1.w"],
    }
    for file, names in shards.items():
        (folder / file).write_bytes(_shard(names))
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": 30_000}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text('{"model_type": "llama",\r\n\t"é": "\\u00e9", "x": 1.0e5}')
    (folder / "tokenizer.json").write_bytes(os.urandom(0) + b'{"a": 1}\r\n')
    (folder / "empty").write_bytes(b"")
    (folder / "vae" / "deep" / "diffusion.safetensors").write_bytes(_shard(["w"]))
    (folder / "vae" / "config.json").write_text("{}")
    (folder / ".cache" / "huggingface" / "junk").write_text("not of the model")
    return folder


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and ".cache" not in p.parts
    }


def test_directories_round_trip_byte_for_byte(model: Path, tmp_path: Path) -> None:
    before = _tree(model)
    summary = pack(model, tmp_path / "packed", threads=2)
    assert _tree(model) == before
    assert (summary.tensors, summary.packed, len(summary.files)) == (4, 3, 3)
    assert summary.ratio > 1
    restored = unpack(tmp_path / "packed", tmp_path / "out")
    assert _tree(tmp_path / "out") == before
    assert restored.destination_bytes == summary.source_bytes
    assert verify(tmp_path / "packed") == []
    assert verify(tmp_path / "packed", against=model) == []
    assert not list(tmp_path.glob(".*"))


def test_the_packed_directory_is_what_the_document_says(model: Path, tmp_path: Path) -> None:
    pack(model, tmp_path / "packed")
    packed = tmp_path / "packed"
    assert set(_tree(packed)) == {*_tree(model), "tpde_manifest.json"}
    assert not (packed / ".cache").exists()
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "tpde", "version": 1}
    assert config["model_type"] == "llama"
    weight_map = json.loads((packed / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == {"a.0.w_tpde", "a.0.noise", "a.1.w_tpde"}
    assert (packed / "vae/config.json").read_bytes() == b"{}"
    manifest = json.loads((packed / "tpde_manifest.json").read_text())
    assert set(manifest["files"]) == set(_tree(model))
    originals = {name for name, info in manifest["files"].items() if "original" in info}
    assert originals == {"config.json", "model.safetensors.index.json"}


def test_packing_twice_gives_the_same_directory(model: Path, tmp_path: Path) -> None:
    pack(model, tmp_path / "one", threads=1)
    pack(model, tmp_path / "two", threads=3)
    assert _tree(tmp_path / "one") == _tree(tmp_path / "two")


def test_a_failure_leaves_no_directory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(model, tmp_path / "packed")
    done, real = [], FileSink.commit

    def commit(sink: FileSink) -> None:
        if done:
            raise OSError(28, "No space left on device")
        done.append(sink)
        real(sink)

    monkeypatch.setattr(FileSink, "commit", commit)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("kept")
    for action, source in ((pack, model), (unpack, tmp_path / "packed")):
        for name, force in (("new", False), ("old", True)):
            done.clear()
            with pytest.raises(OSError, match="No space"):
                action(source, tmp_path / name, force=force)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "old", "packed"]
    assert [p.read_text() for p in (tmp_path / "old").iterdir()] == ["kept"]


def test_files_of_something_else_are_never_lost(model: Path, tmp_path: Path) -> None:
    pack(model, tmp_path / "packed")
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "old" / "config.json").write_text("replaceable")
    (tmp_path / "old" / "deep" / "thesis.txt").write_text("kept")
    for action, source in ((pack, model), (unpack, tmp_path / "packed")):
        with pytest.raises(InvalidDestination, match=r"holds `deep/thesis.txt`.* would be lost; remove"):
            action(source, tmp_path / "old", force=True)
    assert (tmp_path / "old" / "deep" / "thesis.txt").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "old", "packed"]


def test_an_older_packed_model_is_replaced_whole(model: Path, tmp_path: Path) -> None:
    (model / "notes.txt").write_text("of the first time")
    pack(model, tmp_path / "packed")
    (model / "notes.txt").unlink()
    pack(model, tmp_path / "packed", force=True)  # its manifest names `notes.txt`
    assert not (tmp_path / "packed" / "notes.txt").exists()


def test_a_full_disk_is_told_by_the_destination(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(sink: FileSink) -> None:
        raise OSError(28, "No space left on device", sink.name)

    monkeypatch.setattr(FileSink, "commit", commit)
    with pytest.raises(OSError, match="No space") as told:
        pack(model, tmp_path / "new")
    assert Path(told.value.filename).parent == tmp_path / "new"


def test_damage_is_told_by_file(model: Path, tmp_path: Path) -> None:
    pack(model, tmp_path / "packed")
    shard = tmp_path / "packed" / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Corrupt, match=r"^`.*model-00002-of-00002.safetensors`: tensor `a.1.w`") as told:
        unpack(tmp_path / "packed", tmp_path / "back")
    assert told.value.tensor == "a.1.w"


def test_destinations_are_replaced_only_when_asked(model: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").write_text("old")
    with pytest.raises(DestinationExists):
        pack(model, tmp_path / "packed")
    pack(model, tmp_path / "packed", force=True)
    assert (tmp_path / "packed" / "config.json").read_text() != "old"
    with pytest.raises(DestinationExists):
        unpack(tmp_path / "packed", model)
    with pytest.raises(AlreadyPacked):
        pack(tmp_path / "packed", tmp_path / "again")
    with pytest.raises(NotPacked):
        unpack(model, tmp_path / "out")
    with pytest.raises(InvalidDestination):
        pack(model, model / "packed")
    with pytest.raises(InvalidInput):
        verify(tmp_path / "packed", against=model / "config.json")


def test_missing_shards_and_weights_are_named(model: Path, tmp_path: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingShard, match=r"model-00002-of-00002\.safetensors.*all shards"):
        pack(model, tmp_path / "packed")
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InvalidInput, match="no `weight_map`"):
        pack(model, tmp_path / "packed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match=r"has no `\*\.safetensors` file"):
        pack(tmp_path / "empty", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("shard", [1, 2])
def test_a_shard_that_is_removed_meanwhile_is_named(shard: int, model: Path, tmp_path: Path) -> None:
    gone = model / f"model-0000{shard}-of-00002.safetensors"
    with pytest.raises(MissingShard, match=r"0000.-of-00002\.safetensors` was removed while its folder was"):
        pack(model, tmp_path / "packed", progress=lambda _: gone.unlink(missing_ok=True))
    assert not (tmp_path / "packed").exists()


def test_verify_names_damaged_files_tensors_and_chunks(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(model, packed)
    path = packed / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    (packed / "tokenizer.json").write_text("{}")
    (packed / "empty").unlink()
    problems = {(Path(p.file).name, p.tensor, p.chunk) for p in verify(packed)}
    assert problems == {(path.name, "a.1.w", 0), ("tokenizer.json", None, None), ("empty", None, None)}
    (model / "config.json").write_text("{}")
    assert "config.json" in {Path(p.file).name for p in verify(packed, against=model)}


@pytest.mark.parametrize("what", ["config.json", "model.safetensors.index.json"])
def test_verify_compares_the_files_that_packing_changes(what: str, model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(model, packed)
    assert verify(packed) == verify(packed, against=model) == []
    sound, manifest = (packed / what).read_text("utf-8"), (packed / MANIFEST).read_text("utf-8")
    for text in (sound.replace("1", "2", 1), sound.replace("}", ""), ""):
        assert text != sound
        (packed / what).write_text(text, "utf-8", newline="\n")
        assert [Path(p.file).name for p in verify(packed)] == [what]
    (packed / what).write_text(sound, "utf-8", newline="\n")
    for original in ("{}", "[" * 5000, ""):
        value = json.loads(manifest)
        value["files"][what]["original"] = original
        (packed / MANIFEST).write_text(json.dumps(value), "utf-8")
        assert [Path(p.file).name for p in verify(packed)] == [what]
        value["files"][what]["sha256"] = hashlib.sha256(original.encode()).hexdigest()  # made to fit
        (packed / MANIFEST).write_text(json.dumps(value), "utf-8")
        assert [Path(p.file).name for p in verify(packed)] == [what]


def test_components_may_have_tensors_of_the_same_name(tmp_path: Path) -> None:
    source = tmp_path / "pipeline"
    for component, name in (("one", "a.0.w"), ("two", "noise")):
        folder = source / component
        folder.mkdir(parents=True)
        fills = {"a.0.w": fill("normal", SPEC), "noise": fill("random", SPEC)}
        data = fills[name]  # under one name: shrinks in the first component, in the second not
        (folder / "x-00001-of-00001.safetensors").write_bytes(safetensors_bytes({"w": (SPEC, data)}, {}))
        index = {"metadata": {}, "weight_map": {"w": "x-00001-of-00001.safetensors"}}
        (folder / "x.safetensors.index.json").write_text(json.dumps(index))
    pack(source, tmp_path / "packed")
    names = [
        list(json.loads((tmp_path / "packed" / it / "x.safetensors.index.json").read_text())["weight_map"])
        for it in ("one", "two")
    ]
    assert names == [["w_tpde"], ["w"]]
    unpack(tmp_path / "packed", tmp_path / "back")
    assert _tree(tmp_path / "back") == _tree(source)


def test_weights_that_neither_transformers_nor_diffusers_read_stay_plain(tmp_path: Path) -> None:
    """sentence-transformers loads those of its own modules, and knows no packed ones."""
    source, packed = tmp_path / "source", tmp_path / "packed"
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    data = safetensors_bytes({"w": (SPEC, fill("normal", SPEC))}, {})
    for folder in ("", "1_Pooling", "2_Dense"):
        (source / folder).mkdir(exist_ok=True)
        (source / folder / "config.json").write_text("{}")
    (source / "modules.json").write_text(json.dumps(modules))
    for folder in ("", "2_Dense"):
        (source / folder / "model.safetensors").write_bytes(data)
    pack(source, packed)
    changed = {name for name, it in _tree(packed).items() if it != _tree(source).get(name)}
    assert changed == {"config.json", "model.safetensors", MANIFEST}
    assert verify(packed) == verify(packed, against=source) == []
    unpack(packed, tmp_path / "back")
    assert _tree(tmp_path / "back") == _tree(source)
    (packed / "2_Dense" / "model.safetensors").write_bytes(data[:-1] + b"x")
    assert [Path(it.file).parent.name for it in verify(packed)] == ["2_Dense"]
    with pytest.raises(Corrupt, match="SHA-256"):
        unpack(packed, tmp_path / "damaged")
    for text in ("[" * 5000, "{}", "[1]"):
        (source / "modules.json").write_text(text)
        with pytest.raises(InvalidInput, match=r"modules\.json"):
            pack(source, tmp_path / "again")


def test_components_of_a_pipeline_say_that_they_are_packed(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    for folder in ("unet", "tokenizer", "text_encoder"):
        (source / folder).mkdir(parents=True)
        (source / folder / "config.json").write_text('{"a": 1}')
    for folder in ("unet", "text_encoder"):
        data = safetensors_bytes({"w": (SPEC, fill("normal", SPEC))}, {})
        (source / folder / "model.safetensors").write_bytes(data)
    pack(source, packed)
    says = {
        it: "quantization_config" in json.loads((packed / it / "config.json").read_text())
        for it in ("unet", "tokenizer", "text_encoder")
    }
    assert says == {"unet": True, "tokenizer": False, "text_encoder": True}
    assert verify(packed) == []
    (packed / "unet" / "config.json").write_text('{"a": 2}')
    assert [Path(it.file).parent.name for it in verify(packed)] == ["unet"]
    unpack(tmp_path / "packed", tmp_path / "back")
    assert _tree(tmp_path / "back") == _tree(source)


def test_a_configuration_that_opens_later_is_never_taken_for_a_plain_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacking would copy it: plain weights, and a configuration that says they are packed."""
    packed, back = tmp_path / "packed", tmp_path / "back"
    pack(model, packed)
    (packed / MANIFEST).unlink()
    calls, opened = itertools.count(), os.open

    def failing(path: str, *args: int, **given: int) -> int:
        if Path(path) == packed / "config.json" and next(calls) == at:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *args, **given)

    monkeypatch.setattr(os, "open", failing)
    at = -1
    unpack(packed, back)
    assert "quantization_config" not in (back / "config.json").read_text()
    opens = next(calls)
    assert opens >= 2
    for at in range(opens):  # noqa: B007 - read by `failing`
        calls = itertools.count()
        with pytest.raises(InvalidInput, match="Too many open files"):
            unpack(packed, tmp_path / "other")
        assert not (tmp_path / "other").exists()
