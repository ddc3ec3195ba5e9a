"""A state opened by its path: files as they are, or a delta with the chain of its bases."""

from __future__ import annotations

import os
from pathlib import Path

from tpde.errors import Corrupt, InvalidInput, MissingBase
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile, is_delta_file
from tpde.store.delta_state import DeltaState
from tpde.store.files_state import FilesState
from tpde.store.states import State, nothing

MAX_CHAIN = 240  # files that are open at a time; some systems allow 256


def open_state(path: Path) -> State:
    """Open a state: files as they are, or a delta with the chain of its bases.

    Parameters
    ----------
    path : Path
        A safetensors file, a model directory, either packed or not, or a delta.

    Raises
    ------
    InvalidInput
        If there is nothing, it is no state, or the chain is too long; `MissingBase` if the base of a delta is
        not where it was.
    Corrupt
        If a chain comes back to a delta of it.
    """
    if not path.exists():
        raise InvalidInput(f"`{path}` does not exist", hint="check the path", where=str(path))
    links: list[DeltaFile] = []
    seen: list[Path] = []
    try:
        while is_delta_file(path):
            place = path.resolve()
            if place in seen:
                chain = " -> ".join(f"`{it.name}`" for it in (*seen, place))
                raise Corrupt(
                    f"the base of `{path}` is in the end itself: {chain}",
                    hint="one of them is not what it was, fetch it again",
                    where=str(path),
                )
            if len(seen) == MAX_CHAIN:
                raise InvalidInput(
                    f"`{links[0].name}` stands on more than {MAX_CHAIN} deltas",
                    hint="restore one of these with `tpde patch`, and go on from there",
                    where=links[0].name,
                    needed=MAX_CHAIN,
                )
            seen.append(place)
            links.append(DeltaFile(FileSource(path)))
            if links[-1].head.base is None and not links[-1].needs_base:
                break
            path = base_path(links[-1])
        state = nothing() if links and links[-1].head.base is None else FilesState(path)
        while links:
            state = DeltaState(links.pop(), state)
        return state
    except BaseException:
        for link in links:
            link.close()
        raise


def stands_on(state: State) -> list[Path]:
    """The paths of what a state is read from: its own, and where it is a delta, those of its chain."""
    found = []
    while isinstance(state, DeltaState):
        found.append(Path(state.name))
        state = state.base
    return [*found, Path(state.name)] if isinstance(state, FilesState) else found


def require_unchanged(state: State) -> None:
    """Make sure that no plain file that a state is read from was changed since it was opened.

    Raises
    ------
    InvalidInput
        If one was.
    """
    while isinstance(state, DeltaState):
        state = state.base
    if isinstance(state, FilesState):
        state.require_unchanged()


def base_path(delta: DeltaFile) -> Path:
    """Where a delta's base was when it was made, seen from the delta, or from what a link to it leads to.

    Raises
    ------
    MissingBase
        If the delta does not say, or there is nothing any longer.
    """
    hint = delta.head.base
    if hint and "\0" not in hint and not Path(hint).is_absolute():
        for path in (Path(delta.name), Path(os.path.realpath(delta.name))):
            if (found := path.parent / hint).exists():
                return found
    raise MissingBase(
        f"`{delta.name}` has its base at {f'`{hint}`' if hint else 'an unknown place'}, where nothing is",
        hint="put the base there, or name it",
        where=delta.name,
    )


def open_on(file: DeltaFile, base: str | os.PathLike[str]) -> DeltaState:
    """The state that a delta makes of a named base. The delta is closed with it, or if this fails."""
    try:
        state = open_state(Path(base))
    except BaseException:
        file.close()
        raise
    return DeltaState(file, state)
