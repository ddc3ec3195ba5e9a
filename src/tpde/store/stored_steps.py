"""The steps of a checkpoint store, read: loaded, described, checked and exported."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput, TpdeError
from tpde.files.problem import Problem
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.target_device import target_device
from tpde.io.paths import given_path
from tpde.store.arguments import step_number
from tpde.store.chain import TRIES, StepFile, close_links, name_of, open_links, open_step, state_of, steps_in
from tpde.store.export import export_state
from tpde.store.rebuild_state import rebuild
from tpde.store.step_check import Entries, check_step, entries_of
from tpde.store.step_report import StepReport, report_step
from tpde.store.tree_text import parse_tree


class StoredSteps:
    """The steps of a checkpoint store, read.

    Any number of processes may do so while one writes: what is pruned meanwhile is passed over, or opened
    again where it has been rewritten.

    Parameters
    ----------
    directory : Path
        The folder.
    threads : int
        How many decode.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        self.directory, self._threads = directory, threads

    def wait(self) -> None:
        """Wait for what is being written: nothing is, by whoever only reads."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are there, ascending."""
        self.wait()
        return tuple(steps_in(self.directory))

    def load(self, step: int | None = None, *, part: str | None = None, map_location: Any = None) -> Any:
        """Load a state.

        Parameters
        ----------
        step : int, optional
            By default the newest.
        part : str, optional
            Of a state that is a dict, the key of which the value is wanted alone.
        map_location : torch.device, str or int, optional
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
        UnsupportedDevice
            If `map_location` is no device, or it is not there.
        """
        self.wait()
        place = None if map_location is None else target_device(map_location, "map_location")
        links = self._links(step)
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
        links = self._links(step)
        close_links(links)
        tree = parse_tree(links[0].tree, links[0].file.name)
        return tuple(tree) if isinstance(tree, dict) else ()

    def _links(self, step: int | None) -> list[StepFile]:
        """Open a step, by default the newest: another one if that is pruned meanwhile, as newer ones come."""
        for _ in range(TRIES):
            number = self._step(step)
            try:
                return open_links(self.directory, number)
            except InvalidInput:
                if step is not None or number in steps_in(self.directory):
                    raise
        return open_links(self.directory, self._step(step))

    def _step(self, step: int | None) -> int:
        if step is not None:
            return step_number(step)
        there = steps_in(self.directory)
        if not there:
            raise InvalidInput(
                f"`{self.directory}` has no steps", hint="check the path", where=str(self.directory)
            )
        return there[-1]

    def describe(self) -> tuple[StepReport, ...]:
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
                found.append(report_step(it))
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
        check_progress(progress)
        problems: list[Problem] = []
        known: dict[int, Entries] = {}
        for step in self.steps:
            path = self.directory / name_of(step)
            size = 0
            with contextlib.suppress(OSError):  # of which opening it says more
                size = path.stat().st_size
            try:
                it = open_step(self.directory, step)
            except FileNotFoundError:  # pruned meanwhile
                continue
            except (TpdeError, OSError) as error:
                problems.append(Problem(str(path), getattr(error, "tensor", None), None, str(error)))
            else:
                try:
                    known[step] = entries_of(it)
                    problems += check_step(it, known, self._look)
                finally:
                    it.file.close()
            progress(size)
        return problems

    def _look(self, step: int) -> Entries | None:
        """The tensors of a step as it is now; None if it cannot be read."""
        try:
            it = open_step(self.directory, step)
        except (TpdeError, OSError):
            return None
        it.file.close()
        return entries_of(it)

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
        folder = given_path(directory)
        self.wait()
        links = open_links(self.directory, step_number(step))
        state = state_of(links)
        try:
            tree = parse_tree(links[0].tree, links[0].file.name)
            export_state(step, tree, state, folder, force, self._threads)
        finally:
            state.close()
