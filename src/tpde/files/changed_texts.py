"""Texts of a model directory that packing changes, and back: configurations and indexes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from tpde.files.shards import ShardIndex
from tpde.files.walk import follow
from tpde.format.constants import METHOD, SUFFIX, VERSION


def packed_config(config: dict[str, object]) -> str:
    """The text of a configuration that says that the model's weights are packed."""
    ours: dict[str, object] = {"quant_method": METHOD, "version": VERSION}
    if "quantization_config" in config:
        ours["source"] = config["quantization_config"]
    config["quantization_config"] = ours
    return _text(config)


def plain_config(config: dict[str, object]) -> str:
    """The text of a configuration that says no longer that the model's weights are packed."""
    ours = config.pop("quantization_config")
    if isinstance(ours, dict) and "source" in ours:
        config["quantization_config"] = ours["source"]
    return _text(config)


def packed_index(index: ShardIndex, folder: PurePosixPath, packed: Mapping[str, Collection[str]]) -> str:
    """An index with the packed tensors under their names in the packed files, which lie in `folder`."""
    return index.renamed(
        lambda name, file: name + SUFFIX if name in packed.get(str(folder / file), ()) else name
    )


def through_links(packed: Mapping[str, set[str]], links: Mapping[str, str]) -> dict[str, set[str]]:
    """Packed tensors by file, and by every link that leads to one."""
    found = dict(packed)
    for link in links:
        target = follow(link, links)
        if target is not None and target in packed:
            found[link] = packed[target]
    return found


def _text(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
