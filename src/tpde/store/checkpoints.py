"""Checkpoints of training: each step as what changed since the step before (checkpoint-store.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, TpdeError
from tpde.files.thread_count import check_threads
from tpde.io.paths import anchored, given_path
from tpde.io.sinks import sync_folder, unwritable
from tpde.io.temporary import clear_files
from tpde.memory.turn import Turn
from tpde.store.arguments import new_step, step_metadata, step_number, whole_number
from tpde.store.background_save import BackgroundSave
from tpde.store.chain import MAX_STEP, close_links, name_of, open_links, state_of, steps_in
from tpde.store.delta_writer import write_delta_file
from tpde.store.open_state import MAX_CHAIN
from tpde.store.pruning import needed, remove, remove_older, rewritten
from tpde.store.staging import Staging
from tpde.store.state_tree import StateTree, leaf_bytes
from tpde.store.states import MemoryState, State, nothing
from tpde.store.stored_steps import StoredSteps
from tpde.store.writer_lock import WriterLock

__all__ = ["CheckpointStore"]


class CheckpointStore(StoredSteps):
    """A folder of checkpoints, of which each is stored as what changed since the one before.

    Any number of processes may read while one writes. Every file appears when it is complete and on the
    disk, and not before. Threads may share a store: they write one after the other. A copy of a store, or
    what is unpickled, is another store of the same folder.

    Parameters
    ----------
    directory : path-like
        The folder. The first `save` makes it if it is not there. A relative path is one from the folder that
        is the current one now.
    keyframe_every : int
        Of so many steps one is stored without a base, 1 to 240. More make the store smaller; loading a step
        reads all files back to its keyframe.
    keep : int, optional
        After each `save`, remove all but the newest so many steps, as far as no step that stays stands on
        them: up to `keyframe_every - 1` more stay. By default all do.
    fast : bool
        Code positions without the base's exponents: files are larger, and faster to make and to read.
    retain : bool
        Keep the state that was saved last in memory. The next `save` then reads no files, which takes several
        times as long where most of a state changes.
    threads : int, optional
        By default one for each processor. Files do not depend on it, nor on `retain`.

    Raises
    ------
    InvalidInput
        If a number is out of its range, or the folder is no path.

    Notes
    -----
    Of each state the next `save` needs the bytes, and reads them from the store's files, unless it retains
    them. Memory: what the largest tensor takes four times, and 64 MiB. A `save` in the background copies the
    state first, into memory that the store keeps until it is closed (page-locked where a tensor is on a GPU):
    once the state's size. With `retain` every `save` does, in turn to one of two copies.

    Examples
    --------
    >>> import torch
    >>> from tpde import CheckpointStore
    >>> model = torch.nn.Linear(100, 100)
    >>> folder = getfixture("tmp_path") / "checkpoints"
    >>> with CheckpointStore(folder) as store:
    ...     store.save(10, {"model": model.state_dict(), "loss": 0.5})
    ...     _ = model.weight.data.mul_(1.001)
    ...     store.save(20, {"model": model.state_dict(), "loss": 0.4})
    >>> CheckpointStore(folder).steps
    (10, 20)
    >>> CheckpointStore(folder).load(10)["loss"]
    0.5
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keyframe_every: int = 16,
        keep: int | None = None,
        fast: bool = False,
        retain: bool = False,
        threads: int | None = None,
    ) -> None:
        super().__init__(anchored(given_path(directory)), check_threads(threads))
        self._every = whole_number("keyframe_every", keyframe_every, 1, MAX_CHAIN)
        self._keep = None if keep is None else whole_number("keep", keep, 1, MAX_STEP)
        self._fast = fast
        self._retain = bool(retain)
        self._begin()

    def _begin(self) -> None:
        """Have written nothing yet."""
        self._ended = False  # a `with`, after which nobody would close it
        self._staging = Staging()
        self._other = Staging()  # the next copy while the one above has what is retained
        self._retained: tuple[int, MemoryState, Staging] | None = None
        self._lock: WriterLock | None = None
        self._pending: BackgroundSave | None = None
        self._turn = Turn()  # of a thread that writes, or ends a save in the background

    def __getstate__(self) -> dict[str, Any]:
        own = ("_ended", "_staging", "_other", "_retained", "_lock", "_pending", "_turn")
        return {name: it for name, it in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"CheckpointStore({str(self.directory)!r})"

    def __enter__(self) -> CheckpointStore:
        self._ended = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self.close()

    def save(
        self, step: int, state: object, *, background: bool = False, state_id: str | None = None
    ) -> None:
        """Store a state.

        Parameters
        ----------
        step : int
            Its number, larger than those of all steps that are there.
        state : object
            Dicts, lists and tuples of tensors, arrays, numbers, texts, bytes, None, and PyTorch's sizes,
            dtypes and devices. A tensor that occurs twice is stored once, and is one tensor again. Packed
            weights are decoded, one at a time, and come back as tensors.
        background : bool
            Return when the tensors are copied, and write in a thread. What fails then is raised by the next
            call of any method, and logged. If the save before has not ended, this waits for it.
        state_id : str, optional
            32 digits, `0` to `9` and `a` to `f`, by which links know this state from others of its number.

        Raises
        ------
        InvalidInput
            If the state holds anything else, or too much but for tensors and arrays, naming where; if the
            step is not larger; if another process writes to the store, its folder was removed or replaced
            since this one began to, or its `with` has ended.
        Truncated, Corrupt
            If the step before, which is read for this one, is damaged: `prune(drop=[...])` drops it.
        InvalidDestination, OSError
            If the folder cannot be written. The steps that are there stay as they are.
        """
        with self._alone():
            self.wait()
            tree = StateTree(state)
            metadata = step_metadata(step_number(step), tree.text, state_id)
            self._own()
            there = steps_in(self.directory)
            number = new_step(step, there, self.directory)
            if self._retained is not None and there[-1:] != [self._retained[0]]:
                self._retained = None  # of a step that is gone, whose number may come again
            memory = self._staging
            if self._retained is not None and self._retained[2] is memory:
                memory = self._other
            if background or self._retain:
                read = memory.copy(tree.leaves, tree.specs)
            else:

                def read(name: str) -> Bytes:
                    return leaf_bytes(tree.leaves[name])

            target = MemoryState(tree.specs, read, metadata, f"step {number}")
            if background:
                self._pending = BackgroundSave(number, lambda: self._save(number, target, memory))
                self._pending.start()  # now, when Ctrl-C does not make it one that nobody knows
            else:
                self._save(number, target, memory)

    def _save(self, step: int, target: MemoryState, memory: Staging) -> None:
        """Write a step, and remove what need not stay."""
        there = steps_in(self.directory)
        self._write(step, target, there[-1] if there else None)
        if self._retain:
            self._retained = step, target, memory
        if self._keep is not None:
            remove_older(self.directory, [*there, step], self._keep)

    def _write(self, step: int, target: State, base: int | None, *, force: bool = False) -> None:
        """Write a step's file on a base, or as a keyframe if there is none or the chain is long enough."""
        links = [] if base is None else open_links(self.directory, base)
        if len(links) >= self._every:
            close_links(links)
            links = []
        state: State
        hint = name_of(links[0].step) if links else None
        if links and self._retained is not None and self._retained[0] == base:
            close_links(links)
            state = self._retained[1]
        else:
            state = state_of(links) if links else nothing()
        try:
            write_delta_file(
                state,
                target,
                self.directory / name_of(step),
                hint=hint,
                fast=self._fast,
                threads=self._threads,
                force=force,
            )
        finally:
            state.close()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises
        ------
        Exception
            What it failed with.
        """
        if self._pending is None:
            return
        with self._alone():
            pending = self._pending
            if pending is None:  # another thread was told
                return
            error = pending.end()  # Ctrl-C here leaves it to the next call
            self._pending = None
        if isinstance(error, TpdeError):
            raise error.prefixed(f"step {pending.step} was not saved")
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for a save in the background, let others write, and free memory. After Ctrl-C, call it again.

        Raises
        ------
        Exception
            What the save failed with.
        """
        with self._alone():
            try:
                self.wait()
            finally:
                if self._pending is None:  # else Ctrl-C came first, and it still writes
                    self._staging, self._other, self._retained = Staging(), Staging(), None
                    if self._lock is not None:
                        self._lock.release()
                        self._lock = None

    def _alone(self) -> Turn:
        """The turn of this thread, in which no other one writes, nor waits for a save in the background.

        The thread of that one, which logs, may get here, too, while the turn's owner waits for it.
        """
        if (pending := self._pending) is not None:
            pending.refuse_itself()
        return self._turn

    def _own(self) -> None:
        """Be the one that writes."""
        if self._ended:
            raise InvalidInput(
                f"the `with` of this store of `{self.directory}` has ended, and nobody would close it again",
                hint="write inside of it, or of another one; any store may read",
                where=str(self.directory),
            )
        if self._lock is not None and self._lock.held:
            self._lock.require_there()
            return
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_folder(self.directory.parent)
        except OSError as error:
            raise unwritable(self.directory, error) from error
        self._retained, self._lock = None, WriterLock(self.directory)  # others may have written meanwhile

    def prune(
        self, keep: int | None = None, *, drop: Iterable[int] = (), rewrite: bool = True
    ) -> tuple[int, ...]:
        """Remove steps, and rewrite those that stand on them: each that stays has the bits that it had.

        What killed processes left in the folder is removed, too.

        Parameters
        ----------
        keep : int, optional
            How many of the newest of what is not dropped stay. By default all do.
        drop : iterable of int
            Steps to remove.
        rewrite : bool
            False: rewrite nothing, and leave those on which a step stands that stays.

        Returns
        -------
        tuple of int
            What was removed.

        Raises
        ------
        InvalidInput
            If a step to drop is not there, or another process writes to the store.
        MissingBase, Truncated, Corrupt, UnsupportedVersion
            If a step that must be rewritten cannot be read. What stays loads as before, and so does what it
            stands on.
        """
        if not isinstance(drop, Iterable):
            raise InvalidInput(f"drop is {drop!r:.50}", hint="name steps in a list", where="drop", found=drop)
        with self._alone():
            self.wait()
            self._own()
            clear_files(self.directory)
            there, gone = steps_in(self.directory), {step_number(it) for it in drop}
            if unknown := sorted(gone.difference(there)):
                raise InvalidInput(
                    f"`{self.directory}` has no step {unknown[0]}",
                    hint="nothing was removed",
                    where=str(self.directory),
                )
            stays = [it for it in there if it not in gone]
            if keep is not None:
                stays = stays[-whole_number("keep", keep, 1, MAX_STEP) :]
            gone = set(there).difference(stays if rewrite else needed(self.directory, stays))
            bases, held = rewritten(self.directory, stays, gone)
            remove(self.directory, gone - held)  # first: it makes room to rewrite others
            for step, base in bases.items():
                state = state_of(open_links(self.directory, step))
                try:
                    self._write(step, state, base, force=True)
                finally:
                    state.close()
            remove(self.directory, held)
            return tuple(sorted(gone))
