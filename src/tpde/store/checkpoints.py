"""Checkpoints of training: each step as what changed since the step before (checkpoint-store.md)."""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput, TpdeError
from tpde.files.single_file import Problem, Progress, no_progress
from tpde.files.writer import check_threads
from tpde.format.delta_head import WITH_BASE, TensorEntry
from tpde.io.sinks import FileSink, sync_folder, unwritable
from tpde.store.chain import (
    MAX_STEP,
    STEP,
    TREE,
    StepFile,
    close_links,
    name_of,
    open_links,
    open_step,
    state_of,
    steps_in,
)
from tpde.store.delta_state import MAX_CHAIN
from tpde.store.delta_writer import HostComparer, write_delta
from tpde.store.export import export_state
from tpde.store.staging import Staging
from tpde.store.states import MemoryState, State, nothing
from tpde.store.trees import Tree, leaf_bytes, map_tensors, parse_tree, rebuild
from tpde.store.writer_lock import WriterLock

__all__ = ["CheckpointStore", "Step"]

log = logging.getLogger("tpde")


@dataclass(frozen=True)
class Step:
    """A step of a store.

    Attributes
    ----------
    step : int
        Its number.
    base : int or None
        The step that it changes; None if it is a keyframe.
    state_bytes, file_bytes : int
        Size of its tensors, and of its file.
    tensors, changed : int
        How many tensors it has, and how many of them are not as in the base.
    """

    step: int
    base: int | None
    state_bytes: int
    file_bytes: int
    tensors: int
    changed: int


class _Background:
    """A call in a thread of its own, whose error is kept."""

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        self.step, self._call = step, call
        self.error: BaseException | None = None
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._run, name=f"tpde-save-{step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error
            log.error("step %d was not saved: %s", self.step, error)

    def join(self) -> None:
        self._thread.join()


