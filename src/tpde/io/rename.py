"""Renames that replace nothing, and renames that swap: what POSIX has no call for.

Linux has `renameat2`, macOS `renamex_np`. Not every file system takes their flags.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from pathlib import Path

_AT_FDCWD = -100
_LINUX_NOREPLACE, _LINUX_EXCHANGE = 1, 2
_MACOS_SWAP, _MACOS_EXCLUSIVE = 2, 4
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def _rename(old: Path, new: Path, linux: int, macos: int) -> bool:
    """Rename with a flag; returns whether the system and the file system have it."""
    source, target = os.fsencode(old), os.fsencode(new)
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "renameat2" if sys.platform == "linux" else "renamex_np", None)
    if call is None:
        return False
    arguments = (
        (_AT_FDCWD, source, _AT_FDCWD, target, linux) if sys.platform == "linux" else (source, target, macos)
    )
    if call(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(old), None, os.fspath(new))


def exchange(one: Path, other: Path) -> bool:
    """Let two paths swap what they name, at once. False, and nothing done, where the system cannot.

    Raises
    ------
    OSError
        If it can, and failed.
    """
    return _rename(one, other, _LINUX_EXCHANGE, _MACOS_SWAP)


def rename_new(old: Path, new: Path) -> None:
    """Rename, and replace nothing. If both are links to one file, `old` is removed.

    A file system with neither flags nor hard links leaves a moment between looking and renaming a file.

    Raises
    ------
    FileExistsError
        If there is something at `new`. An empty folder may be replaced by a folder where flags are missing.
    OSError
        If renaming failed.
    """
    try:
        if not _rename(old, new, _LINUX_NOREPLACE, _MACOS_EXCLUSIVE):
            _rename_new(old, new)
    except FileExistsError:
        if stat.S_ISDIR(os.lstat(old).st_mode) or not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise
        os.unlink(old)  # linked before: what is left of the renaming


def _rename_new(old: Path, new: Path) -> None:
    """The same without flags."""
    exists = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(new))
    if stat.S_ISDIR(os.lstat(old).st_mode):
        try:
            os.rename(old, new)  # of folders, takes the place of empty ones only
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise exists from None
            raise
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:
        raise exists from None
    except OSError:  # a file system without links
        if os.path.lexists(new):
            raise exists from None
        os.rename(old, new)
    else:
        os.unlink(old)
