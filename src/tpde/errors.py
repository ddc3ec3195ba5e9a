"""The errors that tpde raises, one class for each remedy.

Callers catch a class, and never search a text: where it was, what was found, what is needed and what to do
are attributes, wherever an error knows them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


_MOST = 2000  # characters of a message: names in files may have 100 MB


def printable(name: object) -> str:
    """A name out of a file as it may be shown or logged: in one line, and steering no terminal."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bounded(text: str, most: int) -> str:
    """A text of at most so many characters: of a longer one its start and its end."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[len(text) - half :]}"


class TpdeError(Exception):
    """Base class of the errors that tpde raises on purpose. As text, `message; hint`.

    Parameters
    ----------
    message : str
        What is wrong.
    hint : str, optional
        What to do, where there is more to say than the class does.
    where : str, optional
        What it is about: the name of a file, a tensor or an argument.
    found, needed : object, optional
        What is there, and what should be: sizes in bytes, versions, dtypes, shapes.

    Attributes
    ----------
    message, hint, where, found, needed
        The same; None where nothing was said.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        where: str | None = None,
        found: object = None,
        needed: object = None,
    ) -> None:
        # No more in `args`: copies and pickles are made from these, and `__dict__`.
        super().__init__(self._shown(message))
        self.hint, self.where, self.found, self.needed = hint, where, found, needed

    def _shown(self, message: str) -> str:
        """A message, whatever names of strangers are in it: in one line, and of bounded length."""
        return bounded(printable(bounded(message, _MOST)), _MOST)

    @property
    def message(self) -> str:
        """What is wrong, without the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"

    def prefixed(self, prefix: str, *, where: str | None = None) -> Self:
        """A new error: the same, with `prefix: ` before its message, and `where` if it had none."""
        made = copy.copy(self)
        made.args = (self._shown(f"{prefix}: {self.message}"),)
        made.where = self.where or where
        return made

    def of_tensor(self, name: str) -> Self:
        """A new error: the same, with the tensor's name before its message."""
        return self.prefixed(f"tensor `{name}`", where=name)


class Truncated(TpdeError):
    """The bytes end too early: fetch the rest."""


class Corrupt(TpdeError):
    """The bytes are damaged: fetch the file again.

    Attributes
    ----------
    tensor : str or None
        Name of the damaged tensor, where one is known.
    chunk : int or None
        Number of the damaged chunk (docs/format.md 4.1), where one is known.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        chunk: int | None = None,
        hint: str | None = None,
        where: str | None = None,
        found: object = None,
        needed: object = None,
    ) -> None:
        super().__init__(message, hint=hint, where=where, found=found, needed=needed)
        self.tensor, self.chunk = tensor, chunk

    def of_tensor(self, name: str) -> Self:
        """A new error: the same, with the tensor's name and the chunk's number before its message."""
        chunk = "" if self.chunk is None else f", chunk {self.chunk}"
        made = self.prefixed(f"tensor `{name}`{chunk}")
        made.tensor = name
        return made


class UnsupportedVersion(TpdeError):
    """The file was written by a newer tpde: upgrade."""


class UnsupportedDtype(TpdeError):
    """A dtype that this version, or the framework asked for, does not know."""


class ReadError(TpdeError):
    """The disk, or what the file lies on, failed: check it, or read from another."""


class InvalidInput(TpdeError):
    """The source cannot be read as what it should be: choose another source."""


class InvalidArgument(InvalidInput, ValueError):
    """A value that was passed is none that can be taken: pass another."""


class InvalidIndex(InvalidInput, IndexError):
    """A tensor has no such elements: index within its shape."""


class UnknownTensor(InvalidInput, KeyError):
    """There is no tensor of that name: see which there are."""


class NotSafetensors(InvalidInput):
    """The source is not a safetensors file."""


class NotJson(InvalidInput):
    """A file that should be JSON holds none, or too much of it: mend it, or fetch it again."""


class AlreadyPacked(InvalidInput):
    """The source is packed already."""


class NotPacked(InvalidInput):
    """The source is not packed."""


class MissingShard(InvalidInput):
    """A weight file that an index names, or that a model needs, is missing."""


class MissingBase(InvalidInput):
    """The base of a delta is not there, or is another one: supply the right one."""


class UnsafePickle(InvalidInput):
    """A state dict holds pickled code, which is never run."""


class DestinationExists(TpdeError):
    """The destination exists: remove it, name another, or ask for it to be replaced."""


class InvalidDestination(TpdeError):
    """The destination cannot be used: name another."""


class MissingDependency(TpdeError, ImportError):
    """An optional package is needed: install it."""


class PackedWeight(TpdeError):
    """A packed weight cannot be changed in place or cast: unpack the module first."""


class OutOfMemory(TpdeError):
    """A device or the host has too little free memory: free some, or use another device.

    Attributes
    ----------
    least : int or None
        Bytes of a budget that would do, where one was too small.
    budget : {"vram", "ram"}
        Which one that is.
    """

    def __init__(
        self,
        message: str,
        *,
        least: int | None = None,
        budget: str = "vram",
        hint: str | None = None,
        where: str | None = None,
        found: object = None,
        needed: object = None,
    ) -> None:
        super().__init__(message, hint=hint, where=where, found=found, needed=needed)
        self.least, self.budget = least, budget


class UnsupportedDevice(TpdeError):
    """Driver or device cannot run the kernels: update the driver, or use another device or the CPU."""


class CompileError(TpdeError):
    """A kernel could not be compiled: report a bug, with the log."""

    def _shown(self, message: str) -> str:
        """All of it: the log has many lines, and nothing from files."""
        return message


class NativeError(TpdeError):
    """The native core is missing or refused a call that it should have taken: report a bug."""
