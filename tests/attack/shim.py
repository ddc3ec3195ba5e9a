"""The shim before the C library's calls on files: built with the system's compiler, loaded by LD_PRELOAD."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
COUNT, FAIL, SHORT, BEFORE, AFTER = range(5)  # of shim.c
VARIABLE = "TPDE_ATTACK_SHIM"  # where it lies, for the process that has it


def missing() -> str | None:
    """Why there can be no shim here, or None."""
    if sys.platform != "linux":
        return "the shim knows the calls of Linux"
    if shutil.which("cc") is None:
        return "there is no C compiler to build the shim"
    return None


def build(folder: Path) -> Path:
    """Compile it into a folder."""
    library = folder / "attack_shim.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    subprocess.run(["cc", *flags, HERE / "shim.c", "-o", library, "-ldl", "-lpthread"], check=True)
    return library


@dataclass(frozen=True)
class Arming:
    """What happens at which call.

    Attributes
    ----------
    action : int
        `COUNT` nothing, `FAIL` it, make it `SHORT`, a signal `BEFORE` or `AFTER` it.
    number : int
        Which call, from 1.
    value : int
        The errno, or the signal.
    lasting : bool
        It happens to all later calls of that function, too.
    changes : bool
        Only calls that change something count.
    flags : bool
        Whether there is `renameat2`.
    """

    action: int = COUNT
    number: int = 0
    value: int = 0
    lasting: bool = False
    changes: bool = False
    flags: bool = True

    def values(self) -> dict[str, int]:
        """For the process that has the shim."""
        return asdict(self)


def arm(folder: Path, arming: Arming, log: Path | None) -> ctypes.CDLL:
    """Let calls on a folder count in this process, which has the shim; log them if a file is given."""
    library = ctypes.CDLL(os.environ[VARIABLE])
    descriptors = -1, -1
    if log is not None:
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptors = os.open(log, how, 0o600), os.open(f"{log}.data", how, 0o600)
    library.attack_arm(
        os.fsencode(folder),
        arming.action,
        ctypes.c_long(arming.number),
        arming.value,
        int(arming.lasting),
        int(arming.changes),
        int(arming.flags),
        *descriptors,
    )
    return library
