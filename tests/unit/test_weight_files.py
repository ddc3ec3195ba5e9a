"""Which files of a model directory are its weights, which can be packed, and which are packed already."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import spoilt

from tpde.errors import AlreadyPacked, InvalidInput, MissingShard, NotPacked, TpdeError
from tpde.files.inputs import shards
from tpde.files.packed_state import packing_configs, refuse_packed, says_packed
from tpde.files.walk import walk
from tpde.files.weight_files import check_shards, choose, not_packed, read_by_others


def make(root: Path, files: dict[str, Any]) -> Path:
    """Make files: of these bytes, of this text, or of this value as JSON."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def index(*files: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(files)}}


MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "0", "type": "sentence_transformers.models.Transformer"},
    {"path": "1", "type": "sentence_transformers.models.Dense"},
    {"path": "2", "type": "Transformer.Other"},
    {"path": "3"},
    {"type": "sentence_transformers.models.Normalize"},
]


def test_weights_that_others_read(tmp_path: Path) -> None:
    names = [f"{it}model.safetensors" for it in ("", "0/", "1/", "1/x/", "10/", "2/", "3/")]
    adapters = [
        "adapter_model.safetensors",
        "x/adapter_model.fp16.safetensors",
        "pytorch_lora_weights.safetensors",
    ]
    plain = ["my_adapter_model.safetensors", "adapter.safetensors", "adapter_model/x.safetensors"]
    assert read_by_others(tmp_path, [*names, *adapters, *plain]) == set(adapters)
    make(tmp_path, {"modules.json": MODULES})
    of_modules = {
        "1/model.safetensors",
        "1/x/model.safetensors",
        "2/model.safetensors",
        "3/model.safetensors",
    }
    assert read_by_others(tmp_path, [*names, *adapters, *plain]) == {*adapters, *of_modules}


