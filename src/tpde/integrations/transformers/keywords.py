"""Keywords that neither `tpde.from_pretrained` nor the model's class knows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from tpde.errors import InvalidArgument

_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_ALIKE = 0.75  # `kernel` and `kernels` are by 0.92, `max_length` and `max_batch` by 0.63


@contextmanager
def suggesting(passed: Collection[str], known: Collection[str]) -> Iterator[None]:
    """Name the keyword that was meant where a class refuses one that it was passed.

    Parameters
    ----------
    passed : collection of str
        What the class was passed.
    known : collection of str
        What may have been meant.

    Raises
    ------
    InvalidArgument
        If the class does not know a keyword, and that is nearly one of `known`.
    """
    try:
        yield
    except TypeError as error:
        refused = _UNKNOWN.search(str(error))
        name = refused[1] if refused else ""
        meant = difflib.get_close_matches(name, known, 1, _ALIKE) if name in passed else []
        if not meant:
            raise
        raise InvalidArgument(
            f"neither `tpde.from_pretrained` nor the model takes `{name}`",
            hint=f"did you mean `{meant[0]}`?",
            where=name,
        ) from error
