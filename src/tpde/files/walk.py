"""What is in a model directory: the one walk that all else goes by.

Files, links that stay inside and folders are taken. Everything else is named with the reason why it is not:
nothing is left out without a word, and nothing but regular files is ever opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from tpde.errors import InvalidArgument, InvalidInput, printable
from tpde.files.file_kinds import may_stay_link
from tpde.io.special_files import kind_of

HUB_CACHE = ".cache"  # below a folder that `huggingface_hub` downloaded: its own notes
EXCLUDED = "excluded"  # the reason for leaving out what a pattern matches
MAX_LINKS = 40  # in a row; as Linux follows
# Errors that say something of what is there. Others, of the disk, are no reason to leave anything out.
_OF_WHAT_IS_THERE = (
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
)


@dataclass(frozen=True)
class LeftOut:
    """Something in a directory that is not taken.

    Attributes
    ----------
    name : str
        Its relative path, as it may be printed.
    reason : str
        Why not.
    expected : bool
        Whether it was left out because that was asked for, or is always done.
    """

    name: str
    reason: str
    expected: bool = False


@dataclass(frozen=True)
class FolderTree:
    """What is in a directory. Names are relative, with `/` between their parts, in order.

    Attributes
    ----------
    root : Path
        The directory.
    files : tuple of str
        Regular files, and links to such that lead elsewhere, which are taken as what they lead to.
    links : mapping of str to str
        Links that stay inside, and what they say.
    folders : tuple of str
        Folders, without the directory itself.
    left_out : tuple of LeftOut
        What is not taken.
    unmatched : tuple of str
        Patterns of what to leave out that nothing here matches.
    """

    root: Path
    files: tuple[str, ...]
    links: Mapping[str, str]
    folders: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    unmatched: tuple[str, ...] = ()

    def empty_folders(self) -> list[str]:
        """Folders in which nothing is taken."""
        parents = {str(PurePosixPath(it).parent) for it in (*self.files, *self.links, *self.folders)}
        return [it for it in self.folders if it not in parents]


def stays_inside(name: str, target: str) -> bool:
    """Whether a link cannot lead out of its directory, whatever other such links are in it.

    Parameters
    ----------
    name : str
        Its relative path.
    target : str
        What it says: relative, and with `..` at its beginning only, no more of them than it has parents.
    """
    parts = PurePosixPath(target).parts
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return (
        bool(target)
        and not target.startswith("/")
        and ".." not in parts[ups:]
        and ups <= len(PurePosixPath(name).parts) - 1
    )


def follow(name: str, links: Mapping[str, str]) -> str | None:
    """What a name in a directory stands for when its links are followed; None where they lead in circles."""
    for _ in range(MAX_LINKS):
        path = PurePosixPath(name)
        at = next((it for it in (path, *path.parents) if str(it) in links), None)
        if at is None:
            return name
        name = os.path.normpath(PurePosixPath(*at.parts[:-1], links[str(at)], path.relative_to(at)))
    return None


def _sort_key(name: str) -> list[str]:
    return name.split("/")


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a path, or, without a slash, its last part."""
    pattern = pattern.rstrip("/")
    return fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern.removeprefix("./"))


