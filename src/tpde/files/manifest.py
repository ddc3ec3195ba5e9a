"""The manifest of a packed directory: what restores its source (docs/format.md 8)."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from tpde.errors import Corrupt, NotJson, NotPacked, TpdeError, UnsupportedVersion, printable
from tpde.files.documents import is_inside, is_text, parse_json, read_document, refuse_unread
from tpde.files.file_kinds import SAFETENSORS, may_change
from tpde.files.packed_state import packing_configs
from tpde.files.reader import PackedFile
from tpde.files.walk import stays_inside, walk
from tpde.files.weight_files import not_packed
from tpde.format.constants import MANIFEST, VERSION

_DIGITS = set("0123456789abcdef")


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes
    ----------
    files : dict of str to dict of str to str
        What restores each file, by its relative path: `sha256` of the restored one, `original` for the text
        of one that packing changes, `from` for its name in the source if that is another; or `link` alone.
    folders : list of str
        Folders that hold nothing.
    """

    files: Mapping[str, Mapping[str, str]]
    folders: Sequence[str]

    def links(self) -> dict[str, str]:
        """The links, and what they say."""
        return {name: info["link"] for name, info in self.files.items() if "link" in info}

    def refuse_link(self, folder: Path, name: str) -> None:
        """Refuse a link to another of these files where a file was packed, even if that has its content.

        Other links may stand there, as in the hub's cache.

        Raises
        ------
        Corrupt
            If there is one.
        """
        path = folder / name
        if path.is_symlink():
            target = os.path.normpath(PurePosixPath(name).parent / os.readlink(path))
            if target in self.files:
                raise Corrupt(
                    f"`{path}` is a link to `{printable(target)}`, where a file was packed",
                    hint="the directory is damaged, fetch it again",
                    where=str(path),
                )

    def text(self) -> str:
        """The file's content.

        Raises
        ------
        InvalidInput
            If it is too large to be read.
        """
        value: dict[str, object] = {"version": VERSION, "entries": len(self.files) + len(self.folders)}
        value["files"] = self.files
        if self.folders:
            value["folders"] = self.folders
        text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
        largest = max(self.files, key=lambda name: len(self.files[name].get("original", "")), default="")
        why = f": of the texts that it keeps, which packing changes, `{largest}` is the longest"
        refuse_unread(text, MANIFEST, why)
        return text


def is_packed_directory(folder: Path) -> bool:
    """Whether a directory was packed by tpde, and not saved again since (format.md 8)."""
    return (folder / MANIFEST).is_file() and not _is_saved_over(folder)


def _is_saved_over(folder: Path) -> bool:
    """Whether all weights were saved again, packed or plain, as the configuration says.

    Weights that were packed with the directory hold the source's header. What cannot be read, or is not as
    the configuration says, may be damaged.
    """
    tree, any_packed = walk(folder, outside=False), False
    names = [name for name in tree.files if name.endswith(SAFETENSORS)]
    try:
        for name in names:
            with PackedFile(folder / name) as file:
                if file.original is not None:
                    return False
                any_packed |= file.is_packed
        return bool(names) and bool(packing_configs(tree)) == any_packed
    except (TpdeError, OSError):
        return False


def require_packed(folder: Path) -> None:
    """Refuse a directory that was not packed, or has been saved again.

    Raises
    ------
    NotPacked
        If it is one.
    """
    if not is_packed_directory(folder):
        raise _no_manifest(folder)


def _no_manifest(folder: Path) -> NotPacked:
    why = f"it has no `{MANIFEST}`"
    if (folder / MANIFEST).is_file():
        why = f"its weights were saved again, and its `{MANIFEST}` is of those before"
    return not_packed(folder, f"`{folder}` is not a packed model directory, {why}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a packed directory.

    Raises
    ------
    NotPacked, UnsupportedVersion, Corrupt
        If there is none, or not a valid one.
    """
    path = folder / MANIFEST
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise _no_manifest(folder) from None
    if not stat.S_ISREG(mode):  # a pipe would be waited for
        raise _no_manifest(folder)
    try:
        value = parse_json(read_document(path), path, unique=True)
    except NotJson as error:
        raise Corrupt(error.message, hint="fetch it again", where=str(path)) from None
    said = value if isinstance(value, dict) else {}
    version = said.get("version")
    if type(version) is not int or version != VERSION:
        raise UnsupportedVersion(
            f"`{path}` has version {printable(version)[:20]}; this tpde reads version {VERSION}",
            hint="upgrade tpde",
            where=str(path),
            found=version,
            needed=VERSION,
        )
    files, folders = said.get("files"), said.get("folders", [])
    if not isinstance(files, dict) or not files:
        _refuse(path, "it has no `files`")
    if not isinstance(folders, list) or not all(map(is_inside, folders)):
        _refuse(path, "its `folders` are no list of folders of the directory")
    found, needed = len(files) + len(folders), said.get("entries")
    if type(needed) is not int or found != needed:
        _refuse(path, f"it has {found} files and folders, and says {printable(needed)[:20]}")
    names = {*files, *folders}
    for name in (*files, *folders):
        if not is_inside(name) or any(str(parent) in names for parent in PurePosixPath(name).parents):
            _refuse(path, f"it names {name[:200]!a}, which is no file of the directory")
    if len(names) != found:
        _refuse(path, "a file is a folder")
    for name, info in files.items():
        if not isinstance(info, dict) or not all(map(is_text, info.values())) or not _is_entry(name, info):
            _refuse(path, f"the entry of `{printable(name)}` is damaged")
    return Manifest(files, folders)


def _is_entry(name: str, info: Mapping[str, str]) -> bool:
    """Whether a file's entry says what the format lets it say."""
    if "link" in info:
        return set(info) == {"link"} and stays_inside(name, info["link"]) and "\0" not in info["link"]
    digits = info.get("sha256", "")
    if len(digits) != 64 or not _DIGITS.issuperset(digits):
        return False
    if "original" in info and not may_change(name):
        return False
    return "from" not in info or is_inside(info["from"])


def _refuse(path: Path, why: str) -> NoReturn:
    raise Corrupt(f"`{path}` is damaged: {why}", hint="fetch it again", where=str(path))
