"""Packed directories without a manifest: models saved again from packed weights (format.md 8)."""

from __future__ import annotations

from pathlib import Path

from tpde.errors import TpdeError
from tpde.files.changed_texts import plain_config
from tpde.files.copying import copy_file, finish_folders, mode_of, write_text
from tpde.files.destinations import refuse_nested, replaceable
from tpde.files.documents import json_object
from tpde.files.file_kinds import SAFETENSORS, last_of
from tpde.files.folder_swap import new_folder
from tpde.files.inputs import shards
from tpde.files.manifest import is_packed_directory
from tpde.files.packed_state import is_packed, packed_names, packing_configs
from tpde.files.problem import Problem
from tpde.files.progress import Progress, no_progress
from tpde.files.reader import PackedFile
from tpde.files.result import Result
from tpde.files.shards import is_index, read_index
from tpde.files.unpack_file import unpack_file
from tpde.files.verify_file import verify_file
from tpde.files.walk import LeftOut, walk
from tpde.files.weight_files import missing_shards
from tpde.format.constants import MANIFEST, SUFFIX


def is_resaved(folder: Path) -> bool:
    """Whether a directory has no manifest, and packed weights, or a `config.json` that says it has them."""
    if is_packed_directory(folder):
        return False
    tree = walk(folder, outside=False)
    weights = [folder / name for name in tree.files if name.endswith(SAFETENSORS)]
    return bool(packing_configs(tree)) or any(map(_may_be_packed, weights))


def _may_be_packed(path: Path) -> bool:
    try:
        return is_packed(path)
    except TpdeError:  # which is said when it is read
        return False


def verify_resaved(folder: Path, threads: int, progress: Progress = no_progress) -> list[Problem]:
    """Check the packed files of a directory without a manifest, and that it is not only missing."""
    tree = walk(folder, outside=False)
    problems = [Problem(it.where or str(folder), None, None, it.message) for it in missing_shards(tree)]
    files = [folder / name for name in tree.files if name.endswith(SAFETENSORS)]
    packed = [path for path in files if is_packed(path)]
    problems += [it for path in packed for it in verify_file(path, None, threads, progress)]
    configs = packing_configs(tree)
    alone = [it for it in configs if not is_packed_directory((folder / it).parent)]
    if alone and any(map(_has_source_header, packed)):
        path = folder / MANIFEST
        problems.append(Problem(str(path), None, None, f"`{path}`, which restores the source, is missing"))
    return problems


def _has_source_header(path: Path) -> bool:
    """Whether a file is as packing wrote it: saving it again drops the source's header."""
    try:
        with PackedFile(path) as file:
            return file.original is not None
    except TpdeError:
        return False


def unpack_resaved(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> tuple[list[Result], tuple[LeftOut, ...]]:
    """Write the plain model of a directory without a manifest: its tensors, not its files' bytes.

    No link that leads out of it is followed; returns what was not taken with a result for each weight file.
    """
    refuse_nested(source, destination)
    tree = walk(source, outside=False)
    weights = {path.relative_to(source).as_posix(): packed_names(path) for path in shards(source)}
    stored = {name + SUFFIX: name for names in weights.values() for name in names}
    configs = set(packing_configs(tree))
    results = []
    names = {*tree.files, *tree.links, *tree.folders}
    with new_folder(destination, replaceable(destination, names), force=force) as folder:
        for name in tree.folders:
            (folder / name).mkdir()
        for name in tree.files:
            path, target = source / name, folder / name
            if name in weights and is_packed(path):
                result = unpack_file(path, target, threads=threads, force=False, progress=progress)
                results.append(result.at(destination / name))
            elif is_index(name):
                text = read_index(path).renamed(lambda name, _: stored.get(name, name))
                write_text(target, text, mode_of(path))
            elif name in configs:
                write_text(target, plain_config(json_object(path)[1]), mode_of(path))
            elif last_of(name) != MANIFEST:  # of a packed folder in this one, which is plain then
                copy_file(path, target)
        for name, link in tree.links.items():
            (folder / name).symlink_to(link)
        finish_folders(source, folder, tree.folders)
    return results, tree.left_out
