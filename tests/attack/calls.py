"""System calls that fail one by one: what was there is there then, or what should be, and no litter."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from .field import Field, Finding
from .operations import OPERATIONS
from .shim import FAIL, SHORT, Arming

_ERRORS = {
    "open": ("EACCES", "EIO", "EMFILE", "EINTR"),
    "opendir": ("EACCES", "EMFILE"),
    "readdir": ("EIO",),
    "close": ("EIO", "EINTR"),
    "dup": ("EMFILE",),
    "write": ("ENOSPC", "EIO", "EINTR", "SHORT"),
    "pwrite": ("ENOSPC", "EIO", "EINTR", "SHORT"),
    "read": ("EIO", "EINTR", "SHORT"),
    "pread": ("EIO", "EINTR", "SHORT"),
    "fsync": ("EIO", "ENOSPC", "EINTR"),
    "flock": ("ENOLCK", "EINTR"),
    "renameat2": ("EIO", "EACCES", "ENOSPC", "EINVAL"),
    "link": ("EIO", "EPERM", "EMLINK"),
}
_USUAL = ("EIO", "EACCES", "ENOSPC")  # of all others
_REMOVAL = {"unlink", "rmdir", "opendir", "readdir", "chmod", "open", "stat", "fstat", "dup"}
LASTING = "+"  # behind an error: all later calls of that function fail, too


def cases(field: Field) -> Iterator[str]:
    """Every call of every operation, with every error."""
    for name in OPERATIONS:
        for number, call in enumerate(field.known(name).calls, 1):
            for error in _ERRORS.get(call, _USUAL):
                yield f"{name}:{number}:{error}"
                if error not in ("EINTR", "SHORT"):
                    yield f"{name}:{number}:{error}{LASTING}"


def attack(field: Field, case: str) -> list[Finding]:
    """Try a case."""
    name, number, error = case.split(":")
    lasting, error = error.endswith(LASTING), error.removesuffix(LASTING)
    action, value = (SHORT, 0) if error == "SHORT" else (FAIL, getattr(errno, error))
    calls = field.known(name).calls
    call = calls[int(number) - 1] if int(number) <= len(calls) else "none"
    field.prepare(name)
    arming = Arming(action, int(number), value, lasting=lasting, flags=OPERATIONS[name].flags)
    outcome = field.run(name, arming)
    # Who cannot look at, open or remove what is temporary must leave it: the next run can.
    may_leave = call in _REMOVAL
    found = field.problems(name, outcome, failing=error, lasting=lasting, may_leave=may_leave)
    return [Finding(case, f"{call}: {it}") for it in found]
