"""Temporary names, locked while their process lives: what a killed one left can be told and removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

_ENDING = ".tpde-tmp"
_NAME = re.compile(rf"\..*\.[0-9a-f]{{8}}{re.escape(_ENDING)}", re.DOTALL)
_MAX_NAME = 255  # bytes; as most file systems have it
_MAX_TRIES = 100  # where others remove what has just been made, or a file system tells no file again


def temporary_name(path: Path) -> Path:
    """A hidden name beside a path, which nothing has."""
    return path.with_name(f"{_start(path)}{secrets.token_hex(4)}{_ENDING}")


def _start(path: Path) -> str:
    """What temporary names for a path begin with."""
    stem, most = path.name, _MAX_NAME - len(f"..01234567{_ENDING}")
    while len(os.fsencode(stem)) > most:
        stem = stem[:-1]
    return f".{stem}."


def is_temporary(name: str) -> bool:
    """Whether this is a temporary name, which no file of others should have."""
    return _NAME.fullmatch(name) is not None


def stands_for(temporary: Path, path: Path) -> bool:
    """Whether something with a temporary name is made for a path's place."""
    start = _start(path)
    return temporary.name.startswith(start) and len(temporary.name) == len(f"{start}01234567{_ENDING}")


def create(path: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Create something under a temporary name beside a path, and lock it.

    Parameters
    ----------
    path : Path
        Its place to be.
    make : callable
        Creates it, fails if it is there, and gives a descriptor of it.

    Returns
    -------
    tuple of Path and int
        Where it is, and the descriptor. It is locked until all copies of that are closed.

    Raises
    ------
    OSError
        If it cannot be created.
    """
    for _ in range(_MAX_TRIES):
        temporary = temporary_name(path)
        try:
            descriptor = make(temporary)
        except OSError:
            raise
        except BaseException:  # Ctrl-C when it was there already
            with contextlib.suppress(OSError):
                remove(temporary)
            raise
        try:
            if _lock(descriptor) is not False and _is(descriptor, temporary):
                return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            remove(temporary)
            raise
        os.close(descriptor)  # whoever removes what killed processes left was faster
    raise OSError(errno.EBUSY, "what is created is gone at once", os.fspath(path))


def _lock(descriptor: int) -> bool | None:
    """Lock without waiting: whether it is locked by us now, or None where nothing can be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is(descriptor: int, path: Path) -> bool:
    """Whether a path names what is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def left_or_living(folder: Path) -> Iterator[tuple[Path, bool | None]]:
    """What processes of this user are making in a folder, or left there when they were killed.

    With each whether it was left, and then it is locked while it is looked at; None where nothing can be
    locked. What is not ours by name is not among them.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(it.name for it in entries if is_temporary(it.name))
    except OSError:  # a folder that may be written, but not listed
        return
    for path in (folder / name for name in found):
        with contextlib.suppress(OSError):
            kind = os.lstat(path)
            is_file = stat.S_ISREG(kind.st_mode)
            if kind.st_uid != os.geteuid() or not (is_file or stat.S_ISDIR(kind.st_mode)):
                continue
            how = (os.O_RDWR if is_file else os.O_RDONLY | os.O_DIRECTORY) | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, how)
            try:
                left = _lock(descriptor)
                if _is(descriptor, path):
                    yield path, left
            finally:
                os.close(descriptor)


def abandoned(folder: Path) -> Iterator[Path]:
    """What killed processes of this user left in a folder, each locked while it is looked at."""
    for path, left in left_or_living(folder):
        if left:
            yield path


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, following no links."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path)
    else:
        os.unlink(path)


def discard(path: Path, descriptor: int, owner: int) -> None:
    """Close and remove a file that nobody completed, unless another process made it."""
    if owner == os.getpid():
        with contextlib.suppress(OSError):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)


def clear_files(folder: Path) -> None:
    """Remove the files that killed processes left in a folder.

    In one that is being made itself there are none, and whoever fills it may have files of such names.
    """
    if any(is_temporary(name) for name in folder.parts):
        return
    for path in abandoned(folder):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
