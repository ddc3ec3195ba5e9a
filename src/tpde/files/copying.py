"""Files copied or written beside packed ones, with their permissions and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tpde.codec.blob import PIECE_BYTES
from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, MissingShard
from tpde.format.container import Container
from tpde.io.sinks import write_failed
from tpde.io.sources import FileSource

_READABLE = 0o400  # whoever could read the source's file may read their own


def mode_of(path: Path) -> int:
    """The permission bits that what is made of a file gets."""
    return stat.S_IMODE(path.stat().st_mode) & 0o777 | _READABLE


def sha256(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal digits."""
    return _each_piece(path, lambda _: None)


def stands_for_link(path: Path, target: str) -> bool:
    """Whether a path is a link that says this, or a copy of what it leads to: some stores have no links."""
    if path.is_symlink():
        return os.readlink(path) == target
    other = path.parent / target
    if not path.is_file():
        return path.is_dir() and other.is_dir()
    return other.is_file() and sha256(path) == sha256(other)


def copy_file(source: Path, target: Path) -> str:
    """Copy a regular file and its permissions to a new one; returns the SHA-256 of what was copied."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        digits = _each_piece(source, lambda piece: _write(file.fileno(), piece, target))
        os.fchmod(descriptor, mode_of(source))
    return digits


def _each_piece(path: Path, take: Callable[[memoryview], None]) -> str:
    source, hasher, at = FileSource(path), hashlib.sha256(), 0
    try:
        buffer = memoryview(bytearray(min(max(source.size, 1), PIECE_BYTES)))
        while at < source.size:
            piece = buffer[: min(PIECE_BYTES, source.size - at)]
            source.read_into(at, piece)
            hasher.update(piece)
            take(piece)
            at += piece.nbytes
    finally:
        source.close()
    return hasher.hexdigest()


def _write(descriptor: int, piece: memoryview, path: Path) -> None:
    try:
        while piece.nbytes:
            piece = piece[os.write(descriptor, piece) :]
    except OSError as error:
        at = os.fstat(descriptor).st_size
        raise write_failed(f"writing failed at byte {at}", error, str(path)) from error


def write_file(target: Path, data: bytes, mode: int | None = None) -> None:
    """Write a new file with these permissions, by default with those of any new one."""
    bits = 0o666 if mode is None else 0o600
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, bits)
    try:
        _write(descriptor, memoryview(data), target)
        if mode is not None:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def write_text(target: Path, text: str, mode: int) -> str:
    """Write a new file with these permissions; returns the SHA-256 of its bytes."""
    data = text.encode("utf-8")
    write_file(target, data, mode)
    return hashlib.sha256(data).hexdigest()


def sha256_of_tensors(container: Container, read: Callable[[str, int, int, Bytes], None]) -> str:
    """SHA-256 of a safetensors file, given its header and a way to read its tensors' bytes.

    Parameters
    ----------
    container : Container
        The header.
    read : callable
        Reads a tensor's bytes, from one offset to another, into a buffer.
    """
    header, buffer = container.header, np.empty(PIECE_BYTES, np.uint8)
    hasher = hashlib.sha256(len(header).to_bytes(8, "little") + header)
    for name, entry in container.entries.items():
        size = entry.spec.nbytes
        for begin in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - begin)]
            read(name, begin, begin + piece.size, piece)
            hasher.update(piece.data)
    return hasher.hexdigest()


def finish_folders(root: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Give a folder and those below it the permissions of others; their owner may always change them."""
    for name in ("", *names):
        if (root / name).is_dir():
            os.chmod(folder / name, stat.S_IMODE((root / name).stat().st_mode) & 0o777 | 0o700)


class Unchanged:
    """Finds out whether a file was changed while it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = self._look()

    def _look(self) -> tuple[int, int, int]:
        try:
            info = os.stat(self.path)
        except FileNotFoundError:
            raise MissingShard(
                f"`{self.path}` was removed while its folder was packed",
                hint="put it back, and pack again when nothing writes there",
                where=str(self.path),
            ) from None
        return info.st_ino, info.st_size, info.st_mtime_ns

    def require(self) -> None:
        """Make sure of it.

        Raises
        ------
        InvalidInput
            If it was, or is gone.
        """
        if self._look() != self._before:
            raise InvalidInput(
                f"`{self.path}` changed while it was read",
                hint="try again when nothing writes to it",
                where=str(self.path),
            )

    def require_in_place(self) -> None:
        """Make sure of it, unless it was removed or replaced: what is open stays as it was then.

        Raises
        ------
        InvalidInput
            If it was.
        """
        with contextlib.suppress(MissingShard):
            if self._look()[0] == self._before[0]:
                self.require()