class CheckpointStore:
    """A folder of checkpoints, of which each is stored as what changed since the one before.

    Any number of processes may read while one writes. Every file appears when it is complete and on the
    disk, and not before.

    Parameters
    ----------
    directory : path-like
        The folder. The first `save` makes it if it is not there.
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
        If a number is out of its range.

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
        self.directory = Path(directory)
        self._every = _number("keyframe_every", keyframe_every, 1, MAX_CHAIN)
        self._keep = None if keep is None else _number("keep", keep, 1, MAX_STEP)
        self._fast, self._threads = fast, check_threads(threads)
        self._retain = bool(retain)
        self._staging = Staging()
        self._other = Staging()  # the copy of what is retained, in turn with the one above
        self._retained: tuple[int, MemoryState] | None = None
        self._lock: WriterLock | None = None
        self._pending: _Background | None = None

    def __repr__(self) -> str:
        return f"CheckpointStore({str(self.directory)!r})"

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are there, ascending."""
        self.wait()
        return tuple(steps_in(self.directory))

    # Writing

    def save(self, step: int, state: object, *, background: bool = False) -> None:
        """Store a state.

        Parameters
        ----------
        step : int
            Its number, larger than those of all steps that are there.
        state : object
            Dicts, lists and tuples of tensors, arrays, numbers, texts, bytes, None, and PyTorch's sizes,
            dtypes and devices. A tensor that occurs twice is stored once, and is one tensor again.
        background : bool
            Return when the tensors are copied, and write in a thread. What fails then is raised by the next
            call of any method, and logged. If the save before has not ended, this waits for it.

        Raises
        ------
        InvalidInput
            If the state holds anything else, naming where; if the step is not larger; or if another process
            writes to the store.
        Truncated, Corrupt
            If the step before, which is read for this one, is damaged: `prune(drop=[...])` drops it.
        InvalidDestination, OSError
            If the folder cannot be written. The steps that are there stay as they are.
        """
        self.wait()
        number, tree = _number("step", step, 0, MAX_STEP), Tree(state)
        self._own()
        there = steps_in(self.directory)
        if there and number <= there[-1]:
            raise InvalidInput(
                f"step {number} is not larger than step {there[-1]}, the newest of `{self.directory}`",
                hint=f"save a larger step, or drop the newer ones first: `prune(drop=range({number}, "
                f"{there[-1] + 1}))`",
                where=str(self.directory),
            )
        metadata = {STEP: str(number), TREE: tree.text}
        if background or self._retain:
            read = self._staging.copy(tree.leaves, tree.specs)
        else:

            def read(name: str) -> Bytes:
                return leaf_bytes(tree.leaves[name])

        target = MemoryState(tree.specs, read, metadata, f"step {number}")
        if background:
            self._pending = _Background(number, lambda: self._save(number, target))
        else:
            self._save(number, target)

    def _save(self, step: int, target: MemoryState) -> None:
        """Write a step, and remove what need not stay."""
        there = steps_in(self.directory)
        self._write(step, target, there[-1] if there else None)
        if self._retain:
            self._retained = step, target
            self._staging, self._other = self._other, self._staging
        if self._keep is not None:
            there.append(step)
            self._remove(set(there).difference(self._needed(there[-self._keep :])))

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
            sink = FileSink(self.directory / name_of(step), force=force)
            try:
                write_delta(
                    state,
                    target,
                    sink,
                    hint=hint,
                    fast=self._fast,
                    comparer=HostComparer(state, target, self._threads),
                    threads=self._threads,
                    progress=no_progress,
                )
                sink.commit()
            except BaseException:
                sink.abort()
                raise
        finally:
            state.close()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises
        ------
        Exception
            What it failed with.
        """
        pending = self._pending
        if pending is not None:
            pending.join()  # Ctrl-C here leaves it to the next call
            self._pending = None
            if isinstance(pending.error, TpdeError):
                raise pending.error.prefixed(f"step {pending.step} was not saved")
            if pending.error is not None:
                raise pending.error

    def close(self) -> None:
        """Wait for a save in the background, let others write, and free memory.

        Raises
        ------
        Exception
            What the save failed with.
        """
        try:
            self.wait()
        finally:
            self._staging, self._other, self._retained = Staging(), Staging(), None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _own(self) -> None:
        """Be the one that writes."""
        if self._lock is not None and self._lock.held:
            return
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_folder(self.directory.parent)
        except OSError as error:
            raise unwritable(self.directory, error) from error
        self._lock, self._retained = WriterLock(self.directory), None  # others may have written meanwhile

    # Reading

    def load(self, step: int | None = None, *, part: str | None = None, map_location: Any = None) -> Any:
        """Load a state.

        Parameters
        ----------
        step : int, optional
            By default the newest.
        part : str, optional
            Of a state that is a dict, the key of which the value is wanted alone.
        map_location : torch.device or str, optional
            Where tensors go, one by one. By default they are in the processor's memory, wherever they were.

        Returns
        -------
        object
            The state, with the bits that were saved. Parameters come back as tensors.

        Raises
        ------
        InvalidInput
            If there is no such step, or none, or no such part.
        MissingBase
            If a file is gone on which it stands.
        Truncated, Corrupt, UnsupportedVersion
            If a file is damaged, naming it and the tensor.
        """
        self.wait()
        place = _place(map_location)
        links = open_links(self.directory, self._step(step))
        state = state_of(links)
        try:

            def read(name: str) -> tuple[Bytes, Any]:
                spec = state.specs["", name]
                return state.read(("", name), self._threads), spec

            where = links[0].file.name
            tree = parse_tree(links[0].tree, where)
            if part is not None:
                if not isinstance(tree, dict) or part not in tree:
                    raise InvalidInput(f"`{where}` has no part `{part}`", hint="load the whole", where=where)
                tree = tree[part]
            return rebuild(tree, where, read, place)
        finally:
            state.close()

    def parts(self, step: int | None = None) -> tuple[str, ...]:
        """The keys of a state that is a dict; none of another.

        Raises
        ------
        InvalidInput
            If there is no such step, or none.
        Truncated, Corrupt, UnsupportedVersion
            If its file is damaged.
        """
        self.wait()
        links = open_links(self.directory, self._step(step))
        close_links(links)
        tree = parse_tree(links[0].tree, links[0].file.name)
        return tuple(tree) if isinstance(tree, dict) else ()

    def _step(self, step: int | None) -> int:
        if step is not None:
            return _number("step", step, 0, MAX_STEP)
        there = steps_in(self.directory)
        if not there:
            raise InvalidInput(
                f"`{self.directory}` has no steps", hint="check the path", where=str(self.directory)
            )
        return there[-1]

    def describe(self) -> tuple[Step, ...]:
        """What each step is, ascending.

        Raises
        ------
        Truncated, Corrupt, UnsupportedVersion
            If a file is damaged.
        """
        found = []
        for step in self.steps:
            try:
                it = open_step(self.directory, step)
            except FileNotFoundError:  # pruned meanwhile
                continue
            try:
                tensors = list(it.file.head.tensors)
                found.append(
                    Step(
                        step,
                        it.base,
                        sum(t.spec.nbytes for t in tensors),
                        it.file.size,
                        len(tensors),
                        sum(t.size > 0 for t in tensors),
                    )
                )
            finally:
                it.file.close()
        return tuple(found)

    def verify(self, *, progress: Progress = no_progress) -> list[Problem]:
        """Check every byte of every file by its hashes, and that each step stands on what it was made from.

        No tensor is made: fingerprints of a step's base are compared with those of that step.

        Parameters
        ----------
        progress : callable
            Called with a number of bytes of files when they are done.

        Returns
        -------
        list of Problem
            What is wrong, by file and tensor; empty if nothing is.
        """
        problems: list[Problem] = []
        known: dict[int, dict[str, TensorEntry]] = {}
        for step in self.steps:
            path = self.directory / name_of(step)
            size = 0
            try:
                size = path.stat().st_size
                it = open_step(self.directory, step)
            except FileNotFoundError:  # pruned meanwhile
                continue
            except (TpdeError, OSError) as error:
                problems.append(Problem(str(path), getattr(error, "tensor", None), None, str(error)))
            else:
                try:
                    known[step] = {t.name: t for t in it.file.head.tensors}
                    problems += _check_step(it, known)
                finally:
                    it.file.close()
            progress(size)
        return problems

    def export(self, step: int, directory: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write a state as files of other tools.

        Parameters
        ----------
        step : int
            Which.
        directory : path-like
            A new folder: for each key of the state that has tensors a plain safetensors file of that name,
            and all else as `state.json` (docs/reference/checkpoint-store.md 3).
        force : bool
            Replace a folder that an export wrote.

        Raises
        ------
        InvalidInput, MissingBase, Truncated, Corrupt, UnsupportedVersion
            As for `load`.
        DestinationExists, InvalidDestination
            If the folder cannot be made.
        """
        self.wait()
        links = open_links(self.directory, _number("step", step, 0, MAX_STEP))
        state = state_of(links)
        try:
            tree = parse_tree(links[0].tree, links[0].file.name)
            export_state(step, tree, state, Path(directory), force, self._threads)
        finally:
            state.close()

    # Removing

    def prune(
        self, keep: int | None = None, *, drop: Iterable[int] = (), rewrite: bool = True
    ) -> tuple[int, ...]:
        """Remove steps, and rewrite those that stand on them: each that stays has the bits that it had.

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
            If a step that must be rewritten cannot be read. What was there loads as before.
        """
        self.wait()
        self._own()
        there, gone = steps_in(self.directory), {_number("step", it, 0, MAX_STEP) for it in drop}
        if unknown := sorted(gone.difference(there)):
            raise InvalidInput(
                f"`{self.directory}` has no step {unknown[0]}",
                hint="nothing was removed",
                where=str(self.directory),
            )
        stays = [it for it in there if it not in gone]
        if keep is not None:
            stays = stays[-_number("keep", keep, 1, MAX_STEP) :]
        gone = set(there).difference(stays if rewrite else self._needed(stays))
        for step in stays if rewrite else ():
            base = was = self._base_of(step)
            while base in gone:
                base = self._base_of(base)
            if base != was:  # what it stood on is there until all that stays is rewritten
                state = state_of(open_links(self.directory, step))
                try:
                    self._write(step, state, base, force=True)
                finally:
                    state.close()
        self._remove(gone)
        return tuple(sorted(gone))

    def _needed(self, steps: Iterable[int]) -> set[int]:
        """These steps, and all that they stand on."""
        found = set[int]()
        for step in steps:
            at: int | None = step
            while at is not None and at not in found:
                found.add(at)
                at = self._base_of(at)
        return found

    def _base_of(self, step: int) -> int | None:
        it = open_step(self.directory, step)
        it.file.close()
        return it.base

    def _remove(self, steps: Iterable[int]) -> None:
        """Remove files, newest first, so that whatever is left at any moment stands on what is there."""
        for step in sorted(steps, reverse=True):
            (self.directory / name_of(step)).unlink(missing_ok=True)
            sync_folder(self.directory)


