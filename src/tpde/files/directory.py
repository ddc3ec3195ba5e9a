"""Model directories packed and unpacked (docs/format.md 8)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tpde.codec.selection import CodecName
from tpde.errors import (
    AlreadyPacked,
    Corrupt,
    InvalidDestination,
    NotPacked,
    NotSafetensors,
    TpdeError,
    Truncated,
)
from tpde.files.copying import (
    Unchanged,
    copy_file,
    finish_folders,
    mode_of,
    sha256,
    sha256_of_tensors,
    stands_for_link,
    write_text,
)
from tpde.files.documents import parse_object, read_document
from tpde.files.file_kinds import SAFETENSORS, folder_of, is_config
from tpde.files.folder_swap import new_folder
from tpde.files.inputs import open_source
from tpde.files.manifest import Manifest, is_packed_directory, read_manifest
from tpde.files.shards import ShardIndex
from tpde.files.single_file import Progress, Result, no_progress, pack_opened, unpack_file
from tpde.files.walk import LeftOut, Tree, follow, walk
from tpde.files.weight_files import Weights, already_packed, choose, packing_configs, refuse_packed
from tpde.format.constants import MANIFEST, METHOD, SUFFIX, VERSION


def refuse_nested(source: Path, destination: Path) -> None:
    """Refuse a destination inside the source, which would be copied, or around it, which would be removed."""
    inner, outer = destination.resolve(), source.resolve()
    if inner.is_relative_to(outer):
        raise InvalidDestination(
            f"`{destination}` lies inside the source `{source}`", hint="choose a destination outside it"
        )
    if outer.is_relative_to(inner):
        raise InvalidDestination(
            f"the source `{source}` lies inside `{destination}`, which would be replaced",
            hint="choose a destination beside it",
        )


def replaceable(destination: Path, names: Collection[str]) -> set[str]:
    """What may be replaced in a destination: files of these names, and those of the model packed there."""
    ours = {*names, MANIFEST}
    with contextlib.suppress(TpdeError):  # without a manifest, or with a damaged one, `names` are all we know
        if is_packed_directory(destination):
            manifest = read_manifest(destination)
            ours.update(manifest.files, manifest.folders)
    return ours


def packed_index(index: ShardIndex, folder: PurePosixPath, packed: Mapping[str, Collection[str]]) -> str:
    """An index with the packed tensors under their names in the packed files, which lie in `folder`."""
    return index.renamed(
        lambda name, file: name + SUFFIX if name in packed.get(str(folder / file), ()) else name
    )


def packed_config(config: dict[str, Any]) -> str:
    """The text of a configuration that says that the model's weights are packed."""
    ours: dict[str, Any] = {"quant_method": METHOD, "version": VERSION}
    if "quantization_config" in config:
        ours["source"] = config["quantization_config"]
    config["quantization_config"] = ours
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"


def _names_packing(name: str, weights: Collection[str]) -> bool:
    """Whether a file is the configuration of a model, which says that its weights are packed.

    That of the directory is, and in a pipeline those beside weights.
    """
    folder = folder_of(name)
    return is_config(name) and (not folder or any(folder_of(it) == folder for it in weights))


class _Packing:
    """A directory on its way into another."""

    def __init__(self, tree: Tree, weights: Weights, folder: Path, destination: Path) -> None:
        self.tree, self.weights, self.folder, self.destination = tree, weights, folder, destination
        self.files: dict[str, dict[str, str]] = {}
        self.packed: dict[str, set[str]] = {}  # names of packed tensors, by the file that they are in
        self.results: list[Result] = []

    def pack_weights(self, name: str, **options: Any) -> None:
        """Pack a weight file, and note the hash of what unpacking will give."""
        source, made = self.tree.root / name, self.weights.files[name]
        unchanged = Unchanged(source)
        try:
            opened = open_source(source)
        except AlreadyPacked:
            raise already_packed(self.tree.root) from None
        try:
            digits = sha256_of_tensors(opened.container, opened.read)
            result, self.packed[made] = pack_opened(
                opened, source, self.folder / made, force=False, **options
            )
        finally:
            opened.close()
        unchanged.require()
        self.note(made, {"sha256": digits})
        self.results.append(renamed(result, self.destination / made))

    def note(self, name: str, info: dict[str, str]) -> None:
        """Note what restores a file, and its name in the source if that is another."""
        source = self.weights.sources.get(name)
        self.files[name] = info | ({"from": source} if source is not None else {})

    def change(self, name: str, original: str, changed: str) -> None:
        """Write a text in the place of another, which the manifest keeps."""
        source = self.tree.root / self.weights.sources.get(name, name)
        write_text(self.folder / name, changed, mode_of(source))
        digits = hashlib.sha256(original.encode("utf-8")).hexdigest()
        self.note(name, {"sha256": digits, "original": original})

    def change_index(self, name: str) -> None:
        """Write an index of the packed files."""
        index, where = self.weights.indexes[name], PurePosixPath(name).parent
        self.change(name, index.text, packed_index(index, where, through_links(self.packed, self.tree.links)))

    def change_config(self, name: str) -> None:
        """Write a configuration that says that weights are packed."""
        text = read_document(self.tree.root / name)
        self.change(name, text, packed_config(parse_object(text, self.tree.root / name)))

    def copy(self, name: str) -> None:
        """Copy a file."""
        self.note(name, {"sha256": copy_file(self.tree.root / name, self.folder / name)})


