"""diff and patch: what changed between two states of a model, as a file, and back; and what is in that."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tpde.errors import Corrupt, InvalidDestination, InvalidInput, TpdeError
from tpde.files.directory import refuse_nested, replaceable
from tpde.files.folder_swap import new_folder
from tpde.files.single_file import Problem, Progress, no_progress
from tpde.files.writer import check_threads
from tpde.format.constants import DTYPES
from tpde.format.container_reader import parse_header
from tpde.format.delta_head import SAME, SPARSE, WeightsEntry
from tpde.io.sinks import FileSink, Sink, refuse_file
from tpde.io.sources import FileSource
from tpde.store.delta_state import DeltaFile, DeltaState, is_delta_file, open_state, same_place
from tpde.store.delta_writer import HostComparer, hint_for, write_delta
from tpde.store.states import State

__all__ = ["DeltaReport", "TensorChange", "diff", "inspect_delta", "is_delta_file", "patch", "verify_delta"]


@dataclass(frozen=True)
class TensorChange:
    """A tensor of a delta.

    Attributes
    ----------
    name, file : str
        Its name, and the file of the target that holds it; empty for a file alone.
    dtype : str
        Its name in safetensors.
    shape : tuple of int
        Its dimensions.
    codec : {"same", "sparse", "dense", "full", "plain"}
        How it is stored (docs/delta.md 5.3).
    bytes, stored_bytes : int
        Its size in the target, and in the delta.
    changed : float or None
        The share of its words that changed, where the delta says so.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    bytes: int
    stored_bytes: int
    changed: float | None


@dataclass(frozen=True)
class DeltaReport:
    """A delta file.

    Attributes
    ----------
    path : str
        Where it is.
    base : str or None
        Where its base was, relative to it.
    file_bytes : int
        Its size.
    target_bytes : int
        Size of the target's tensors.
    ratio : float
        Size of the target's tensors over the size of the file.
    tensors : tuple of TensorChange
        In the order of the target's files.
    others : tuple of (str, int)
        The target's other files, and what they take in the delta: 0 if they are as in the base.
    """

    path: str
    base: str | None
    file_bytes: int
    target_bytes: int
    ratio: float
    tensors: tuple[TensorChange, ...]
    others: tuple[tuple[str, int], ...]


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
        If a state cannot be read; its subclasses say why.
    DestinationExists, InvalidDestination
        If the destination cannot be used.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If a state is damaged, or newer than this version.

    Examples
    --------
    >>> from tpde.store.patching import diff
    >>> diff("epoch_9", "epoch_10", "epoch_10.tpde").ratio  # doctest: +SKIP
    143.9
    """
    count, out = check_threads(threads), Path(delta)
    refuse_file(out, force)
    _refuse_same(out, base, target)
    old = open_state(Path(base))
    try:
        new = open_state(Path(target))
        try:
            _refuse_unlike(old, new)
            hint, sink = hint_for(Path(base), out), FileSink(out, force=force)
            try:
                write_delta(
                    old,
                    new,
                    sink,
                    hint=hint,
                    fast=fast,
                    comparer=HostComparer(old, new, count),
                    threads=count,
                    progress=progress,
                )
                sink.commit()
            except BaseException:
                sink.abort()
                raise
        finally:
            new.close()
    finally:
        old.close()
    return inspect_delta(out)


def _refuse_unlike(base: State, target: State) -> None:
    """Refuse a file and a directory: neither says where in the other it belongs."""
    alone = [set(it.headers) == {""} for it in (base, target)]
    if alone[0] != alone[1]:
        file, folder = (base, target) if alone[0] else (target, base)
        raise InvalidInput(
            f"`{file.name}` is a file, `{folder.name}` is a directory", hint="compare like with like"
        )


def _refuse_same(destination: Path, *sources: str | os.PathLike[str]) -> None:
    for source in sources:
        if same_place(Path(source), destination):
            raise InvalidDestination(
                f"`{destination}` is one of the sources, which are never modified",
                hint="choose another destination",
                where=str(destination),
            )


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
    >>> from tpde.store.patching import patch
    >>> patch("epoch_9", "epoch_10.tpde", "epoch_10")  # doctest: +SKIP
    """
    count, out = check_threads(threads), Path(target)
    _refuse_same(out, base, delta)
    state = _open_on(DeltaFile(FileSource(_existing_delta(delta))), base)
    try:
        if "" in state.headers:
            refuse_file(out, force)
            _write_file(state, "", out, force, count, progress)
            return
        for source in (Path(base), Path(delta)):
            refuse_nested(source, out)
        names = {*state.headers, *state.others}
        names |= {str(it) for name in names for it in PurePosixPath(name).parents if it.parts}
        with new_folder(out, replaceable(out, names), force=force) as folder:
            for name in state.headers:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _write_file(state, name, folder / name, False, count, progress)
            for name, content in state.others.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content())
    finally:
        state.close()


