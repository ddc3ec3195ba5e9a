"""Whether a link to a step is still anywhere: its second name, in the store (checkpoint-store.md 5)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from tpde.errors import InvalidInput
from tpde.store.step_links import StepLink, is_link, read_link

_NAME = re.compile(r"link-(\d+)\.json")


class LinkRecord(NamedTuple):
    """A link's second name.

    Attributes
    ----------
    path : Path
        The name.
    link : StepLink
        What the link says.
    gone : bool
        Whether the file has no other name: whoever moves it, or a folder that it is in, leaves it one.
    """

    path: Path
    link: StepLink
    gone: bool


def record_link(store: Path, link: Path) -> bool:
    """Give a link a second name; returns whether it has one, and the disk counts names."""
    try:
        record = store / f"link-{os.lstat(link).st_ino}.json"
        os.link(link, record)
    except OSError:  # another disk, or one where files have one name
        return False
    with contextlib.suppress(OSError):
        if os.lstat(record).st_nlink > 1:
            return True
        record.unlink()
    return False


def records_in(store: Path) -> list[LinkRecord]:
    """The records of a store. One that is damaged, as its link is then, says nothing.

    Of a record that was copied with its store the number in its name is not its inode, and nobody knows where
    the links are that were copied with it: it is not gone.
    """
    found = []
    for path in store.glob("link-*.json"):
        with contextlib.suppress(InvalidInput, OSError):
            name, info = _NAME.fullmatch(path.name), os.lstat(path)
            if name is not None and stat.S_ISREG(info.st_mode) and is_link(path):
                gone = info.st_nlink == 1 and info.st_ino == int(name[1])
                found.append(LinkRecord(path, read_link(path), gone))
    return found
