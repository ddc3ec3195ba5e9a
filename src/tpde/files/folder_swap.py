"""Folders that appear whole or not at all, and replace others without losing what is not theirs.

A new folder is filled in `.NAME.xxxxxxxx.tpde-tmp/new`, beside its place. That outer folder is locked while
its process lives. When all is on the disk, `new` and the old folder are exchanged at once, or, where the
system has no such call, the old one becomes `old` there, and `new` takes its place. `journal`, written
before, says which of the old files may go: those of the model, as they were when packing began. All else is
carried over.

`_finish` is the only way out: at the end, after errors and Ctrl-C, and for what a killed process has left.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tpde.errors import InvalidDestination, printable
from tpde.files.documents import is_inside
from tpde.files.file_kinds import folder_of
from tpde.files.walk import HUB_CACHE
from tpde.io.rename import exchange, rename_new
from tpde.io.sinks import exists_already, kind_of, sync_folder, unwritable
from tpde.io.temporary import abandoned, clear_files, create, remove

log = logging.getLogger("tpde")

_JOURNAL = "journal"
_OWNER = 0o700  # whatever a folder's permissions, its owner may fill and remove it

Identity = list[int]
"""Inode, size, time of change in nanoseconds and kind of a file: the same if nobody has touched it."""


@contextlib.contextmanager
def new_folder(destination: Path, ours: Collection[str], *, force: bool) -> Iterator[Path]:
    """A folder filled under a temporary name, synced, and put in its place.

    Parameters
    ----------
    destination : Path
        Its place.
    ours : collection of str
        Relative paths of what may be replaced: files and links of the model, new and old.
    force : bool
        Replace what is there, but no folder that holds other files.

    Raises
    ------
    DestinationExists, InvalidDestination
        If something is there that may not be replaced, or the folder cannot be made.
    """
    removable = refuse_folder(destination, ours, force)
    clear(destination.parent)
    try:
        outer, lock = create(destination, _make_folder)
    except OSError as error:
        raise unwritable(destination, error) from error
    try:
        new = outer / "new"
        new.mkdir()
        yield new
        sync_tree(new)
        _put(outer, destination, removable, force)
    except OSError as error:
        _name_destination(error, new, destination)
        raise
    finally:
        try:
            _finish(outer)
        except BaseException:  # a second Ctrl-C; what is left then is for the next run
            _finish(outer)
            raise
        finally:
            os.close(lock)


def _make_folder(path: Path) -> int:
    os.mkdir(path, _OWNER)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _name_destination(error: OSError, new: Path, destination: Path) -> None:
    """Let an error name the place that was asked for."""
    if error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if path.is_relative_to(new):
            error.filename = str(destination / path.relative_to(new))


def refuse_folder(destination: Path, ours: Collection[str], force: bool) -> dict[str, Identity]:
    """Refuse a destination for a folder; returns what is there and may be removed.

    Raises
    ------
    DestinationExists
        If there is something, and `force` is false.
    InvalidDestination
        If there is something that would not be replaced with `force` either.
    """
    try:
        mode = os.lstat(destination).st_mode
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unwritable(destination, error) from error
    removable: dict[str, Identity] = {}
    if stat.S_ISDIR(mode):
        removable = _removable(destination, set(ours))
    elif not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise InvalidDestination(
            f"`{destination}` is {kind_of(mode)}, which is never replaced",
            hint="name a folder",
            where=str(destination),
        )
    if not force:
        raise exists_already(destination)
    return removable


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
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


def _identity(info: os.stat_result) -> Identity:
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFDIR:  # its content may change
        return [info.st_ino, 0, 0, kind]
    return [info.st_ino, info.st_size, info.st_mtime_ns, kind]


def _removable(folder: Path, ours: Collection[str]) -> dict[str, Identity]:
    """What of a folder is the model's: files and links by their names, and the folders that hold them.

    Links, pipes and the like that are not are carried over; files would be, too, but a folder with such is
    not the one that is meant.
    """
    parents = {str(parent) for name in ours for parent in PurePosixPath(name).parents}
    found: dict[str, Identity] = {}
    try:
        for name, info in _entries(folder):
            kind = stat.S_IFMT(info.st_mode)
            if kind == stat.S_IFDIR:
                if name in parents or name in ours:
                    found[name] = _identity(info)
            elif name in ours and kind in (stat.S_IFREG, stat.S_IFLNK):
                found[name] = _identity(info)
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


def sync_tree(folder: Path) -> None:
    """Make everything below a folder outlast a loss of power."""
    folders = [folder]
    for name, info in _entries(folder):
        if stat.S_ISDIR(info.st_mode):
            folders.append(folder / name)
        elif stat.S_ISREG(info.st_mode):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    for it in reversed(folders):
        sync_folder(it)


def _put(outer: Path, destination: Path, removable: Mapping[str, Identity], force: bool) -> None:
    """Put the new folder in its place. Whatever interrupts this, `_finish` sets right."""
    new = outer / "new"
    try:
        rename_new(new, destination)
    except FileExistsError:
        if not force:
            raise exists_already(destination) from None
        old = os.lstat(destination)
        if stat.S_ISDIR(old.st_mode):
            _adopt(destination, new, removable)
        sync_folder(destination.parent)  # or the old folder would be moved into one that may be lost
        _write_journal(outer, {"name": destination.name, "old": _identity(old)[0], "removable": removable})
        if not exchange(new, destination):
            os.rename(destination, outer / "old")
            rename_new(new, destination)
    else:
        sync_folder(destination.parent)


def _adopt(old: Path, new: Path, removable: Mapping[str, Identity]) -> None:
    """Link what is not of the old model into the new folder, which then is complete as soon as it is there.

    What cannot be linked is moved later.
    """
    folders = {"", *(name for name, info in _entries(new) if stat.S_ISDIR(info.st_mode))}
    touched = set()
    for name, info in _entries(old):
        if name in removable or folder_of(name) not in folders or os.path.lexists(new / name):
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(info.st_mode):
                (new / name).mkdir()
                (new / name).chmod(stat.S_IMODE(info.st_mode) | _OWNER)
                folders.add(name)
            else:
                os.link(old / name, new / name, follow_symlinks=False)
            touched |= {folder_of(name), name} & folders
    for it in touched:
        sync_folder(new / it)


def _write_journal(outer: Path, value: dict[str, Any]) -> None:
    path = outer / _JOURNAL
    with open(f"{path}.tmp", "x", encoding="ascii") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.tmp", path)
    sync_folder(outer)


def clear(folder: Path) -> None:
    """Remove what killed processes left in a folder, and finish or undo what they were replacing."""
    clear_files(folder)
    for path in abandoned(folder):
        if path.is_dir():
            _finish(path)


def _finish(outer: Path) -> None:
    """Leave the old folder in its place, or the new one with what was not of the old one's model."""
    try:
        record = json.loads((outer / _JOURNAL).read_bytes())
        destination = outer.with_name(record["name"])
        number, removable = record["old"], record["removable"]
        if not all(map(is_inside, removable)):
            return
    except FileNotFoundError:  # nothing was replaced
        remove(outer)
        return
    except (ValueError, KeyError, TypeError):  # not one of ours: nothing is known of what is there
        return
    old = next((it for it in (outer / "new", outer / "old") if _number(it) == number), None)
    if old is not None and not os.path.lexists(destination):
        rename_new(old, destination)
        sync_folder(destination.parent)
    elif old is not None:
        sync_folder(destination.parent)  # whoever is here: the old one may only go when the new one is kept
        sync_folder(outer)
        _settle(old, destination, removable)
    remove(outer)


