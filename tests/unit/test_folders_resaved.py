"""Small model directories that a library saved again, without a manifest: verified and unpacked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support import files
from support.changes import content, make_source
from support.packed_folders import INDEX, ONE, TWO, pack_beside

import tpde
from tpde.errors import Corrupt, InvalidDestination, MissingShard, NotPacked
from tpde.files.resaved import is_resaved
from tpde.files.walk import walk
from tpde.files.weight_files import check_shards
from tpde.format.constants import MANIFEST


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


@pytest.fixture
def packed(source: Path) -> Path:
    return pack_beside(source)


@pytest.fixture
def saved_again(packed: Path) -> Path:
    """Give the same as if a library had saved it again."""
    (packed / MANIFEST).unlink()
    return packed


def test_a_directory_is_saved_again_if_weights_or_a_configuration_say_so(packed: Path, source: Path) -> None:
    assert not is_resaved(packed)
    assert not is_resaved(source)
    (packed / MANIFEST).unlink()
    assert is_resaved(packed)
    shutil.copy(source / "config.json", packed)
    assert is_resaved(packed)  # by its weights
    for name in (ONE, TWO):
        shutil.copy(source / name, packed)
    assert not is_resaved(packed)
    (packed / "config.json").write_text('{"quantization_config": {"quant_method": "tpde"}}')
    assert is_resaved(packed)  # by its configuration
    (packed / "config.json").unlink()
    (packed / ONE).write_bytes(b"no weights")  # which reading says
    assert not is_resaved(packed)
    with pytest.raises(NotPacked):
        tpde.verify(packed)


def test_a_model_that_was_saved_again_becomes_plain(saved_again: Path, source: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    summary = tpde.unpack(saved_again, back)
    assert summary.left_out == ()
    assert content(back).keys() == content(source).keys()
    for name in (ONE, TWO, "sub/notes.txt", "link", "sub/empty"):
        assert content(back)[name] == content(source)[name]
    for name in (INDEX, "config.json"):
        assert json.loads((back / name).read_text("utf-8")) == json.loads((source / name).read_text("utf-8"))


def test_what_a_library_saved_again_lacks_no_manifest(saved_again: Path) -> None:
    """It has no source to restore; what packing wrote has, and only that."""
    assert [Path(it.file).name for it in tpde.verify(saved_again)] == [MANIFEST]
    for name in (ONE, TWO):
        (saved_again / name).write_bytes(files.saved_again((saved_again / name).read_bytes()))
    assert tpde.verify(saved_again) == []


def test_a_packed_model_within_one_that_was_saved_again_becomes_plain_too(
    saved_again: Path, source: Path, tmp_path: Path
) -> None:
    tpde.pack(source, tmp_path / "other")
    shutil.move(tmp_path / "other", saved_again / "part")
    tpde.unpack(saved_again, tmp_path / "back")
    assert not (tmp_path / "back" / "part" / MANIFEST).exists()
    assert (tmp_path / "back" / "part" / ONE).read_bytes() == (source / ONE).read_bytes()
    # What is missing is the manifest at the top, and none is at the part.
    assert ["which restores the source, is missing" in it.message for it in tpde.verify(saved_again)] == [
        True
    ]
    shutil.copy(source / "config.json", saved_again)
    assert tpde.verify(saved_again) == []


def test_damage_of_a_model_that_was_saved_again_is_named(saved_again: Path, source: Path) -> None:
    shutil.copy(source / "config.json", saved_again)
    assert tpde.verify(saved_again) == []
    data = bytearray((saved_again / ONE).read_bytes())
    data[-1500] ^= 1
    (saved_again / ONE).write_bytes(data)
    (problem,) = tpde.verify(saved_again)
    assert problem.file == str(saved_again / ONE)
    with pytest.raises(Corrupt, match="model-00001"):
        tpde.unpack(saved_again, saved_again.with_name("back"))


def test_a_plain_file_of_a_model_that_was_saved_again_is_copied(
    saved_again: Path, source: Path, tmp_path: Path
) -> None:
    shutil.copy(source / TWO, saved_again)
    found = tpde.unpack(saved_again, tmp_path / "back")
    assert [Path(it.destination).name for it in found.files] == [ONE]
    assert [Path(it.file).name for it in tpde.verify(saved_again)] == [MANIFEST]
    assert (tmp_path / "back" / TWO).read_bytes() == (source / TWO).read_bytes()
    assert tpde.unpack(saved_again, tmp_path / "back", force=True)
    with pytest.raises(InvalidDestination, match="lies inside"):
        tpde.unpack(saved_again, saved_again / "back")


def test_a_missing_shard_is_told_where_there_is_no_manifest(saved_again: Path) -> None:
    (saved_again / ONE).unlink()
    found = [it for it in tpde.verify(saved_again) if "which is missing" in it.message]
    assert [it.file for it in found] == [str(saved_again / ONE)]
    with pytest.raises(MissingShard, match="which is missing"):
        tpde.unpack(saved_again, saved_again.with_name("back"))


@pytest.mark.parametrize("left", [(), (TWO,), (ONE, TWO), ("adapter_model.safetensors",)])
def test_weights_that_only_a_configuration_tells_of_are_missing(
    saved_again: Path, left: tuple[str, ...]
) -> None:
    """A whole file is needed beside it, or an index, without which nobody knows what else there was."""
    (saved_again / "config.json").write_text('{"quantization_config": {"quant_method": "tpde"}}')
    assert not any("beside it is missing" in it.message for it in tpde.verify(saved_again))
    shutil.copy(saved_again / ONE, saved_again / "adapter_model.safetensors")
    for name in {INDEX, ONE, TWO, "adapter_model.safetensors"} - set(left):
        (saved_again / name).unlink()
    what = "an index of the shards" if TWO in left else "a weight file"
    found = [it.message for it in tpde.verify(saved_again) if it.file == str(saved_again / "config.json")]
    assert [f"packed, and {what} beside it is missing" in it for it in found] == [True]
    with pytest.raises(MissingShard, match=f"{what} beside it is missing"):
        tpde.unpack(saved_again, saved_again.with_name("back"))
    assert not saved_again.with_name("back").exists()


def test_an_index_that_is_left_beside_a_whole_model_is_a_file_like_others(
    saved_again: Path, source: Path, tmp_path: Path
) -> None:
    """As transformers leaves it there, where a model in shards was."""
    for folder in (saved_again, source):
        (folder / ONE).rename(folder / "model.safetensors")
        with pytest.raises(MissingShard, match=ONE):
            check_shards(walk(folder))  # some of its shards are there
        (folder / TWO).unlink()
    assert [Path(it.file).name for it in tpde.verify(saved_again)] == [MANIFEST]
    tpde.unpack(saved_again, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    tpde.pack(source, tmp_path / "again")
    assert (tmp_path / "again" / INDEX).read_bytes() == (source / INDEX).read_bytes()
    assert tpde.verify(tmp_path / "again", against=source) == []
    tpde.unpack(tmp_path / "again", tmp_path / "again-plain")
    assert content(tmp_path / "again-plain") == content(source)
