"""The system's renames with flags: missing, refused, or watched."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

NAME = "renameat2" if sys.platform == "linux" else "renamex_np"
_SWAP = 2  # of both
Call = Callable[..., int]


def libraries(call: Call | None) -> Callable[..., Any]:
    """Give what loads libraries, where the C library of this process renames by a function, or cannot."""
    real, mine = ctypes.CDLL, SimpleNamespace() if call is None else SimpleNamespace(**{NAME: call})

    def load(name: Any, *args: Any, **options: Any) -> Any:
        return mine if name is None else real(name, *args, **options)

    return load


def failing(code: int) -> Call:
    """A call that fails for a reason."""

    def call(*_: Any) -> int:
        ctypes.set_errno(code)
        return -1

    return call


def present() -> Call:
    """What renames at present; where that is missing, a call that the system does not have."""
    real: Call = getattr(ctypes.CDLL(None, use_errno=True), NAME, failing(errno.ENOSYS))
    return real


def missing(patch: pytest.MonkeyPatch) -> None:
    """A system that is older than the call."""
    patch.setattr(ctypes, "CDLL", libraries(None))


def refused(patch: pytest.MonkeyPatch, code: int) -> None:
    """A system, or a file system, whose call fails for a reason."""
    patch.setattr(ctypes, "CDLL", libraries(failing(code)))


def watched(patch: pytest.MonkeyPatch, before: Callable[[Path, Path, bool], None]) -> None:
    """Have a function called before each rename, with the two paths and whether they are to swap."""
    real = present()

    def call(*given: Any) -> int:
        old, new = (Path(os.fsdecode(it)) for it in given if isinstance(it, bytes))
        before(old, new, given[-1] == _SWAP)
        return real(*given)

    patch.setattr(ctypes, "CDLL", libraries(call))
