"""Steps of a store that small files stand for: trainers know checkpoints by paths (guides/trainers.md)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tpde.errors import InvalidInput
from tpde.files.documents import parse_json, read_document
from tpde.io.committed import committed
from tpde.io.sinks import FileSink
from tpde.store.chain import MAX_STEP
from tpde.store.checkpoints import CheckpointStore

STORE = "tpde-store"  # beside checkpoints; not `checkpoint-...`, which trainers remove
LINK = "tpde.json"  # in a checkpoint that is a folder
_KEY = "tpde_step"
_BEGIN = f'{{"{_KEY}"'.encode()  # of a link
_MAX_LINK = 100  # bytes


class LinkedSteps:
    """A store beside checkpoints of a trainer, each a small file that names a step.

    A trainer may write a path twice, go back, and remove what it likes. So steps have numbers of their own:
    that of the trainer's step where it is free, and one more than the newest else.

    Parameters
    ----------
    store : Path
        The store.
    folder : Path
        Where the checkpoints are.
    pattern : str
        What finds all links in the folder.
    keyframe_every, background
        As for `CheckpointStore` and its `save`.
    """

    def __init__(
        self,
        store: Path,
        folder: Path,
        pattern: str,
        *,
        keyframe_every: int = 16,
        background: bool = False,
    ) -> None:
        self.folder, self._pattern, self._background = folder, pattern, background
        self.store = CheckpointStore(store, keyframe_every=keyframe_every)

    def save(self, link: Path, state: object, step: int) -> None:
        """Save a state, and then the link to it, which replaces one that is there.

        Raises
        ------
        TpdeError, OSError
            As for `CheckpointStore.save`. The link is as it was.
        """
        there = self.store.steps
        number = step if not there or step > there[-1] else there[-1] + 1
        self.store.save(number, state, background=self._background)
        link.parent.mkdir(parents=True, exist_ok=True)
        with committed(FileSink(link, force=True)) as sink:
            sink.write(0, [json.dumps({_KEY: number}).encode() + b"\n"])

    def forget(self) -> None:
        """Remove the steps that no link names, and on which none that stays stands.

        Raises
        ------
        InvalidInput
            If a link is damaged: nothing is removed. What does not begin as a link counts as another's file.
        """
        linked = {step_of(it) for it in self.folder.glob(self._pattern) if _is_link(it)}
        gone = [it for it in self.store.steps if it not in linked]
        if gone:
            self.store.prune(drop=gone, rewrite=False)


def _is_link(file: Path) -> bool:
    """Whether a file is a link, if perhaps a damaged one: others may lie beside."""
    if not file.is_file() or file.stat().st_size > _MAX_LINK:
        return False
    return file.name == LINK or file.read_bytes().startswith(_BEGIN)


def step_of(link: Path) -> int:
    """The step that a link names.

    Raises
    ------
    InvalidInput
        If it is no link.
    """
    found = parse_json(read_document(link), link)
    step = found.get(_KEY) if isinstance(found, dict) else None
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise InvalidInput(
            f"`{link}` does not name a step", hint="take another checkpoint", where=os.fspath(link)
        )
    return step


def load_linked(store: Path, link: Path, *, part: str | None = None, map_location: Any = None) -> Any:
    """Load the state that a link names, or a part of it; None if it has no such part.

    Parameters
    ----------
    store : Path
        The store.
    link : Path
        The link.
    part, map_location
        As for `CheckpointStore.load`.

    Raises
    ------
    InvalidInput
        If it is no link, or the step is not there.
    TpdeError
        As for `CheckpointStore.load`.
    """
    steps, step = CheckpointStore(store), step_of(link)
    if part is not None and part not in steps.parts(step):
        return None
    return steps.load(step, part=part, map_location=map_location)
