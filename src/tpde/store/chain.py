"""The files of a checkpoint store: each a delta on an earlier step, or on nothing (checkpoint-store.md)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tpde.errors import Corrupt, InvalidInput, MissingBase
from tpde.format.container import Container
from tpde.format.delta_head import WeightsEntry
from tpde.format.delta_reader import check_header
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile
from tpde.store.delta_state import DeltaState
from tpde.store.open_state import MAX_CHAIN
from tpde.store.states import State, nothing

MAX_STEP = 10**18 - 1
STEP, TREE, ID = "tpde.step", "tpde.tree", "tpde.id"  # in the metadata of a step's header
_NAME = re.compile(r"step-(\d{8,18})\.tpde")
TRIES = 16  # to open a chain that is rewritten meanwhile, or the newest step while newer ones come


def name_of(step: int) -> str:
    """The name of a step's file."""
    return f"step-{step:08d}.tpde"


def step_of(name: object) -> int | None:
    """The step whose file has this name, or None."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return int(found[1]) if found and name_of(int(found[1])) == name else None


def steps_in(folder: Path) -> list[int]:
    """The steps of a store, ascending; none if there is no folder.

    Raises
    ------
    InvalidInput
        If it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            files = [it.name for it in entries if not it.is_dir(follow_symlinks=False)]
            found = [step for name in files if (step := step_of(name)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        hint = "change its permissions" if isinstance(error, PermissionError) else "name a folder"
        raise InvalidInput(
            f"`{folder}` cannot be listed: {error.strerror}", hint=hint, where=str(folder)
        ) from error
    return sorted(found)


class StepFile(NamedTuple):
    """A step's file, open.

    Attributes
    ----------
    step : int
        Its step.
    file : DeltaFile
        The delta.
    base : int or None
        The step that it changes; None if it is a keyframe.
    container : Container
        Its header.
    """

    step: int
    file: DeltaFile
    base: int | None
    container: Container

    @property
    def tree(self) -> str:
        """The text of its state (checkpoint-store.md 2)."""
        return self.container.metadata[TREE]

    @property
    def state_id(self) -> str | None:
        """The id of its state, if it has one (checkpoint-store.md 5)."""
        return self.container.metadata.get(ID)


def _check(holds: bool, path: Path, message: str) -> None:
    if not holds:
        raise Corrupt(f"`{path}`: {message}", hint="take another step", where=str(path))


def open_step(folder: Path, step: int) -> StepFile:
    """Open a step's file, and check that it is this step's.

    Raises
    ------
    FileNotFoundError
        If there is none.
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If it cannot be read, or is another step's.
    """
    path = folder / name_of(step)
    try:
        source = FileSource(path)
    except InvalidInput:
        os.lstat(path)  # so that its absence is not told as other failures are
        raise
    file = DeltaFile(source)
    try:
        entries = file.head.files
        _check(len(entries) == 1 and isinstance(entries[0], WeightsEntry), path, "it holds other files")
        entry = entries[0]
        assert isinstance(entry, WeightsEntry)
        _check(not entry.name and entry.header is not None, path, "it is no step of a store")
        container = check_header(entry, entry.header or b"", f"`{path}`")
        written = container.metadata.get(STEP)
        _check(TREE in container.metadata, path, "it has no tree")
        _check(written == str(step), path, f"it is of step {str(written)[:20]!a}, not of {step}")
        hint = file.head.base
        base = step_of(hint)
        _check(
            hint is None or (base is not None and base < step),
            path,
            f"its base is {str(hint)[:40]!a}, which is no earlier step",
        )
    except BaseException:
        file.close()
        raise
    return StepFile(step, file, base, container)


def open_links(folder: Path, step: int) -> list[StepFile]:
    """Open a step and all that it stands on, the step first.

    They are opened again if a file is gone: whoever prunes rewrites what stands on a step before it goes.

    Raises
    ------
    InvalidInput
        If there is no such step, or no store.
    MissingBase
        If a step is gone on which another stands.
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype
        If one of them cannot be read.
    """
    for _ in range(TRIES):
        links: list[StepFile] = []
        wanted: int | None = step
        try:
            while wanted is not None:
                if len(links) == MAX_CHAIN:
                    raise Corrupt(
                        f"`{folder / name_of(step)}` stands on more than {MAX_CHAIN} steps",
                        hint="take another step",
                        where=str(folder / name_of(step)),
                    )
                links.append(open_step(folder, wanted))
                wanted = links[-1].base
        except BaseException as error:
            close_links(links)
            if not isinstance(error, FileNotFoundError):
                raise
            continue
        return links
    if not links and not folder.is_dir():
        raise InvalidInput(
            f"there is no checkpoint store `{folder}`, of which step {step} is wanted",
            hint="put it there; of a trainer's checkpoint, copy the store that lies beside it, too",
            where=str(folder),
        )
    if not links:
        has = ", ".join(map(str, steps_in(folder)[-5:])) or "none"
        raise InvalidInput(
            f"`{folder}` has no step {step}", hint=f"the newest ones are: {has}", where=str(folder)
        )
    raise MissingBase(
        f"`{links[-1].file.name}` stands on step {wanted}, which is not there",
        hint="take an earlier step, or put the file back",
        where=links[-1].file.name,
    )


def close_links(links: list[StepFile]) -> None:
    """Close the files."""
    for it in links:
        it.file.close()


def state_of(links: list[StepFile]) -> State:
    """The state that a chain of files makes. They are closed with it, or if this fails."""
    state = nothing()
    for at in range(len(links) - 1, -1, -1):
        try:
            state = DeltaState(links[at].file, state)
        except BaseException:
            close_links(links[:at])
            raise
    return state
