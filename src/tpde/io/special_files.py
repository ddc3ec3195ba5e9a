"""Files that are not regular, and links to such: what a process writes to, not what it replaces."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_MOST_LINKS = 40  # in a row: systems follow no more


def kind_of(mode: int) -> str:
    """What a mode says something is, with its article."""
    kinds = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")


def special_kind(path: Path, mode: int) -> str | None:
    """What something is that is never replaced; None of a file, a folder, or a link to such or to nothing.

    Links by which a process names what it has open, such as `/dev/stdout`, are special wherever they lead
    to: now to a terminal, then to a file.
    """
    if not stat.S_ISLNK(mode):
        return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else kind_of(mode)
    try:
        to = os.stat(path).st_mode
    except OSError:  # to nothing, or nothing that can be seen
        to = stat.S_IFREG
    if not (stat.S_ISREG(to) or stat.S_ISDIR(to)):
        return f"a link to {kind_of(to)}"
    return "a link in `/dev` or `/proc`, or to there" if _of_the_system(path) else None


def _of_the_system(link: Path) -> bool:
    """Whether a link, or one that it leads to, lies in `/proc`, or in `/dev` beside the devices.

    What lies in folders of `/dev` may be anybody's, as in `/dev/shm`; links to devices are told by these.
    """
    for _ in range(_MOST_LINKS):
        folder = Path(os.path.realpath(link.parent))
        if folder == Path("/dev") or folder.is_relative_to("/proc"):
            return True
        try:
            link = folder / os.readlink(folder / link.name)
        except OSError:  # the end
            return False
    return False