def test_safetensors_files_are_packed_under_their_names(tmp_path: Path) -> None:
    files = ("a.safetensors", "sub/b.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "x.bin")
    make(tmp_path, dict.fromkeys(files, b"") | {"x.safetensors.index.json": index("a.safetensors")})
    found = choose(walk(tmp_path))
    assert found.files == {"a.safetensors": "a.safetensors", "sub/b.safetensors": "sub/b.safetensors"}
    assert list(found.indexes) == ["x.safetensors.index.json"]
    assert found.sources == {}


def test_pickles_are_packed_where_no_safetensors_lie_beside_them(tmp_path: Path) -> None:
    make(
        tmp_path,
        {
            "one/pytorch_model.bin": b"",
            "two/pytorch_model.bin": b"",
            "two/model.safetensors": b"",
            "three/pytorch_model.bin.index.json": index("a/shard.pt", "pytorch_model-2.bin", "a/shard.pt"),
            "three/a/shard.pt": b"",
            "three/pytorch_model-2.bin": b"",
            "1/pytorch_model.bin": b"",
            "modules.json": MODULES,
        },
    )
    found = choose(walk(tmp_path))
    assert found.files == {
        "one/pytorch_model.bin": "one/model.safetensors",
        "two/model.safetensors": "two/model.safetensors",
        "three/a/shard.pt": "three/a/shard.safetensors",
        "three/pytorch_model-2.bin": "three/model-2.safetensors",
    }
    assert list(found.indexes) == ["three/model.safetensors.index.json"]
    made = found.indexes["three/model.safetensors.index.json"]
    assert made.names() == ["a/shard.safetensors", "model-2.safetensors"]
    assert found.sources == {
        "one/model.safetensors": "one/pytorch_model.bin",
        "three/model.safetensors.index.json": "three/pytorch_model.bin.index.json",
        "three/a/shard.safetensors": "three/a/shard.pt",
        "three/model-2.safetensors": "three/pytorch_model-2.bin",
    }


def test_shards_in_pickles_may_be_reached_by_links(tmp_path: Path) -> None:
    make(tmp_path, {"s/pytorch_model.bin.index.json": index("link.pt"), "s/real.pt": b""})
    (tmp_path / "s" / "link.pt").symlink_to("real.pt")
    found = choose(walk(tmp_path))
    assert found.files == {"s/real.pt": "s/link.safetensors"}
    assert found.sources["s/link.safetensors"] == "s/real.pt"


@pytest.mark.parametrize("variant", ["", "fp16"])
def test_indexes_that_are_left_beside_whole_files_are_files_like_others(variant: str, tmp_path: Path) -> None:
    dot = f".{variant}" if variant else ""
    places = (
        (f"model{dot}.safetensors", f"model.safetensors.index{dot}.json", "1.safetensors"),
        (f"model{dot}.safetensors", f"model{dot}.safetensors.index.json", "1.safetensors"),
        (f"pytorch_model{dot}.bin", f"pytorch_model.bin.index{dot}.json", "1.bin"),
    )
    for number, (whole, name, gone) in enumerate(places):
        folder = make(tmp_path / f"{number}", {whole: b"", name: index(gone)})
        found = choose(walk(folder))
        assert list(found.files) == [whole]
        assert found.indexes == {}
        (folder / whole).rename(folder / f"other-{whole}")
        with pytest.raises(MissingShard, match=gone):
            choose(walk(folder))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_name_that_pickles_would_get_must_be_free(kind: str, tmp_path: Path) -> None:
    make(tmp_path, {"pytorch_model.bin.index.json": index("s/x.pt"), "s/x.pt": b""})
    place = tmp_path / "s" / "x.safetensors"
    if kind == "file":
        place.touch()
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("nowhere")
    with pytest.raises(InvalidInput, match=r"s/x\.pt` would be packed as `s/x\.safetensors`, which is there"):
        choose(walk(tmp_path))
    assert choose(walk(tmp_path, ["x.safetensors"])).files == {"s/x.pt": "s/x.safetensors"}


@pytest.mark.parametrize("exclude", ["model.*", "sub", "sub/*"])
def test_that_all_weights_are_excluded_is_said(exclude: str, tmp_path: Path) -> None:
    name = "sub/x.safetensors" if "sub" in exclude else "model.safetensors"
    make(tmp_path, {name: b"", "adapter_model.safetensors": b"", "config.json": "{}"})
    with pytest.raises(InvalidInput, match=r"^all weights of `.*` are excluded; exclude less$"):
        choose(walk(tmp_path, [exclude]))
    (tmp_path / name).unlink()
    with pytest.raises(InvalidInput, match="holds an adapter"):  # there were none to exclude
        choose(walk(tmp_path, [exclude, "config.json"]))


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({}, InvalidInput, "no `*.safetensors` file"),
        ({"config.json": "{}"}, InvalidInput, "no `*.safetensors` file; choose another folder"),
        ({"x.pt": b""}, InvalidInput, "x.pt`, to pack it as a file"),
        ({"adapter_config.json": "{}"}, InvalidInput, "holds an adapter"),
        ({"adapter_model.safetensors": b""}, InvalidInput, "holds an adapter"),
        ({"adapter_model.safetensors": b"", "adapter_config.json": "{}"}, InvalidInput, "holds an adapter"),
        ({"x.safetensors": b"", "a.safetensors.index.json": "{}"}, InvalidInput, "not an index"),
        (
            {"x.safetensors": b"", "a.safetensors.index.json": index("y.safetensors")},
            MissingShard,
            "names the",
        ),
        ({"pytorch_model.bin.index.json": index("y.bin")}, MissingShard, "names the shard `y.bin`"),
        (
            {"x.safetensors": b"", "s/a.safetensors.index.json": index("x.safetensors")},
            MissingShard,
            "fetch it: all shards",
        ),
    ],
)
def test_directories_of_which_nothing_can_be_packed(
    files: dict[str, Any], error: type[TpdeError], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as told:
        choose(walk(make(tmp_path, files)))
    assert says in str(told.value)


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "pipe"])
def test_what_has_the_name_of_an_index_and_is_none_is_told(kind: str, tmp_path: Path) -> None:
    place = make(tmp_path, {"x.safetensors": b""}) / "a.safetensors.index.json"
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/nowhere")
    for call in (choose, check_shards):
        with pytest.raises(InvalidInput, match="is not a regular file"):
            call(walk(tmp_path))
    assert choose(walk(tmp_path, ["*.index.json"])).files  # it was asked for


