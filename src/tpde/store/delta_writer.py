"""Making a delta file from two states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
import zstandard

from tpde.codec import delta, delta_planner
from tpde.codec.delta import ChangeModel, chunk_range
from tpde.codec.delta_planner import sample_step
from tpde.codec.native import Bytes
from tpde.errors import InvalidInput
from tpde.files.progress import Progress, no_progress
from tpde.format.delta_head import (
    HEADER,
    SPARSE,
    WITH_BASE,
    Head,
    OtherEntry,
    TensorEntry,
    WeightsEntry,
    serialize,
)
from tpde.io.committed import committed
from tpde.io.sinks import ByteSink, FileSink
from tpde.store.comparer import Comparer, HostComparer, Kind, Wanted, kind_of
from tpde.store.delta_file import refuse_too_large
from tpde.store.states import BaseTensors, Key, State

# Larger files without weights are compressed at a quicker level: 1 MiB of text takes 25 ms instead of 600,
# and 17 % more bytes.
_SLOW_BYTES = 4 << 20


class _Pair(NamedTuple):
    key: Key
    base: Key | None  # of the same dtype and shape


class _Writer:
    """Payloads to the sink, one after the other."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink, self._at = sink, HEADER.size

    def write(self, data: Bytes) -> int:
        """Write a payload; returns its hash."""
        if not data.size:
            return 0
        self._sink.write(self._at, [data])
        self._at += data.size
        return xxhash.xxh3_64_intdigest(data.data)

    def finish(self, head: Head) -> None:
        header, tail = serialize(head)
        self._sink.write(self._at, [tail])
        self._sink.write(0, [header])


def _pairs(base: State, target: State) -> list[_Pair]:
    bases = BaseTensors(base.specs, base.name)
    pairs = []
    for key, spec in target.specs.items():
        found = bases.find(key)
        pairs.append(_Pair(key, found if found is not None and base.specs[found] == spec else None))
    return pairs