def _open_on(file: DeltaFile, base: str | os.PathLike[str]) -> DeltaState:
    """Open a delta on a base that is named."""
    try:
        state = open_state(Path(base))
    except BaseException:
        file.close()
        raise
    return DeltaState(file, state)


def _existing_delta(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not found.exists():
        raise InvalidInput(f"`{found}` does not exist", hint="check the path", where=str(found))
    if not is_delta_file(found):
        raise InvalidInput(
            f"`{found}` is no delta", hint="name a file that `tpde diff` wrote", where=str(found)
        )
    return found


def _write_file(
    state: State, name: str, destination: Path, force: bool, threads: int, progress: Progress
) -> None:
    """Restore one safetensors file."""
    header = state.headers[name]
    entries = parse_header(header, f"`{state.name}`").entries
    sink: Sink = FileSink(destination, force=force)
    try:
        sink.write(0, [len(header).to_bytes(8, "little") + header])
        for tensor, entry in entries.items():
            data = state.read((name, tensor), threads)
            sink.write(8 + len(header) + entry.begin, [data])
            progress(data.size)
        sink.commit()
    except BaseException:
        sink.abort()
        raise


def verify_delta(
    delta: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> list[Problem]:
    """Check every byte of a delta, and with its base that the target comes out of it.

    Parameters
    ----------
    delta : path-like
        The delta.
    base : path-like, optional
        Its base. Without, every byte of the delta is checked by its hashes, and no tensor is made.
    threads : int, optional
        By default one for each processor.
    progress : callable
        Called with a number of bytes of the target when they are done.

    Returns
    -------
    list of Problem
        What is wrong, by tensor; empty if nothing is.

    Raises
    ------
    InvalidInput
        If it is no delta, or the base is no state.
    Truncated, UnsupportedVersion
        If it is incomplete, or newer than this version.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If the base cannot be opened. A tensor of it that is damaged is a problem.
    """
    path, count = _existing_delta(delta), check_threads(threads)
    problems: list[Problem] = []

    def attempt(tensor: str | None, check: Callable[[], object]) -> None:
        try:
            check()
        except TpdeError as error:
            chunk = error.chunk if isinstance(error, Corrupt) else None
            problems.append(Problem(str(path), tensor, chunk, str(error)))

    try:
        file = DeltaFile(FileSource(path))
    except Corrupt as error:
        return [Problem(str(path), error.tensor, None, str(error))]
    try:
        for it in file.head.tensors:
            attempt(it.name, lambda it=it: file.payload(it))  # type: ignore[misc]
            progress(0 if base is not None else it.spec.nbytes)
        for other in file.head.others:
            if other.size:
                attempt(None, lambda other=other: file.other(other))  # type: ignore[misc]
    finally:
        file.close()
    if base is None or problems:
        return problems
    state = _open_on(DeltaFile(FileSource(path)), base)
    try:
        for key, spec in state.specs.items():
            attempt(key[1], lambda key=key: state.read(key, count))  # type: ignore[misc]
            progress(spec.nbytes)
        for content in state.others.values():
            attempt(None, content)
    finally:
        state.close()
    return problems


def inspect_delta(path: str | os.PathLike[str]) -> DeltaReport:
    """Tell what is in a delta.

    Raises
    ------
    InvalidInput
        If it is no delta.
    Truncated, Corrupt, UnsupportedVersion
        If it is damaged, or newer than this version.
    """
    file = DeltaFile(FileSource(_existing_delta(path)))
    try:
        return _report(file)
    finally:
        file.close()


def _report(file: DeltaFile) -> DeltaReport:
    tensors = []
    for entry in file.head.files:
        for it in entry.tensors if isinstance(entry, WeightsEntry) else ():
            words = it.spec.nbytes // DTYPES[it.spec.dtype].word_bytes
            changed = 0.0 if it.codec == SAME else None
            if it.codec == SPARSE and words:
                changed = int(it.changes.sum(dtype="u8")) / words
            tensors.append(
                TensorChange(
                    it.name,
                    entry.name,
                    it.spec.dtype,
                    it.spec.shape,
                    it.codec,
                    it.spec.nbytes,
                    it.size,
                    changed,
                )
            )
    total = sum(it.bytes for it in tensors)
    others = tuple((it.name, it.size) for it in file.head.others)
    return DeltaReport(file.name, file.head.base, file.size, total, total / file.size, tuple(tensors), others)