def _number(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _settle(old: Path, destination: Path, removable: Mapping[str, Identity]) -> None:
    """Remove the model from a folder that was replaced, and carry everything else over to the new one."""
    if not stat.S_ISDIR(os.lstat(old).st_mode):
        os.unlink(old)
        return
    _unlock(old)
    for name in sorted(removable, key=lambda it: -it.count("/")):  # what is in folders before these
        path = old / name
        with contextlib.suppress(FileNotFoundError):
            if _identity(os.lstat(path)) != removable[name]:
                continue
            if removable[name][-1] != stat.S_IFDIR:
                _unlock(path.parent)
                os.unlink(path)
                continue
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)
    if not _carry(old, destination):
        kept = destination.with_name(f"{destination.name}.replaced-{secrets.token_hex(4)}")
        rename_new(old, kept)
        log.warning("`%s` holds what has no place in `%s`, which replaced it", kept, destination)


def _unlock(folder: Path) -> None:
    """Let the owner remove what is in a folder."""
    mode = stat.S_IMODE(os.lstat(folder).st_mode)
    if mode & _OWNER != _OWNER:
        os.chmod(folder, mode | _OWNER)


def _carry(old: Path, new: Path) -> bool:
    """Move everything in a folder to another, replacing nothing; returns whether all of it was."""
    done = True
    for entry in sorted(os.listdir(old)):
        here, there = old / entry, new / entry
        if here.is_dir() and not here.is_symlink():
            _unlock(here)
            if there.is_dir() and not there.is_symlink():
                done &= _carry(here, there)
                continue
        try:
            rename_new(here, there)
        except OSError:  # its name is taken by a file of the model
            done = False
    if done:
        os.rmdir(old)
    return done