class _Walk:
    """The state of `walk`."""

    def __init__(self, root: Path, exclude: Sequence[str], *, outside: bool) -> None:
        self.root, self.exclude, self.outside = root, exclude, outside
        self.files: list[str] = []
        self.links: dict[str, str] = {}
        self.folders: list[str] = []
        self.left_out: list[LeftOut] = []
        self.unmatched = dict.fromkeys(exclude)
        self.open = [""]

    def leave(self, name: str, reason: str, *, expected: bool = False) -> None:
        self.left_out.append(LeftOut(printable(name), reason, expected))

    def list_folder(self, folder: str) -> None:
        try:
            with os.scandir(self.root / folder) as entries:
                found = [it.name for it in entries]
        except OSError as error:
            if not folder or error.errno not in _OF_WHAT_IS_THERE:
                raise
            self.folders.remove(folder)
            self.leave(folder, f"the folder cannot be read: {error.strerror}")
            return
        for entry in found:
            self.take(f"{folder}/{entry}" if folder else entry)

    def take(self, name: str) -> None:
        matching = [it for it in self.exclude if _matches(name, it)]
        for it in matching:
            self.unmatched.pop(it, None)
        if name == HUB_CACHE:
            self.leave(name, "the hub's own notes", expected=True)
            return
        if matching:
            self.leave(name, EXCLUDED, expected=True)
            return
        if not _is_text(name):
            self.leave(name, "its name is not UTF-8")
            return
        try:
            mode = os.lstat(self.root / name).st_mode
        except OSError as error:
            if error.errno not in _OF_WHAT_IS_THERE:
                raise
            self.leave(name, f"it cannot be looked at: {error.strerror}")
            return
        if stat.S_ISDIR(mode):
            self.folders.append(name)
            self.open.append(name)
        elif stat.S_ISREG(mode):
            self.files.append(name)
        elif stat.S_ISLNK(mode):
            self.links[name] = os.readlink(self.root / name)
        else:
            self.leave(name, f"{kind_of(mode)}, which has no content to keep")

    def settle_links(self) -> None:
        """Keep the links that stay inside and lead to what is taken; take other files as what they are."""
        found, self.links = self.links, {}
        inside = {name: it for name, it in found.items() if stays_inside(name, it) and _is_text(it)}
        known = {*self.files, *self.folders}
        for name in found:
            end = follow(name, inside)
            there = os.path.lexists(self.root / end) if end is not None else False
            taken = end is None or end == "." or (end in known and may_stay_link(name, end))
            if name in inside and (taken or not there):
                self.links[name] = inside[name]  # if it leads nowhere, it does so in any other place
            else:
                self.take_as_file(name, end in known)

    def take_as_file(self, name: str, inside: bool) -> None:
        """Take a link that leads out, or to what is not taken, as the file that it leads to."""
        try:
            mode = os.stat(self.root / name).st_mode
        except OSError as error:
            if error.errno not in _OF_WHAT_IS_THERE:
                raise
            self.leave(name, f"a link that leads nowhere: {error.strerror}")
            return
        if not stat.S_ISREG(mode):
            self.leave(name, f"a link to {kind_of(mode)} that is not taken")
        elif not inside and not self.outside and not _is_of_the_hub(self.root, self.root / name):
            self.leave(name, "a link that leads out of the directory")
        else:
            self.files.append(name)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_of_the_hub(root: Path, path: Path) -> bool:
    """Whether a link leads to its content in the hub's cache, where models are folders of such links."""
    snapshot = root.resolve()
    blobs = snapshot.parent.parent / "blobs"
    return snapshot.parent.name == "snapshots" and path.resolve().parent == blobs


def check_patterns(exclude: object) -> tuple[str, ...]:
    """The patterns of what to leave out.

    Raises
    ------
    InvalidArgument
        If they are no list of texts: a text alone would be taken for a pattern of each of its letters.
    """
    if isinstance(exclude, Iterable) and not isinstance(exclude, str):
        patterns = tuple(exclude)
        if all(isinstance(it, str) for it in patterns):
            return patterns
    raise InvalidArgument(
        f"`exclude` is {exclude!r:.50}, which is no list of patterns",
        hint='pass a list of texts, such as `["*.msgpack"]`',
        where="exclude",
        found=exclude,
    )


def walk(root: Path, exclude: Sequence[str] = (), *, outside: bool = True) -> FolderTree:
    """Look at everything in a directory. No link to a folder is followed, and nothing is opened.

    Parameters
    ----------
    root : Path
        The directory.
    exclude : sequence of str
        Patterns of the shell: of names, or, with a slash, of relative paths. What they match is left out, of
        folders with all that is in them.
    outside : bool
        Whether links to files elsewhere are taken as these files. Else only those of the hub's cache are.

    Raises
    ------
    InvalidInput
        If it is no directory.
    OSError
        If it cannot be read; or if the system failed, which is no property of what is there.
    """
    if not root.is_dir():
        raise InvalidInput(f"`{root}` is no folder", hint="check the path", where=str(root))
    state = _Walk(root, exclude, outside=outside)
    while state.open:
        state.list_folder(state.open.pop())
    state.settle_links()
    return FolderTree(
        root,
        tuple(sorted(state.files, key=_sort_key)),
        {name: state.links[name] for name in sorted(state.links, key=_sort_key)},
        tuple(sorted(state.folders, key=_sort_key)),
        tuple(sorted(state.left_out, key=lambda it: _sort_key(it.name))),
        tuple(state.unmatched),
    )
