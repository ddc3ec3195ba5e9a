"""Writing bytes at an offset, to a file that appears whole or not at all, or to memory."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tpde.errors import DestinationExists, InvalidDestination
from tpde.io.buffers import Buffer, byte_view
from tpde.io.paths import anchored, given_path, remedy
from tpde.io.rename import rename_new
from tpde.io.special_files import special_kind
from tpde.io.temporary import clear_files, create, discard

_MAX_BUFFERS = 512  # of one pwritev; systems allow 1024
# Of file systems that do not sync folders, and of folders that may be written, but not read.
_UNSYNCED = (
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
)


class ByteSink(Protocol):
    """A place for bytes."""

    name: str

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after the other from `offset` on. What is skipped is zero."""

    def room(self, offset: int, size: int) -> npt.NDArray[np.uint8] | None:
        """Memory that these bytes live in, to be written directly and then given to `write`; or None."""

    def commit(self) -> None:
        """Make what was written visible."""

    def abort(self) -> None:
        """Leave no trace."""


def exists_already(path: Path) -> DestinationExists:
    """The error for a destination that is there, and may be replaced if that is asked for."""
    return DestinationExists(
        f"`{path}` exists already",
        hint="remove it, choose another destination, or replace it with `--force` (`force=True`)",
        where=str(path),
    )


def refuse_file(given: str | os.PathLike[str], force: bool) -> os.stat_result | None:
    """Refuse a destination for a file, as it was given; returns what is there and may be replaced.

    Raises
    ------
    DestinationExists
        If there is a file or a link, and `force` is false.
    InvalidDestination
        If there is something else, or a link to it, which is never replaced; or if its name ends with `/`.
    """
    path = Path(given)
    if os.fspath(given).endswith("/"):  # which `Path` drops
        raise InvalidDestination(
            f"`{given}` names a folder, and what is written is a file",
            hint="leave out the slash",
            where=str(path),
        )
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unwritable(path, error) from error
    if stat.S_ISDIR(found.st_mode):
        raise InvalidDestination(
            f"`{path}` exists already and is a folder",
            hint="name a file, since `--force` replaces no folder by one",
            where=str(path),
        )
    if (kind := special_kind(path, found.st_mode)) is not None:
        raise InvalidDestination(
            f"`{path}` is {kind}, which is never replaced", hint="name a file", where=str(path)
        )
    if not force:
        raise exists_already(path)
    return found


def unwritable(path: Path, error: OSError) -> InvalidDestination:
    """Say why a destination cannot be written, and what to do."""
    hint = remedy(error, "choose another destination")
    if isinstance(error, PermissionError):
        hint = "change its permissions, or choose another destination"
    elif isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        hint = "create the folder first"
    return InvalidDestination(
        f"`{path}` cannot be written: {error.strerror or error}", hint=hint, where=str(path)
    )


def write_failed(what: str, error: OSError, name: str) -> OSError:
    """Say what of writing a file failed, where all that was written is removed then."""
    return OSError(error.errno, f"{what}: {error.strerror}; nothing was left behind", name)


