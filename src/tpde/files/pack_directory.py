"""A model directory packed (docs/format.md 8)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from tpde.codec.selection import CodecName
from tpde.errors import AlreadyPacked
from tpde.files.changed_texts import packed_config, packed_index, through_links
from tpde.files.copying import Unchanged, copy_file, finish_folders, mode_of, sha256_of_tensors, write_text
from tpde.files.destinations import refuse_nested, replaceable
from tpde.files.documents import parse_object, read_document, refuse_unread
from tpde.files.file_kinds import folder_of, is_config
from tpde.files.folder_swap import new_folder
from tpde.files.inputs import open_source
from tpde.files.manifest import Manifest, is_packed_directory
from tpde.files.pack_file import pack_opened
from tpde.files.packed_state import already_packed, packing_configs, refuse_packed
from tpde.files.progress import Progress, no_progress
from tpde.files.result import Result
from tpde.files.walk import FolderTree, walk
from tpde.files.weight_files import Weights, choose
from tpde.format.constants import MANIFEST


def pack_directory(
    source: Path,
    destination: Path,
    *,
    threads: int | None,
    codec: CodecName,
    force: bool,
    exclude: Sequence[str] = (),
    progress: Progress = no_progress,
) -> tuple[list[Result], FolderTree]:
    """Pack a model directory; returns a result for each of its weight files, and what was there."""
    if is_packed_directory(source):
        raise already_packed(source)
    refuse_nested(source, destination)
    tree = walk(source, exclude)
    weights = choose(tree)
    if packing_configs(tree):
        refuse_packed(tree, weights.files)
    converted = {weights.sources.get(made, made) for made in (*weights.files.values(), *weights.indexes)}
    # A manifest there is of what was packed in the folder before it was saved again.
    copied = [name for name in tree.files if name not in converted and name != MANIFEST]
    texts = {name: {"original": it.text} for name, it in weights.indexes.items() if name not in tree.links}
    Manifest(texts, []).text()  # refused now, where it would be when all weights are packed
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
    return packing.results, tree


class _Packing:
    """A directory on its way into another."""

    def __init__(self, tree: FolderTree, weights: Weights, folder: Path, destination: Path) -> None:
        self.tree, self.weights, self.folder, self.destination = tree, weights, folder, destination
        self.files: dict[str, dict[str, str]] = {}
        self.packed: dict[str, set[str]] = {}  # names of packed tensors, by the file that they are in
        self.results: list[Result] = []

    def pack_weights(self, name: str, *, threads: int | None, codec: CodecName, progress: Progress) -> None:
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
                opened,
                source,
                self.folder / made,
                threads=threads,
                codec=codec,
                force=False,
                progress=progress,
                check=unchanged.require,
            )
        finally:
            opened.close()
        self.note(made, {"sha256": digits})
        self.results.append(result.at(self.destination / made))

    def note(self, name: str, info: dict[str, str]) -> None:
        """Note what restores a file, and its name in the source if that is another."""
        source = self.weights.sources.get(name)
        self.files[name] = info | ({"from": source} if source is not None else {})

    def change(self, name: str, original: str, changed: str) -> None:
        """Write a text in the place of another, which the manifest keeps."""
        source = self.tree.root / self.weights.sources.get(name, name)
        refuse_unread(changed, name)
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


def _names_packing(name: str, weights: Collection[str]) -> bool:
    """Whether a file is the configuration of a model, which says that its weights are packed.

    That of the directory is, and in a pipeline those beside weights.
    """
    folder = folder_of(name)
    return is_config(name) and (not folder or any(folder_of(it) == folder for it in weights))


def _manifest_mode(source: Path) -> int:
    """Who may read a folder may read its manifest, which holds the texts of some of its files."""
    return 0o600 | source.stat().st_mode & 0o044
