"""Paths that callers give, and what to do when the system takes none."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tpde.errors import InvalidArgument

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def given_path(path: object) -> Path:
    """A path that a caller gave.

    Raises
    ------
    InvalidArgument
        If it is none, or can name nothing, or is a URL, which would name folders of the current one.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise InvalidArgument(
            f"a path is needed, and a {type(path).__name__} is given",
            hint="pass a text or a `pathlib.Path`; for bytes in memory there are `load` and `save`",
            where="path",
            found=path,
        )
    if not text:
        raise _nameless(text, "it is empty")
    try:
        os.lstat(text)
    except ValueError as error:  # of characters that the system's names have not
        raise _nameless(text, error) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _nameless(text, error.strerror) from None
        if is_url(text):
            raise InvalidArgument(
                f"`{text}` is a URL, and a path is needed",
                hint="name a file or a folder of this machine",
                where="path",
                found=text,
            ) from None
    return Path(text)


def is_url(text: object) -> bool:
    """Whether a text is a URL, such as `s3://bucket/run`."""
    return isinstance(text, str) and _URL.match(text) is not None


def _nameless(text: str, why: object) -> InvalidArgument:
    return InvalidArgument(
        f"the path `{text}` can name nothing ({why})",
        hint="name a file or a folder",
        where="path",
        found=text,
    )


def anchored(path: Path) -> Path:
    """The same path, whichever folder becomes the current one; links are not followed."""
    try:
        return path.absolute()
    except OSError:  # the current folder is gone, and nothing can be found there
        return path


def remedy(error: BaseException, otherwise: str) -> str:
    """What to do when a file cannot be opened: where too many are open, another path does not help."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "close some, or raise the limit (`ulimit -n`)"
    return otherwise
