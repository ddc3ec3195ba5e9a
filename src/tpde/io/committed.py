"""A sink that is committed or aborted, whichever way its block is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from tpde.io.sinks import ByteSink

_S = TypeVar("_S", bound=ByteSink)


@contextlib.contextmanager
def committed(sink: _S) -> Iterator[_S]:
    """Commit a sink when the block ends; leave no trace where it, or that, fails.

    Examples
    --------
    >>> from tpde.io.sinks import FileSink
    >>> path = getfixture("tmp_path") / "it"
    >>> with committed(FileSink(path)) as sink:
    ...     sink.write(0, [b"all of it"])
    >>> path.read_bytes()
    b'all of it'
    """
    try:
        yield sink
        sink.commit()
    except BaseException:
        sink.abort()
        raise
