"""Packed directories without a manifest: models saved again from packed weights (format.md 8)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tpde.errors import InvalidInput
from tpde.format.constants import MANIFEST, METHOD, SUFFIX
from tpde.packing.directory import files_below, new_folder, refuse_nested, renamed
from tpde.packing.documents import json_object
from tpde.packing.files import Problem, Progress, Result, no_progress, unpack_file, verify_file
from tpde.packing.reader import PackedFile
from tpde.packing.shards import is_index, read_index
from tpde.packing.sources import shards


def is_resaved(folder: Path) -> bool:
    """Whether a directory has no manifest, and a `config.json` that says it is packed."""
    if (folder / MANIFEST).exists() or not (folder / "config.json").is_file():
        return False
    try:
        _, config = json_object(folder / "config.json")
    except InvalidInput:
        return False
    ours = config.get("quantization_config")
    return isinstance(ours, dict) and ours.get("quant_method") == METHOD


def _packed_names(path: Path) -> list[str]:
    with PackedFile(path) as file:
        return file.packed_names()


def verify_resaved(folder: Path, threads: int, progress: Progress = no_progress) -> list[Problem]:
    """Check the packed files of a directory without a manifest."""
    return [
        problem
        for path in shards(folder)
        if _packed_names(path)
        for problem in verify_file(path, None, threads, progress)
    ]


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    ours = config.pop("quantization_config")
    return config | ({"quantization_config": ours["source"]} if "source" in ours else {})


def unpack_resaved(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> list[Result]:
    """Write the plain model of a directory without a manifest: its tensors, not its files' bytes."""
    refuse_nested(source, destination)
    weights = {path.relative_to(source).as_posix(): _packed_names(path) for path in shards(source)}
    stored = {name + SUFFIX: name for names in weights.values() for name in names}
    results = []
    names = list(files_below(source))
    with new_folder(destination, names, force) as folder:
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if weights.get(name):
                result = unpack_file(source / name, target, threads=threads, force=False, progress=progress)
                results.append(renamed(result, destination / name))
            elif is_index(name):
                text = read_index(source / name).renamed(lambda name, _: stored.get(name, name))
                target.write_text(text, "utf-8", newline="\n")
            elif name == "config.json":
                value = _plain_config(json_object(source / name)[1])
                target.write_text(
                    json.dumps(value, ensure_ascii=False, indent=2) + "\n", "utf-8", newline="\n"
                )
            else:
                shutil.copyfile(source / name, target)
    return results
