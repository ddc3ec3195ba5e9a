"""One writer at a time in a folder: a lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tpde.errors import InvalidInput
from tpde.io.sinks import unwritable
from tpde.memory.forks import renew_in_forks

NAME = "writer.lock"


class WriterLock:
    """The right to write in a folder, until `release`, or until the process ends.

    A file is locked (`flock`), which another process, and another object in this one, cannot. Processes that
    are forked do not have the lock, nor do they keep it.

    Parameters
    ----------
    folder : Path
        The folder, which exists.

    Raises
    ------
    InvalidInput
        If somebody has it.
    InvalidDestination
        If the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._owner, self._descriptor = os.getpid(), -1
        self._path = path = folder / NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if not isinstance(error, BlockingIOError):
                raise unwritable(path, error) from error
            raise InvalidInput(
                f"`{folder}` is being written by another process, or by another store of this one",
                hint="close that one first; any number may read",
                where=str(folder),
            ) from None
        renew_in_forks(self)

    @property
    def held(self) -> bool:
        """Whether this process has it."""
        return self._descriptor >= 0 and self._owner == os.getpid()

    def require_there(self) -> None:
        """Make sure that what is locked is still in its folder.

        Raises
        ------
        InvalidInput
            If it is not: then others may write there, and what was known of the folder is of another one.
        InvalidDestination
            If the folder cannot be looked at.
        """
        try:
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                return
        except FileNotFoundError:
            pass
        except OSError as error:
            raise unwritable(self._path, error) from error
        raise InvalidInput(
            f"`{self._path.parent}` was removed or replaced while this store wrote there: its `{NAME}` is "
            "gone, or another one",
            hint="close this store, and open one of the folder that is to be written",
            where=str(self._path.parent),
        )

    # When the interpreter ends, what modules hold is gone before the last lock.
    _close = staticmethod(os.close)

    def release(self) -> None:
        """Let others write. The file stays: whoever removed it might remove one that is locked."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:  # noqa: SIM105
                self._close(descriptor)
            except OSError:
                pass

    def renew(self) -> None:
        """Close what a fork inherited, so that the lock ends with the process that took it."""
        self.release()

    def __del__(self) -> None:
        self.release()
