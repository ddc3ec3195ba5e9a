"""Steps of a store that small files stand for: trainers know checkpoints by paths (guides/trainers.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tpde.errors import Corrupt, InvalidInput, TpdeError, Truncated
from tpde.store.chain import open_step
from tpde.store.checkpoints import CheckpointStore
from tpde.store.link_records import record_link, records_in
from tpde.store.step_links import LINK, StepLink, is_link, new_link, read_link, write_link

STORE = "tpde-store"  # beside checkpoints; not `checkpoint-...`, which trainers remove

log = logging.getLogger("tpde")


class LinkedSteps:
    """A store beside checkpoints of a trainer, each a small file that names a step.

    A trainer may write a path twice, go back, and remove what it likes. So steps have numbers of their own:
    that of the trainer's step where it is free, and one more than the newest else.

    Parameters
    ----------
    store : Path
        The store.
    look : callable
        Gives files among which copies of links may be.
    keyframe_every, background
        As for `CheckpointStore` and its `save`.
    """

    def __init__(
        self,
        store: Path,
        look: Callable[[], Iterable[Path]],
        *,
        keyframe_every: int = 16,
        background: bool = False,
    ) -> None:
        self._look, self._background, self._told = look, background, False
        self.store = CheckpointStore(store, keyframe_every=keyframe_every)

    def save(self, link: Path, state: object, step: int, *, forget: bool = False) -> None:
        """Save a state, and then the link to it, which replaces one that is there.

        In the background the link may be there first. If that save fails, the link names no state, whoever
        has its number then. So where a link is replaced, nothing is written in the background: until the
        state is there, the link names the one before.

        Parameters
        ----------
        link : Path
            Where the link goes.
        state : object
            The state.
        step : int
            The trainer's step.
        forget : bool
            First `forget`, which waits for the save before, not for this one. What fails then is raised when
            this state is saved.

        Raises
        ------
        TpdeError, OSError
            As for `CheckpointStore.save`. The link is as it was.
        """
        failed: TpdeError | OSError | None = None
        if forget:
            try:
                self.forget()
            except (TpdeError, OSError) as error:
                failed = error
        self._save(link, state, step)
        if failed is not None:
            raise failed

    def _save(self, link: Path, state: object, step: int) -> None:
        there = self.store.steps
        new = new_link(step if not there or step > there[-1] else there[-1] + 1)
        background = self._background and not os.path.lexists(link)
        self.store.save(new.step, state, background=background, state_id=new.state_id)
        write_link(link, new)
        if not record_link(self.store.directory, link) and not self._told:
            self._told = True
            log.warning(
                "`%s` is on another disk than `%s`, or that has no hard links: whatever becomes of it, its "
                "step stays until you call `prune`",
                link,
                self.store.directory,
            )

    def forget(self) -> None:
        """Remove the steps whose links are known to be gone, and on which none that stays stands.

        A link that was moved on its disk is there, wherever it is now. Steps without a record of their link,
        such as those of other users of the store, stay.

        Raises
        ------
        InvalidInput
            If a link is damaged: nothing is removed. What does not begin as a link counts as another's file.
        TpdeError, OSError
            As for `CheckpointStore.prune`.
        """
        self.store.wait()
        folder, records = self.store.directory, records_in(self.store.directory)
        linked = {it.link.step for it in records if not it.gone}
        linked |= {read_link(it).step for it in self._look() if is_link(it)}
        gone = [it for it in records if it.gone and it.link.step not in linked]
        if steps := {it.link.step for it in gone if _is_there(folder, it.link)}:
            self.store.prune(drop=steps, rewrite=False)
        for it in gone:
            if not _is_there(folder, it.link):
                it.path.unlink(missing_ok=True)


def _is_there(store: Path, named: StepLink) -> bool:
    """Whether a store has the state that a link names. What is damaged counts as that of its number."""
    try:
        it = open_step(store, named.step)
    except FileNotFoundError:
        return False
    except (Truncated, Corrupt):
        return True
    it.file.close()
    return it.state_id == named.state_id


def links_below(folder: Path) -> Iterator[Path]:
    """The `tpde.json` in all folders below one, each folder once, those that symbolic links lead to, too."""
    seen = set[tuple[int, int]]()
    for at, folders, files in os.walk(folder, followlinks=True):
        try:
            info = os.stat(at)
        except OSError:  # removed meanwhile
            continue
        if (info.st_dev, info.st_ino) in seen:
            folders.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        if LINK in files:
            yield Path(at) / LINK


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
        If it is no link, or the step is not there, or is another state.
    TpdeError
        As for `CheckpointStore.load`.
    """
    steps, named = CheckpointStore(store), read_link(link)
    _refuse_another(steps.directory, named, link)
    if part is not None and part not in steps.parts(named.step):
        return None
    return steps.load(named.step, part=part, map_location=map_location)


def _refuse_another(store: Path, named: StepLink, link: Path) -> None:
    """Refuse a step that is not the state that a link names."""
    try:
        it = open_step(store, named.step)
    except FileNotFoundError:  # of which loading says more
        return
    it.file.close()
    if named.state_id not in (None, it.state_id):
        raise InvalidInput(
            f"`{link}` names step {named.step} of `{store}`, which is another state: the one meant was not "
            f"saved, or dropped, and its number given anew (the link has the id {named.state_id}, the step "
            f"{(it.state_id or 'none')[:32]!a})",
            hint="take another checkpoint",
            where=os.fspath(link),
            found=it.state_id,
            needed=named.state_id,
        )
