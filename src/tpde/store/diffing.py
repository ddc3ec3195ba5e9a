"""diff: what changed between two states of a model, as a file."""

from __future__ import annotations

import os
from contextlib import closing

from tpde.errors import InvalidInput
from tpde.files.destinations import refuse_nested, refuse_sources
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.thread_count import check_threads
from tpde.io.paths import given_path
from tpde.io.sinks import refuse_file
from tpde.memory.garbage import collecting_later
from tpde.store.delta_report import DeltaReport, report_of
from tpde.store.delta_writer import hint_for, write_delta_file
from tpde.store.open_state import open_state, require_unchanged, stands_on
from tpde.store.states import State


def diff(
    base: str | os.PathLike[str],
    target: str | os.PathLike[str],
    delta: str | os.PathLike[str],
    *,
    fast: bool = False,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> DeltaReport:
    """Write what changed between two states of a model.

    Parameters
    ----------
    base, target : path-like
        Safetensors files or model directories, packed or not, or deltas, whose bases are where they were.
    delta : path-like
        The delta. It appears when it is complete, and not before.
    fast : bool
        Code positions without the base's exponents: the delta is larger, and faster to make and to apply.
    threads : int, optional
        By default one for each processor. The delta does not depend on it.
    force : bool
        Replace an existing file.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Returns
    -------
    DeltaReport

    Raises
    ------
    InvalidInput
        If a state cannot be read; its subclasses say why. If both have tensors, and share no name of one. If
        the base's path, relative to the delta's folder, is not UTF-8. If the target has more than a delta can
        hold.
    DestinationExists, InvalidDestination
        If the destination cannot be used.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If a state is damaged, or newer than this version.

    Examples
    --------
    >>> import tpde
    >>> tpde.diff("epoch_9", "epoch_10", "epoch_10.tpde").ratio  # doctest: +SKIP
    143.9
    """
    check_progress(progress)
    count, first, second, out = check_threads(threads), *map(given_path, (base, target, delta))
    refuse_file(delta, force)
    refuse_sources(out, first, second)
    hint = hint_for(first, out)
    # There is an object or more for each tensor, and no garbage.
    with collecting_later(), closing(open_state(first)) as old, closing(open_state(second)) as new:
        for source in (*stands_on(old), *stands_on(new)):
            refuse_nested(source, out)
        _refuse_unlike(old, new)
        _refuse_unrelated(old, new)

        def check() -> None:
            require_unchanged(old)
            require_unchanged(new)

        head = write_delta_file(
            old, new, out, hint=hint, fast=fast, threads=count, force=force, progress=progress, check=check
        )
        return report_of(head, str(out), out.stat().st_size)


def _refuse_unlike(base: State, target: State) -> None:
    """Refuse a file and a directory: neither says where in the other it belongs."""
    alone = [set(it.headers) == {""} for it in (base, target)]
    if alone[0] != alone[1]:
        file, folder = (base, target) if alone[0] else (target, base)
        raise InvalidInput(
            f"`{file.name}` is a file, `{folder.name}` is a directory", hint="compare like with like"
        )


def _refuse_unrelated(base: State, target: State) -> None:
    """Refuse states without a name in common: the delta would hold all of the target, and need no base.

    One without tensors is what it is on purpose.
    """
    old, new = ([name for _, name in it.specs] for it in (base, target))
    if old and new and set(old).isdisjoint(new):
        raise InvalidInput(
            f"`{base.name}` and `{target.name}` share no tensor's name: the one has `{old[0]}`, the other "
            f"`{new[0]}`, of {len(old)} and {len(new)} tensors",
            hint="compare two states of one model; `tpde pack` makes a model small by itself",
            where=target.name,
            found=new[0],
            needed=old[0],
        )
