"""Writing bytes at an offset, to a file that appears whole or not at all, or to memory."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tpde.errors import DestinationExists, InvalidDestination

_MAX_BUFFERS = 512  # of one pwritev; systems allow 1024


class Sink(Protocol):
    """A place for bytes."""

    name: str

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Write buffers one after the other from `offset` on. What is skipped is zero."""

    def room(self, offset: int, size: int) -> Any:
        """Memory that these bytes live in, to be written directly and then given to `write`; or None."""

    def commit(self) -> None:
        """Make what was written visible."""

    def abort(self) -> None:
        """Leave no trace."""


def refuse_existing(path: Path, force: bool) -> None:
    """Raise `DestinationExists` if there is something at `path` and `force` does not allow it."""
    if os.path.lexists(path) and not force:
        raise DestinationExists(
            f"`{path}` exists already",
            hint="remove it, choose another destination, or replace it with `--force` (`force=True`)",
            where=str(path),
        )


def unwritable(path: Path, error: OSError) -> InvalidDestination:
    """Say why a destination cannot be written, and what to do."""
    hint = "choose another destination"
    if isinstance(error, PermissionError):
        hint = "change its permissions, or choose another destination"
    elif isinstance(error, FileNotFoundError):
        hint = "create the folder first"
    return InvalidDestination(
        f"`{path}` cannot be written: {error.strerror or error}", hint=hint, where=str(path)
    )


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

    Parameters
    ----------
    path : path-like
        Where the file goes.
    force : bool
        Replace what is there.

    Raises
    ------
    DestinationExists
        If something is there and `force` is false.
    InvalidDestination
        If the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        self.path = Path(path)
        self.name = str(self.path)
        refuse_existing(self.path, force)
        if self.path.is_dir():
            raise InvalidDestination(f"`{self.path}` is a folder", hint="name a file", where=self.name)
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        self._force = force
        try:
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Write buffers one after the other from `offset` on."""
        views = [view for b in buffers if (view := memoryview(b).cast("B")).nbytes]
        try:
            while views:
                done = os.pwritev(self._fd, views[:_MAX_BUFFERS], offset)
                offset += done
                while views and done >= views[0].nbytes:
                    done -= views.pop(0).nbytes
                if done:
                    views[0] = views[0][done:]
        except OSError as error:
            raise OSError(
                error.errno,
                f"writing failed at byte {offset}: {error.strerror}; nothing was left behind",
                self.name,
            ) from error

    def room(self, offset: int, size: int) -> None:
        """None: a file's bytes are not in memory."""

    def commit(self) -> None:
        """Sync the file and give it its name."""
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        refuse_existing(self.path, self._force)
        os.replace(self._temporary, self.path)
        with contextlib.suppress(OSError):  # not every file system syncs folders
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abort(self) -> None:
        """Remove the temporary file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)


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

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Write buffers one after the other from `offset` on."""
        for buffer in buffers:
            piece = np.frombuffer(buffer, np.uint8)
            end = offset + piece.size
            place = self.room(offset, piece.size)
            if place.ctypes.data != piece.ctypes.data:  # else it was written there directly
                place[:] = piece
            offset, self._size = end, max(self._size, end)

    def room(self, offset: int, size: int) -> Any:
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