def test_shards_may_be_reached_by_links(tmp_path: Path) -> None:
    make(tmp_path, {"a.safetensors": b"", "s/x.safetensors.index.json": index("b.safetensors")})
    (tmp_path / "s" / "b.safetensors").symlink_to("../a.safetensors")
    assert list(choose(walk(tmp_path)).files) == ["a.safetensors"]
    assert check_shards(walk(tmp_path)) == ["a.safetensors"]
    assert shards(tmp_path) == [tmp_path / "a.safetensors"]


# ---- what is packed already


SAYS = {"quantization_config": {"quant_method": "tpde", "version": 1}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SAYS, True),
        ({"quantization_config": {"quant_method": "fp8"}}, False),
        ({"quantization_config": {}}, False),
        ({"quantization_config": "tpde"}, False),
        ({"quantization_config": None}, False),
        ({"quant_method": "tpde"}, False),
        ({}, False),
        ([SAYS], False),
        (None, False),
    ],
)
def test_what_a_configuration_says_of_weights(config: Any, says: bool) -> None:
    assert says_packed(config) is says


def test_configurations_anywhere_say_that_weights_are_packed(tmp_path: Path) -> None:
    make(tmp_path, {"a/config.json": SAYS, "config.json": {}, "b/config.json": "[" * 5000, "c.json": SAYS})
    assert packing_configs(walk(tmp_path)) == ["a/config.json"]


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({"x.safetensors": spoilt.PLAIN}, None, ""),
        ({"x.safetensors": spoilt.PLAIN, "config.json": {}}, None, ""),
        ({"a.safetensors": spoilt.PLAIN, "x.safetensors": spoilt.PACKED}, AlreadyPacked, "packed already"),
        ({"x.safetensors": spoilt.PLAIN, "config.json": SAYS}, InvalidInput, "but they are plain"),
        ({"x.safetensors": spoilt.PACKED, "config.json": SAYS}, AlreadyPacked, "packed already"),
        ({"pytorch_model.bin": b"no pickle"}, None, ""),
    ],
)
def test_what_is_packed_is_not_packed_again(
    files: dict[str, Any], error: type[TpdeError] | None, says: str, tmp_path: Path
) -> None:
    tree = walk(make(tmp_path, files))
    if error is None:
        refuse_packed(tree, choose(tree).files)
        return
    with pytest.raises(error, match=says):
        refuse_packed(tree, choose(tree).files)


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"x.safetensors": spoilt.PLAIN}, "pack it with `tpde pack` first"),
        ({"x.safetensors": spoilt.PACKED}, "make a plain model of it with `tpde unpack`"),
        ({"x.safetensors": spoilt.PLAIN, "config.json": SAYS}, "make a plain model of it with `tpde unpack`"),
        ({"x.txt": ""}, ""),
    ],
)
def test_what_is_not_packed_comes_with_a_hint_that_works(
    files: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    error = not_packed(make(tmp_path, files), "it is not")
    assert isinstance(error, NotPacked)
    assert str(error).startswith("it is not")
    assert hint in (error.hint or "")
    assert hint or "tpde pack" not in (error.hint or "")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config.json": SAYS, "a-of-b.safetensors": b""}, ["a-of-b.safetensors"]),
        ({"b.safetensors": b"", "a.safetensors": b""}, ["a.safetensors", "b.safetensors"]),
        ({"adapter_model.safetensors": b""}, ["adapter_model.safetensors"]),
    ],
)
def test_weight_files_of_a_directory(files: dict[str, Any], found: list[str], tmp_path: Path) -> None:
    assert check_shards(walk(make(tmp_path, files))) == found


def test_a_directory_without_weights_and_without_a_configuration_has_no_shards(tmp_path: Path) -> None:
    for files in ({}, {"config.json": {}}):
        with pytest.raises(InvalidInput, match=r"has no `\*\.safetensors` file"):
            shards(make(tmp_path, files))


def test_shards_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    make(tmp_path / "model", {"a.safetensors": b""})
    make(tmp_path, {"b.safetensors": b""})
    (tmp_path / "model" / "b.safetensors").symlink_to("../b.safetensors")
    assert shards(tmp_path / "model") == [tmp_path / "model" / "a.safetensors"]