def _check_step(it: StepFile, known: dict[int, dict[str, TensorEntry]]) -> list[Problem]:
    """What is wrong with a step's payloads, its tree, and what it stands on."""
    problems, where = list[Problem](), it.file.name
    try:
        map_tensors(parse_tree(it.tree, where), lambda path, name: name, known[it.step], where)
    except Corrupt as error:
        problems.append(Problem(where, None, None, str(error)))
    base = known.get(it.base) if it.base is not None else {}
    if base is None:
        problems.append(Problem(where, None, None, f"it stands on step {it.base}, which cannot be read"))
    for tensor in known[it.step].values():
        try:
            it.file.payload(tensor)
        except TpdeError as error:
            problems.append(Problem(where, tensor.name, None, str(error)))
        if tensor.codec in WITH_BASE and base is not None:
            under = base.get(tensor.name)
            if under is None or under.target != tensor.base or under.spec != tensor.spec:
                message = f"`{where}`: step {it.base} is not what tensor `{tensor.name}` was made from"
                problems.append(Problem(where, tensor.name, None, message))
    return problems


def _number(what: str, value: Any, least: int, most: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number <= most:
        raise InvalidInput(f"{what} is {value!r}", hint=f"take a whole number from {least} to {most}")
    return number


def _place(map_location: Any) -> Any:
    """Where tensors go, as a device."""
    if map_location is None:
        return None
    import torch

    try:
        return torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(
            f"map_location is {map_location!r}", hint="name a device, such as `cuda:0`"
        ) from error
