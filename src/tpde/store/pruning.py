"""Removing steps of a checkpoint store, so that none is left without what it stands on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tpde.errors import TpdeError
from tpde.io.sinks import sync_folder
from tpde.store.chain import name_of, open_step

log = logging.getLogger("tpde")


def needed(folder: Path, steps: Iterable[int]) -> set[int]:
    """These steps, and all that they stand on."""
    found = set[int]()
    for step in steps:
        at: int | None = step
        while at is not None and at not in found:
            found.add(at)
            at = base_of(folder, at)
    return found


def rewritten(
    folder: Path, stays: Iterable[int], gone: Collection[int]
) -> tuple[dict[int, int | None], set[int]]:
    """The new bases of the steps that stay and stand on some that go, and which these are."""
    bases, held = dict[int, int | None](), set[int]()
    for step in stays:
        base = was = base_of(folder, step)
        while base is not None and base in gone:
            held.add(base)
            base = base_of(folder, base)
        if base != was:
            bases[step] = base
    return bases, held


def base_of(folder: Path, step: int) -> int | None:
    """The step that a step changes; None if it is a keyframe."""
    it = open_step(folder, step)
    it.file.close()
    return it.base


def remove(folder: Path, steps: Iterable[int]) -> None:
    """Remove files, newest first, so that whatever is left at any moment stands on what is there."""
    for step in sorted(steps, reverse=True):
        (folder / name_of(step)).unlink(missing_ok=True)
        sync_folder(folder)


def remove_older(folder: Path, steps: Sequence[int], keep: int) -> None:
    """Remove what none of the newest steps stands on. The last was saved just now: failures are logged."""
    try:
        remove(folder, set(steps).difference(needed(folder, steps[-keep:])))
    except (TpdeError, OSError) as error:
        log.warning("step %d is saved, but not all older ones that can go are removed: %s", steps[-1], error)
