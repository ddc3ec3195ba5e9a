"""patch: the target of a delta, restored from its base."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from tpde.files.copying import write_file
from tpde.files.destinations import refuse_inside_packed, refuse_nested, refuse_sources, replaceable
from tpde.files.folder_swap import new_folder
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.thread_count import check_threads
from tpde.io.paths import given_path
from tpde.io.sinks import refuse_file
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile, existing_delta
from tpde.store.open_state import open_on, stands_on
from tpde.store.states import State
from tpde.store.written_weights import write_weights


def patch(
    base: str | os.PathLike[str],
    delta: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Restore a delta's target from its base, byte for byte.

    Every tensor's fingerprint is checked before it is changed and afterwards.

    Parameters
    ----------
    base : path-like
        The base, wherever it is now: what `diff` took, or what has the same tensors, packed or not.
    delta : path-like
        The delta.
    target : path-like
        Where the target's files go. They appear when they are complete, and not before.
    threads : int, optional
        By default one for each processor.
    force : bool
        Replace an existing destination; a folder only if it holds nothing but files of the model.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Raises
    ------
    MissingBase
        If the base is not the one that the delta was made from, naming the tensor.
    InvalidInput
        If a state cannot be read.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If the delta or the base is damaged, or newer than this version.
    DestinationExists, InvalidDestination
        If the destination cannot be used.

    Examples
    --------
    >>> import tpde
    >>> tpde.patch("epoch_9", "epoch_10.tpde", "epoch_10")  # doctest: +SKIP
    """
    check_progress(progress)
    count, old, change, out = check_threads(threads), *map(given_path, (base, delta, target))
    refuse_sources(out, old, change)
    state = open_on(DeltaFile(FileSource(existing_delta(change))), old)
    try:
        refuse_sources(out, *stands_on(state))
        if "" in state.headers:
            refuse_inside_packed(out)
            refuse_file(target, force)
            _write_file(state, "", out, force, count, progress)
            return
        for source in stands_on(state):
            refuse_nested(source, out)
        names = {*state.headers, *state.others}
        names |= {str(it) for name in names for it in PurePosixPath(name).parents if it.parts}
        with new_folder(out, replaceable(out, names), force=force) as folder:
            for name in state.headers:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _write_file(state, name, folder / name, False, count, progress)
            for name, content in state.others.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(folder / name, content())
    finally:
        state.close()


def _write_file(
    state: State, name: str, destination: Path, force: bool, threads: int, progress: Progress
) -> None:
    """Restore one safetensors file."""
    write_weights(
        destination,
        state.headers[name],
        lambda tensor: state.read((name, tensor), threads),
        f"`{state.name}`",
        force=force,
        progress=progress,
    )