def require_writable(path: Path) -> None:
    """Refuse a destination whose folder takes no files.

    Raises
    ------
    InvalidDestination
        If it cannot be written.
    """
    folder = path.parent
    if path.is_dir():
        raise unwritable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if not folder.is_dir():
        raise unwritable(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


class FileSink:
    """A file written under a temporary name beside its place, synced, and renamed.

    What killed processes left beside it is removed. What is neither committed nor aborted is removed with the
    object, or when the interpreter ends. A link is replaced, what it names is not.

    Parameters
    ----------
    path : path-like
        Where the file goes.
    force : bool
        Replace a file or link that is there.
    mode : int, optional
        Its permission bits. By default those of the file that it replaces, or of a new file.

    Raises
    ------
    DestinationExists
        If something is there and `force` is false.
    InvalidDestination, InvalidArgument
        If the folder cannot be written, or if what is there is neither a file nor a link, or a link to a
        pipe, a socket or a device.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False, mode: int | None = None) -> None:
        given = given_path(path)
        self.path, self.name = anchored(given), str(given)  # the current folder may change meanwhile
        self._force, self._mode = force, mode
        there = refuse_file(path, force)
        if mode is None and there is not None and stat.S_ISREG(there.st_mode):
            self._mode = stat.S_IMODE(there.st_mode) & 0o777
        clear_files(self.path.parent)
        # Others may not even read what is being written of a file that they may not read.
        bits = 0o666 if self._mode is None else 0o600
        try:
            self._temporary, self._fd = create(
                self.path, lambda it: os.open(it, os.O_RDWR | os.O_CREAT | os.O_EXCL, bits)
            )
        except OSError as error:
            raise unwritable(given, error) from error
        self._unused = weakref.finalize(self, discard, self._temporary, self._fd, os.getpid())

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after the other from `offset` on."""
        views = [view for it in buffers if (view := byte_view(it)).nbytes]
        try:
            while views:
                done = os.pwritev(self._fd, views[:_MAX_BUFFERS], offset)
                if not done:
                    raise OSError(errno.EIO, "the system writes nothing")
                offset += done
                while views and done >= views[0].nbytes:
                    done -= views.pop(0).nbytes
                if done:
                    views[0] = views[0][done:]
        except OSError as error:
            raise write_failed(f"writing failed at byte {offset}", error, self.name) from error

    def room(self, offset: int, size: int) -> None:
        """None: a file's bytes are not in memory."""

    def commit(self) -> None:
        """Sync the file and give it its name.

        Raises
        ------
        DestinationExists, InvalidDestination
            If something has appeared there that may not be replaced.
        OSError
            If the system failed; says where.
        """
        try:
            if self._mode is not None:
                os.fchmod(self._fd, self._mode)
            os.fsync(self._fd)
            lock = os.dup(self._fd)  # which holds the lock until the file has its name
        except OSError as error:
            raise write_failed("completing the file failed", error, self.name) from error
        try:
            self._close()
            refuse_file(self.path, self._force)
            try:
                if self._force:
                    os.replace(self._temporary, self.path)
                else:
                    rename_new(self._temporary, self.path)
            except FileExistsError:
                raise exists_already(self.path) from None
            except OSError as error:
                raise write_failed("giving the file its name failed", error, self.name) from error
        finally:
            with contextlib.suppress(OSError):
                os.close(lock)
        sync_folder(self.path.parent)

    def _close(self) -> None:
        """Close the file, which is closed whether that fails or not."""
        descriptor, self._fd = self._fd, -1
        self._unused.detach()
        try:
            os.close(descriptor)
        except OSError as error:
            raise write_failed("closing the file failed", error, self.name) from error

    def abort(self) -> None:
        """Remove the temporary file."""
        try:
            if self._fd >= 0:
                with contextlib.suppress(OSError):  # what was written is not wanted
                    self._close()
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlast a loss of power, where the file system can.

    Raises
    ------
    OSError
        If it can, and failed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise OSError(
                error.errno, f"making names outlast a loss of power failed: {error.strerror}", str(folder)
            ) from error


class BytesSink:
    """A growing buffer in memory.

    Parameters
    ----------
    capacity : int
        Bytes that are likely to be written. What is not used costs address space only, and growing costs
        a copy.
    buffer : ndarray of uint8, optional
        Memory to start with instead.
    """

    def __init__(self, capacity: int = 1 << 16, buffer: npt.NDArray[np.uint8] | None = None) -> None:
        self.name = "<bytes>"
        self._buffer = np.empty(capacity, np.uint8) if buffer is None else buffer
        self._size = 0

    @property
    def data(self) -> memoryview:
        """The bytes written so far."""
        return self._buffer.data[: self._size]

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after the other from `offset` on."""
        for buffer in buffers:
            piece = np.frombuffer(buffer, np.uint8)
            end = offset + piece.size
            place = self.room(offset, piece.size)
            if place.ctypes.data != piece.ctypes.data:  # else it was written there directly
                place[:] = piece
            offset, self._size = end, max(self._size, end)

    def room(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes' place. What lies between them and those written so far becomes zero."""
        if offset + size > self._buffer.size:
            grown = np.empty(max(offset + size, 2 * self._buffer.size), np.uint8)
            grown[: self._size] = self._buffer[: self._size]
            self._buffer = grown
        self._buffer[self._size : offset] = 0
        return self._buffer[offset : offset + size]

    def commit(self) -> None:
        """Nothing to do: the bytes are there."""

    def abort(self) -> None:
        """Drop the bytes."""
        self._size = 0


class ValueSink:
    """A growing buffer that becomes `bytes` without a copy of them."""

    def __init__(self) -> None:
        self.name = "<bytes>"
        self._buffer = io.BytesIO()

    def value(self) -> bytes:
        """The bytes written. What lies between them is zero."""
        return self._buffer.getvalue()

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers one after the other from `offset` on."""
        self._buffer.seek(offset)
        for buffer in buffers:
            self._buffer.write(byte_view(buffer))

    def room(self, offset: int, size: int) -> None:
        """None: the place would be in the way of growing."""

    def commit(self) -> None:
        """Nothing to do: the bytes are there."""

    def abort(self) -> None:
        """Drop the bytes."""
        self._buffer = io.BytesIO()
