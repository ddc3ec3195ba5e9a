"""A folder that another one would replace: what of it is a model's and may go."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from tpde.errors import InvalidDestination, printable
from tpde.files.walk import HUB_CACHE
from tpde.io.sinks import exists_already, unwritable
from tpde.io.special_files import kind_of, special_kind

Identity = list[int]
"""Inode, size, time of change in nanoseconds and kind of a file: the same if nobody has touched it."""


def refuse_folder(
    destination: Path, ours: Collection[str], force: bool
) -> tuple[int | None, dict[str, Identity]]:
    """Refuse a destination for a folder; returns the inode of what is there, and what of it may be removed.

    Raises
    ------
    DestinationExists
        If there is something, and `force` is false.
    InvalidDestination
        If there is something that would not be replaced with `force` either, or the place has no name that
        a folder can be given.
    """
    if destination.name in ("", ".."):
        raise InvalidDestination(
            f"`{destination}` has no name, and a folder is made beside its place and then given its name",
            hint=f"name it from the folder above: `{destination.resolve().name or 'NAME'}`",
            where=str(destination),
        )
    try:
        there = os.lstat(destination)
    except FileNotFoundError:
        return None, {}
    except OSError as error:
        raise unwritable(destination, error) from error
    mode, removable = there.st_mode, dict[str, Identity]()
    if stat.S_ISDIR(mode):
        removable = _removable(destination, set(ours))
    elif (kind := "a file" if stat.S_ISREG(mode) else special_kind(destination, mode)) is not None:
        raise InvalidDestination(
            f"`{destination}` is {kind}, which is never replaced by a folder",
            hint="name a folder",
            where=str(destination),
        )
    if not force:
        raise exists_already(destination)
    return there.st_ino, removable


def _removable(folder: Path, ours: Collection[str]) -> dict[str, Identity]:
    """What of a folder is the model's: files and links by their names, and the folders that hold them.

    Links, pipes and the like that are not are carried over; files would be, too, but a folder with such is
    not the one that is meant.
    """
    parents = {str(parent) for name in ours for parent in PurePosixPath(name).parents}
    found: dict[str, Identity] = {}
    try:
        for name, info in below(folder):
            kind = stat.S_IFMT(info.st_mode)
            if kind == stat.S_IFDIR:
                if name in parents or name in ours:
                    found[name] = identity_of(info)
            elif name in ours and kind in (stat.S_IFREG, stat.S_IFLNK):
                found[name] = identity_of(info)
            elif name in ours or (kind == stat.S_IFREG and not name.startswith(f"{HUB_CACHE}/")):
                what = "no file of this model" if kind == stat.S_IFREG else kind_of(kind)
                raise InvalidDestination(
                    f"`{folder}` holds `{printable(name)}`, which is {what} and would be lost",
                    hint="remove the folder yourself, or choose another destination",
                    where=str(folder),
                )
    except OSError as error:
        raise unwritable(folder, error) from error
    return found


def below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, relative, and what it is; folders before what is in them."""
    pending = [""]
    while pending:
        at = pending.pop()
        with os.scandir(folder / at) as entries:
            found = sorted(it.name for it in entries)
        for entry in found:
            name = f"{at}/{entry}" if at else entry
            info = os.lstat(folder / name)
            yield name, info
            if stat.S_ISDIR(info.st_mode):
                pending.append(name)


def identity_of(info: os.stat_result) -> Identity:
    """What tells whether somebody has touched a file, or a folder been replaced."""
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFDIR:  # its content may change
        return [info.st_ino, 0, 0, kind]
    return [info.st_ino, info.st_size, info.st_mtime_ns, kind]
