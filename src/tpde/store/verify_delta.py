"""The check of a delta file, alone or with its base."""

from __future__ import annotations

import os
from collections.abc import Callable

from tpde.errors import Corrupt, MissingBase, TpdeError
from tpde.files.problem import Problem
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.thread_count import check_threads
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile, existing_delta
from tpde.store.open_state import open_on


def verify_delta(
    delta: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> list[Problem]:
    """Check every byte of a delta, and with its base that the target comes out of it.

    Parameters
    ----------
    delta : path-like
        The delta.
    base : path-like, optional
        Its base. Without, every byte of the delta is checked by its hashes, and no tensor is made.
    threads : int, optional
        By default one for each processor.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Returns
    -------
    list of Problem
        What is wrong, by tensor; empty if nothing is.

    Raises
    ------
    InvalidInput
        If it is no delta, or the base is no state.
    Truncated, UnsupportedVersion
        If it is incomplete, or newer than this version.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If the base cannot be opened. A tensor of it that is damaged is a problem.
    """
    check_progress(progress)
    path, count = existing_delta(delta), check_threads(threads)
    problems: list[Problem] = []

    def attempt(tensor: str | None, check: Callable[[], object]) -> None:
        try:
            check()
        except TpdeError as error:
            chunk = error.chunk if isinstance(error, Corrupt) else None
            # The hint would be the same for every tensor of another base: to name the right one.
            said = error.message if isinstance(error, MissingBase) else str(error)
            problems.append(Problem(str(path), tensor, chunk, said))

    try:
        file = DeltaFile(FileSource(path))
    except Corrupt as error:
        return [Problem(str(path), error.tensor, None, str(error))]
    try:
        for it in file.head.tensors:
            attempt(it.name, lambda it=it: file.payload(it))  # type: ignore[misc]
            progress(0 if base is not None else it.spec.nbytes)
        for other in file.head.others:
            if other.size:
                attempt(None, lambda other=other: file.other(other))  # type: ignore[misc]
    finally:
        file.close()
    if base is None or problems:
        return problems
    state = open_on(DeltaFile(FileSource(path)), base)
    try:
        for key, spec in state.specs.items():
            attempt(key[1], lambda key=key: state.read(key, count))  # type: ignore[misc]
            progress(spec.nbytes)
        for content in state.others.values():
            attempt(None, content)
    finally:
        state.close()
    return problems
