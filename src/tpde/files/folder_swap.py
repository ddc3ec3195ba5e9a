"""Folders that appear whole or not at all, and replace others without losing what is not theirs.

A new folder is filled in `.NAME.xxxxxxxx.tpde-tmp/new`, beside its place. That outer folder is locked while
its process lives. When all is on the disk, `new` and the old folder are exchanged at once, or, where the
system has no such call, the old one becomes `old` there, and `new` takes its place. `journal`, written
before, says which of the old files may go: those of the model, as they were when packing began. All else is
carried over: so no two may be at it, or files of the one would be carried over to the other.

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
from pathlib import Path

from tpde.errors import InvalidDestination, InvalidInput
from tpde.files.documents import is_inside
from tpde.files.file_kinds import folder_of
from tpde.files.replaced_folder import Identity, below, identity_of, refuse_folder
from tpde.io.rename import exchange, rename_new
from tpde.io.sinks import exists_already, sync_folder, unwritable, write_failed
from tpde.io.sources import open_regular
from tpde.io.temporary import clear_files, create, left_or_living, remove, stands_for

log = logging.getLogger("tpde")

_JOURNAL = "journal"
_OWNER = 0o700  # whatever a folder's permissions, its owner may fill and remove it


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
        If something is there that may not be replaced, or the folder cannot be made; if it is being made
        already, or something else is in the place by the end.
    """
    clear(destination.parent)
    there, removable = refuse_folder(destination, ours, force)
    try:
        outer, lock = create(destination, _make_folder)
    except OSError as error:
        raise unwritable(destination, error) from error
    new = outer / "new"
    try:
        # Of two that begin at once, each has its lock by now, and one at least finds the other's.
        if any(stands_for(it, destination) and it != outer for it in clear(destination.parent)):
            raise InvalidDestination(
                f"`{destination}` is being written by another process, or by another thread of this one",
                hint="wait until that is done, or choose another destination",
                where=str(destination),
            )
        new.mkdir()
        yield new
        sync_tree(new)
        _put(outer, destination, there, removable, force)
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


def sync_tree(folder: Path) -> None:
    """Make everything below a folder outlast a loss of power."""
    folders = [folder]
    for name, info in below(folder):
        if stat.S_ISDIR(info.st_mode):
            folders.append(folder / name)
        elif stat.S_ISREG(info.st_mode):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise write_failed("completing the file failed", error, str(folder / name)) from error
            finally:
                os.close(descriptor)
    for it in reversed(folders):
        sync_folder(it)


def _put(
    outer: Path, destination: Path, there: int | None, removable: Mapping[str, Identity], force: bool
) -> None:
    """Put the new folder in its place, if what was `there` still is. `_finish` sets right what is cut off."""
    new = outer / "new"
    try:
        rename_new(new, destination)
    except FileExistsError:
        if not force:
            raise exists_already(destination) from None
        old = os.lstat(destination)
        if old.st_ino != there:  # of which nobody has looked at what may go
            raise InvalidDestination(
                f"something else has been put in the place of `{destination}` while this was made",
                hint="look at what is there now, and do it again if that may go",
                where=str(destination),
            ) from None
        if stat.S_ISDIR(old.st_mode):
            _adopt(destination, new, removable)
        sync_folder(destination.parent)  # or the old folder would be moved into one that may be lost
        _write_journal(outer, {"name": destination.name, "old": identity_of(old)[0], "removable": removable})
        if not exchange(new, destination):
            os.rename(destination, outer / "old")
            rename_new(new, destination)
    else:
        sync_folder(destination.parent)


def _adopt(old: Path, new: Path, removable: Mapping[str, Identity]) -> None:
    """Link what is not of the old model into the new folder, which then is complete as soon as it is there.

    What cannot be linked is moved later.
    """
    folders = {"", *(name for name, info in below(new) if stat.S_ISDIR(info.st_mode))}
    touched = set()
    for name, info in below(old):
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


def _write_journal(outer: Path, value: Mapping[str, object]) -> None:
    path = outer / _JOURNAL
    with open(f"{path}.tmp", "x", encoding="ascii") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.tmp", path)
    sync_folder(outer)


def clear(folder: Path) -> list[Path]:
    """Remove what killed processes left in a folder, and finish or undo what they were replacing.

    Returns what other processes, or other threads of this one, are making there.
    """
    clear_files(folder)
    living = []
    for path, left in left_or_living(folder):
        if left is False:
            living.append(path)
        elif left and path.is_dir():
            _finish(path)
    return living


def _finish(outer: Path) -> None:
    """Leave the old folder in its place, or the new one with what was not of the old one's model."""
    journal = outer / _JOURNAL
    if not os.path.lexists(journal):  # nothing was replaced
        remove(outer)
        return
    try:
        with os.fdopen(open_regular(journal), "rb") as file:  # a stranger's pipe would be waited for
            record = json.loads(file.read())
        destination = outer.with_name(record["name"])
        number, removable = record["old"], dict(record["removable"])
        if type(number) is not int or not all(map(_is_removable, removable.items())):
            return
    except (InvalidInput, ValueError, KeyError, TypeError, RecursionError):  # not one of ours
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


def _is_removable(item: tuple[str, object]) -> bool:
    """Whether a journal's entry is a path and an `Identity`."""
    name, found = item
    return (
        is_inside(name)
        and isinstance(found, list)
        and len(found) == 4
        and all(type(it) is int for it in found)
    )


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
            if identity_of(os.lstat(path)) != removable[name]:
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