def _sample(
    comparer: Comparer, target: State, pairs: list[_Pair], kind: Kind, fast: bool
) -> tuple[list[tuple[Bytes, Bytes]], int]:
    """Chunks of all tensors of a kind, evenly spread, and how many there are for each."""
    mine = [it for it in pairs if it.base is not None and kind_of(target.specs[it.key]) == kind]
    counts = [delta.chunk_count(target.specs[it.key].nbytes // kind[0]) for it in mine]
    step, number, wanted = sample_step(sum(counts), kind[0], fast=fast), 0, []
    for it, count in zip(mine, counts, strict=True):
        nbytes = target.specs[it.key].nbytes
        ranges = [chunk_range(i, nbytes, kind[0]) for i in range(-number % step, count, step)]
        number += count
        if ranges and it.base is not None:
            wanted.append(Wanted(it.base, it.key, ranges))
    return comparer.chunks(wanted), step


def _models(
    comparer: Comparer, target: State, pairs: list[_Pair], fast: bool, threads: int
) -> dict[Kind, ChangeModel]:
    models = {}
    for kind in sorted({kind_of(target.specs[it.key]) for it in pairs if it.base is not None}):
        parts, step = _sample(comparer, target, pairs, kind, fast)
        models[kind] = ChangeModel(
            delta_planner.choose(parts, *kind, step=step, fast=fast, threads=threads), encode=True
        )
    return models


def _refuse_large_files(base: State, target: State) -> None:
    """Refuse early what would be refused at the end. Files of one size may be equal, and be in no delta."""
    for name, size in target.other_bytes.items():
        if base.other_bytes.get(name) != size:
            refuse_too_large(name, size)


def _other_files(base: State, target: State) -> Iterator[tuple[OtherEntry, Bytes]]:
    for name in target.others:
        content = target.others[name]()
        entry, payload = OtherEntry(name, xxhash.xxh3_128_hexdigest(content)), b""
        if name not in base.others or base.others[name]() != content:
            refuse_too_large(name, len(content))
            level = 19 if len(content) <= _SLOW_BYTES else 9
            payload = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(content)
            entry.size = len(payload)
        yield entry, np.frombuffer(payload, np.uint8)


def write_delta(
    base: State,
    target: State,
    sink: ByteSink,
    *,
    hint: str | None,
    fast: bool,
    comparer: Comparer,
    threads: int,
    progress: Progress,
) -> Head:
    """Write the delta that turns one state into the other; returns what it is.

    Parameters
    ----------
    base, target : State
        The states.
    sink : ByteSink
        Where it goes. Not committed.
    hint : str or None
        Where the base is, relative to the delta.
    fast : bool
        Make models of one class.
    comparer : Comparer
        What compares these states. The bytes do not depend on it.
    threads : int
        How many threads choose models.
    progress : callable
        Called with a number of the target's bytes when they are done.

    Raises
    ------
    InvalidInput
        If a delta cannot hold the target.
    """
    _refuse_large_files(base, target)
    pairs, writer = _pairs(base, target), _Writer(sink)
    models = _models(comparer, target, pairs, fast, threads)
    numbers: dict[Kind, int] = {}  # of the models that are used
    entries: dict[str, list[TensorEntry]] = {name: [] for name in target.headers}
    for it in pairs:
        spec = target.specs[it.key]
        entry, stored = comparer.compare(it.key, it.base, models)
        entry.codec, entry.size = stored.codec, stored.data.size
        if stored.codec not in WITH_BASE:
            entry.base = b""
        if stored.sparse is not None and stored.codec == SPARSE:
            entry.model = numbers.setdefault(kind_of(spec), len(numbers))
            entry.changes, entry.sizes = stored.sparse.changes, stored.sparse.sizes
            entry.check = stored.sparse.check
        entry.payload_hash = writer.write(stored.data)
        entries[it.key[0]].append(entry)
        progress(spec.nbytes)
        del stored  # before the next one is made
    files: list[WeightsEntry | OtherEntry] = []
    for name, header in target.headers.items():
        shared = base.headers.get(name) == header
        found = xxhash.xxh3_128_hexdigest(header)
        files.append(WeightsEntry(name, None if shared else header, found, entries[name]))
    for other, payload in _other_files(base, target):
        other.payload_hash = writer.write(payload)
        files.append(other)
    head = Head(hint, files, [models[kind].data for kind in numbers])
    writer.finish(head)
    return head


def write_delta_file(
    base: State,
    target: State,
    path: Path,
    *,
    hint: str | None,
    fast: bool,
    threads: int,
    force: bool,
    progress: Progress = no_progress,
    check: Callable[[], None] = lambda: None,
) -> Head:
    """Write a delta to a file, from what the states read; it appears when it is complete. Returns what it is.

    Parameters
    ----------
    base, target, hint, fast, progress
        As for `write_delta`.
    path : Path
        The file.
    threads : int
        How many compare and encode.
    force : bool
        Replace an existing file.
    check : callable
        Called when all is read: where it raises, no file appears.
    """
    comparer = HostComparer(base, target, threads)
    with committed(FileSink(path, force=force)) as sink:
        head = write_delta(
            base, target, sink, hint=hint, fast=fast, comparer=comparer, threads=threads, progress=progress
        )
        check()
        return head


def hint_for(base: Path, destination: Path) -> str:
    """Where a base is, relative to a delta's folder. A link in the delta's place is replaced, not followed.

    Raises
    ------
    InvalidInput
        If that is no text, which a delta cannot hold.
    """
    found = Path(os.path.relpath(os.path.realpath(base), os.path.realpath(destination.parent))).as_posix()
    try:
        found.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"a delta cannot hold the path of its base, `{found}`, which is not UTF-8",
            hint="rename what is not UTF-8 in it",
            where=str(base),
        ) from None
    return found
