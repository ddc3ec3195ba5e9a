"""Reading bytes at an offset, from a file or from memory.

Files are read with `pread`, never mapped: a mapping of a file that shrinks kills the process.
"""

from __future__ import annotations

import os
import stat
from typing import BinaryIO, NamedTuple, NoReturn, Protocol

import numpy as np

from tpde.errors import InvalidInput, Truncated
from tpde.io.buffers import Buffer, byte_view
from tpde.io.paths import remedy

_LARGE = 1 << 20  # bytes whose copy takes longer than NumPy takes to begin


class ByteSource(Protocol):
    """Bytes with a name and a size."""

    name: str
    size: int

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raises `Truncated` if the bytes end before."""

    def view(self, offset: int, size: int) -> memoryview | None:
        """Bytes that are in memory already, or None."""

    def close(self) -> None:
        """Release what is held. Reading afterwards is an error."""


class Extent(NamedTuple):
    """Bytes of a file.

    Attributes
    ----------
    source : ByteSource
        The file.
    offset, size : int
        Where in it.
    name : str
        What errors call them.
    """

    source: ByteSource
    offset: int
    size: int
    name: str


def _truncated(name: str, offset: int, want: int, size: int) -> Truncated:
    return Truncated(
        f"`{name}` ends at byte {size}, but bytes {offset} to {offset + want} are needed",
        hint="the file is incomplete, fetch the rest",
        where=name,
        found=size,
        needed=offset + want,
    )


def _closed(name: str) -> InvalidInput:
    return InvalidInput(f"`{name}` is closed", hint="open it again, or read before it is closed", where=name)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading, and nothing that could be waited for or has no end; its descriptor.

    Raises
    ------
    InvalidInput
        If it does not exist, is not a regular file or may not be read.
    """
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise InvalidInput(f"`{name}` does not exist", hint="check the path", where=name) from None
    except PermissionError:
        raise InvalidInput(
            f"`{name}` may not be read by this user", hint="change its permissions", where=name
        ) from None
    except (ValueError, OSError) as error:  # what can be no file's name
        what = getattr(error, "strerror", None) or error  # without the name, which it has, too
        hint = remedy(error, "check the path")
        raise InvalidInput(f"`{name}` cannot be opened ({what})", hint=hint, where=name) from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise InvalidInput(
                f"`{name}` is a directory, not a regular file",
                hint="name a file, such as one in it",
                where=name,
            )
        raise InvalidInput(
            f"`{name}` is not a regular file",
            hint="name one: a pipe would be waited for, and a device may never end",
            where=name,
        )
    return descriptor


class FileSource:
    """A regular file, closed at the latest when nobody has it any longer.

    Parameters
    ----------
    path : path-like
        The file.

    Raises
    ------
    InvalidInput
        If it does not exist, is not a regular file or may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name, self._fd = os.fspath(path), -1
        self._fd = open_regular(path)
        self.size = os.fstat(self._fd).st_size

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on."""
        if self._fd < 0:
            raise _closed(self.name)
        done, want = 0, out.nbytes
        while done < want:
            got = os.preadv(self._fd, [out[done:]], offset + done)
            if not got:
                raise _truncated(self.name, offset, want, os.fstat(self._fd).st_size)
            done += got

    def view(self, offset: int, size: int) -> memoryview | None:
        """None: a file's bytes must be read."""
        return None

    def stream(self) -> BinaryIO:
        """The file as Python's own, from its start. Closing that leaves this one open."""
        stream = os.fdopen(os.dup(self._fd), "rb")
        stream.seek(0)
        return stream

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            f"`{self.name}` is open, and its descriptor means another file in another process",
            hint="pass the path, and open it there",
            where=self.name,
        )

    # When the interpreter ends, what modules hold may be gone before the last file.
    _close = staticmethod(os.close)

    def __del__(self) -> None:
        self.close()

    def fileno(self) -> int:
        """The open file's descriptor: of the same file, whatever has its name by now."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        descriptor, self._fd = getattr(self, "_fd", -1), -1
        if descriptor >= 0:
            self._close(descriptor)


class BytesSource:
    """A buffer in memory.

    Parameters
    ----------
    data : bytes-like
        The bytes; not copied.
    name : str
        What messages call it.
    """

    def __init__(self, data: Buffer, name: str = "<bytes>") -> None:
        self._data = byte_view(data)
        self.name = name
        self.size = self._data.nbytes

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on."""
        if offset + out.nbytes > self.size:
            raise _truncated(self.name, offset, out.nbytes, self.size)
        data = self._part(offset, out.nbytes)
        if out.nbytes < _LARGE:
            out[:] = data
        else:  # other threads run meanwhile
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))

    def view(self, offset: int, size: int) -> memoryview | None:
        """The bytes themselves."""
        if offset + size > self.size:
            raise _truncated(self.name, offset, size, self.size)
        return self._part(offset, size)

    def _part(self, offset: int, size: int) -> memoryview:
        try:
            return self._data[offset : offset + size]
        except ValueError:  # it was released
            raise _closed(self.name) from None

    def close(self) -> None:
        """Let go of the buffer."""
        self._data.release()


def read(source: ByteSource, offset: int, size: int) -> bytes:
    """Read `size` bytes, refusing before allocating if the source has fewer.

    Raises
    ------
    Truncated
        If the source ends before.
    """
    if offset + size > source.size:
        raise _truncated(source.name, offset, size, source.size)
    out = bytearray(size)
    source.read_into(offset, memoryview(out))
    return bytes(out)