def through_links(packed: Mapping[str, set[str]], links: Mapping[str, str]) -> dict[str, set[str]]:
    """Packed tensors by file, and by every link that leads to one."""
    found = dict(packed)
    for link in links:
        target = follow(link, links)
        if target is not None and target in packed:
            found[link] = packed[target]
    return found


def pack_directory(
    source: Path,
    destination: Path,
    *,
    threads: int | None,
    codec: CodecName,
    force: bool,
    exclude: Sequence[str] = (),
    progress: Progress = no_progress,
) -> tuple[list[Result], tuple[LeftOut, ...]]:
    """Pack a model directory; returns a result for each of its weight files, and what was not taken."""
    if is_packed_directory(source):
        raise already_packed(source)
    refuse_nested(source, destination)
    tree = walk(source, exclude)
    weights = choose(tree)
    if packing_configs(tree):
        refuse_packed(tree, weights)
    converted = {weights.sources.get(made, made) for made in (*weights.files.values(), *weights.indexes)}
    copied = [name for name in tree.files if name not in converted]
    names = {*copied, *weights.files.values(), *weights.indexes, *tree.links, *tree.folders}
    with new_folder(destination, replaceable(destination, names), force=force) as folder:
        packing = _Packing(tree, weights, folder, destination)
        for name in tree.folders:
            (folder / name).mkdir()
        for name in weights.files:
            packing.pack_weights(name, threads=threads, codec=codec, progress=progress)
        for name in weights.indexes:
            if name not in tree.links:
                packing.change_index(name)
        linked = {*through_links(packing.packed, tree.links)}
        for name in copied:
            (packing.change_config if _names_packing(name, linked) else packing.copy)(name)
        for name, target in tree.links.items():
            (folder / name).symlink_to(target)
            packing.files[name] = {"link": target}
        files = {name: packing.files[name] for name in sorted(packing.files, key=lambda it: it.split("/"))}
        write_text(folder / MANIFEST, Manifest(files, tree.empty_folders()).text(), _manifest_mode(source))
        finish_folders(source, folder, tree.folders)
    return packing.results, tree.left_out


def _manifest_mode(source: Path) -> int:
    """Who may read a folder may read its manifest, which holds the texts of some of its files."""
    return 0o600 | source.stat().st_mode & 0o044


def renamed(result: Result, destination: Path) -> Result:
    """A result with another destination."""
    return Result(
        result.source,
        str(destination),
        result.source_bytes,
        result.destination_bytes,
        result.tensors,
        result.packed,
    )


def _restore(path: Path, target: Path, threads: int, progress: Progress) -> Result | None:
    """Unpack a weight file; None if it is no packed one, which is as it was."""
    if not path.name.endswith(SAFETENSORS):
        return None
    try:
        return unpack_file(path, target, threads=threads, force=False, progress=progress)
    except (NotPacked, NotSafetensors):
        return None


def unpack_directory(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> list[Result]:
    """Restore the directory that was packed; returns a result for each of its weight files."""
    manifest = read_manifest(source)
    refuse_nested(source, destination)
    names = {*manifest.files, *manifest.folders}
    results = []
    with new_folder(destination, replaceable(destination, names), force=force) as folder:
        for name, info in manifest.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if "link" in info:
                if os.path.lexists(source / name) and not stands_for_link(source / name, info["link"]):
                    raise Corrupt(
                        f"`{source / name}` is not the link that was packed, nor a copy of what it leads to",
                        hint="the directory is damaged, fetch it again",
                        where=str(source / name),
                    )
                continue
            if not (source / name).is_file():
                raise Truncated(
                    f"`{source}` lacks `{name}`, which its manifest names", hint="fetch it", where=name
                )
            manifest.refuse_link(source, name)
            if "original" in info:
                found = write_text(target, info["original"], mode_of(source / name))
            else:
                result = _restore(source / name, target, threads, progress)
                results += [] if result is None else [renamed(result, destination / name)]
                found = sha256(target) if result is not None else copy_file(source / name, target)
            if found != info["sha256"]:
                raise Corrupt(
                    f"`{source / name}` unpacks to a file with SHA-256 {found}, the manifest says "
                    f"{info['sha256']}",
                    hint="the directory is damaged, fetch it again",
                    where=str(source / name),
                    found=found,
                    needed=info["sha256"],
                )
        for name in manifest.folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, link in manifest.links().items():  # last: nothing is written through one
            (folder / name).symlink_to(link)
        finish_folders(source, folder, walk(folder).folders)
    return results
