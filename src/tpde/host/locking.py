"""Whether host memory is page-locked, and where: what a user or the environment asks for."""

from __future__ import annotations

import os
import warnings

from tpde.errors import InvalidInput, UnsupportedDevice
from tpde.host.page_lock import Refused

MODES = ("mapped", "arena", "pageable")
VARIABLE = "TPDE_HOST_MEMORY"


def forced_mode(mode: str | None = None) -> str | None:
    """The mode that was asked for, by the caller or by the environment; None to find out.

    Raises
    ------
    InvalidInput
        If there is no such mode.
    """
    wanted = mode or os.environ.get(VARIABLE) or None
    if wanted is not None and wanted not in MODES:
        raise InvalidInput(
            f"host memory of mode `{wanted}` is unknown",
            hint=f"`{VARIABLE}` takes {', '.join(MODES)}",
            where=VARIABLE,
            found=wanted,
            needed=tuple(MODES),
        )
    return wanted


def not_locked(error: Refused, size: int, forced: str | None, what: str) -> None:
    """Say that memory is not page-locked.

    Raises
    ------
    UnsupportedDevice
        If it was forced to be.
    """
    if forced is not None:
        raise UnsupportedDevice(
            f"{what} ({size} bytes) cannot be page-locked: {error}",
            hint=f"raise the limit of locked memory (`ulimit -l`), or unset `{VARIABLE}`",
        ) from error
    warnings.warn(
        f"{what} ({size} bytes) cannot be page-locked ({error}) and stays pageable: copies to the "
        "GPU take several times as long; raise the limit of locked memory (`ulimit -l`)",
        RuntimeWarning,
        stacklevel=4,
    )
