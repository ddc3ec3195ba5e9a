"""The errors that tpde raises, one class for each remedy.

Callers catch a class, never match a text. Every message says what, where, what was found, what is
needed, and what to do.
"""

from __future__ import annotations


def printable(name: object) -> str:
    """A name out of a file as it may be shown or logged: in one line, and steering no terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))


class TpdeError(Exception):
    """Base class of all errors that tpde raises on purpose."""


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

    def __init__(self, message: str, *, tensor: str | None = None, chunk: int | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.chunk = chunk


class UnsupportedVersion(TpdeError):
    """The file was written by a newer tpde: upgrade."""


class UnsupportedDtype(TpdeError):
    """A dtype that this version, or the framework asked for, does not know."""


class ReadError(TpdeError):
    """The disk, or what the file lies on, failed: check it, or read from another."""


class InvalidInput(TpdeError):
    """The source cannot be read as what it should be: choose another source."""


class NotSafetensors(InvalidInput):
    """The source is not a safetensors file."""


class AlreadyPacked(InvalidInput):
    """The source is packed already."""


class NotPacked(InvalidInput):
    """The source is not packed."""


class MissingShard(InvalidInput):
    """A file that an index names is missing."""


class UnsafePickle(InvalidInput):
    """A state dict holds pickled code, which is never run."""


class DestinationExists(TpdeError):
    """The destination exists: remove it, name another, or ask for it to be replaced."""


class InvalidDestination(TpdeError):
    """The destination cannot be used: name another."""


class MissingDependency(TpdeError):
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

    def __init__(self, message: str, *, least: int | None = None, budget: str = "vram") -> None:
        super().__init__(message)
        self.least, self.budget = least, budget


class UnsupportedDevice(TpdeError):
    """Driver or device cannot run the kernels: update the driver, or use another device or the CPU."""


class CompileError(TpdeError):
    """A kernel could not be compiled: report a bug, with the log."""


class NativeError(TpdeError):
    """The native core is missing or refused a call that it should have taken: report a bug."""
