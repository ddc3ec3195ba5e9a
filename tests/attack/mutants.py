"""Mutated files and directories, whole, with hashes recomputed or not: opened, inspected, verified, unpacked.

Whatever they hold, there is an error that callers are told of, or the right bytes: of what is not sealed
again the source's, of what is, those that the reference decodes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import changes

from tpde.access import safe_open
from tpde.codec import reference
from tpde.errors import TpdeError
from tpde.files.inspection import inspect
from tpde.files.operations import pack, unpack, verify
from tpde.files.reader import PackedFile
from tpde.format.constants import MANIFEST

from .field import Finding
from .parts import LIMIT, Parts, bases, change, is_blob, put_together, seal, take_apart

SECONDS = 2.0  # of processor time for one file of at most 1 MiB
MEMORY = 1 << 30  # bytes of address space above what the process has
_HANGS = 60  # seconds
_FOLDERS = 8  # one mutant in so many is a directory


class _Workshop:
    """Sound files and a sound directory, and a folder to change them in."""

    def __init__(self, folder: Path) -> None:
        self.folder = self.mutant = folder
        self.besides = 0.0  # seconds that the last mutant and the reference took
        self.sound = [(data, take_apart(data)) for data in bases()]
        self.source = changes.make_source(folder / "source")
        pack(self.source, folder / "packed", threads=1)
        self.needed = changes.content(self.source)
        self.needed_of = [self._unpacked(data) for data, _ in self.sound]

    def _unpacked(self, data: bytes) -> bytes:
        (self.folder / "sound").write_bytes(data)
        unpack(self.folder / "sound", self.folder / "sound.back", threads=1, force=True)
        return (self.folder / "sound.back").read_bytes()

    def try_one(self, seed: int, number: int) -> Iterator[str]:
        """Make a mutant, and say what is wrong with what comes of it."""
        draw = random.Random(f"{seed}:{number}")
        began = time.process_time()
        text = None
        try:
            text = self._directory(draw) if number % _FOLDERS == 0 else self._file(draw)
        except AssertionError as error:
            text = str(error)
        except BaseException:
            text = traceback.format_exc()
        if text:
            yield text
        if (taken := time.process_time() - began - self.besides) > SECONDS:
            yield f"it takes {taken:.1f} s of processor time"

    @contextlib.contextmanager
    def _not_counted(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.besides += time.process_time() - began

    def _file(self, draw: random.Random) -> str | None:
        which = draw.randrange(len(self.sound))
        data, parts = self.sound[which]
        sealed = draw.random() < 0.5
        self.besides = 0.0
        changed: Parts | None = None
        with self._not_counted():
            if draw.random() < 0.1:
                sealed, mutant = False, changes.change_bytes(data, draw)
            else:
                changed = change(parts, draw)
                if sealed:
                    for it in changed.tensors:
                        if is_blob(it):
                            it.data = seal(it.data)
                mutant = put_together(changed, sealed=sealed)
            path, back = self.folder / "mutant.safetensors", self.folder / "back"
            path.write_bytes(mutant)
        self.mutant = path
        found: dict[str, Any] = {}
        for action in (self._open, inspect):
            found[action.__name__] = _told(action, path)
        size, resaved = found["_open"] if found["_open"] is not None else (0, True)
        if size > LIMIT:
            return None
        problems = _told(lambda it: verify(it, threads=1), path)
        back.unlink(missing_ok=True)
        done = _told(lambda it: unpack(it, back, threads=1), path)
        if problems == [] and done is None:
            return "verify finds nothing, and unpack refuses it"
        if problems and done is not None:
            return f"verify finds {problems[0].message}, and unpack does not"
        if not sealed and done is not None and not resaved and back.read_bytes() != self.needed_of[which]:
            return "other bytes than the source's are unpacked without an error"
        with self._not_counted():
            return _compared(path, changed) if changed is not None and found["_open"] is not None else None

    def _open(self, path: Path) -> tuple[int, bool]:
        with safe_open(path, "np"):
            pass
        with PackedFile(path) as file:
            return sum(it.nbytes for it in file.specs.values()), file.original is None

    def _directory(self, draw: random.Random) -> str | None:
        self.besides = 0.0
        place = self.folder / "place"
        changed, back = place / "changed", place / "back"
        with self._not_counted():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self.folder / "packed", changed, symlinks=True)
            what = [changes.change(changed, draw) for _ in range(draw.choice((1, 1, 2)))]
            sealed = draw.random() < 0.5
            if sealed:
                _seal_manifest(changed / MANIFEST)
        self.mutant = changed
        _told(inspect, changed)
        problems = _told(lambda it: verify(it, threads=1), changed)
        done = _told(lambda it: unpack(it, back, threads=1), changed)
        if sorted(it.name for it in place.iterdir()) != (["back"] if done else []) + ["changed"]:
            return f"{what}: unpacking makes {sorted(it.name for it in place.iterdir())}"
        if problems == [] and done is None:
            return f"{what}: verify finds nothing, and unpack refuses it"
        if problems == [] and not sealed and self._differs(changed, back):
            return f"{what}: other files than the source's are unpacked without an error"
        return None

    def _differs(self, changed: Path, back: Path) -> bool:
        """Whether other files came out. Without a manifest nothing but weights is described."""
        found = changes.content(back)
        if (changed / MANIFEST).exists():
            return found != self.needed
        return _weights(found) != _weights(self.needed)


def _weights(content: dict[str, Any]) -> dict[str, Any]:
    return {name: it for name, it in content.items() if name.endswith(".safetensors")}


def _told(action: Callable[[Path], Any], path: Path) -> Any:
    """What an action gives, or None if it says what is wrong."""
    try:
        return action(path)
    except TpdeError:
        return None


def _seal_manifest(path: Path) -> None:
    """Make the hashes of the texts that a manifest holds right."""
    try:
        value = json.loads(path.read_bytes())
        for it in value["files"].values():
            if "original" in it:
                it["sha256"] = hashlib.sha256(it["original"].encode()).hexdigest()
        path.write_text(json.dumps(value))
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        pass


def _compared(path: Path, parts: Parts) -> str | None:
    """Whether reader and reference agree on every blob."""
    blobs = {it.name: it.data for it in parts.tensors}
    with PackedFile(path) as file:
        for name in file.packed_names():
            blob = blobs[name + "_tpde"]
            needed = _told(lambda _, blob=blob: reference.decode_blob(blob, limit=LIMIT), path)  # type: ignore[misc]
            found = None
            with contextlib.suppress(TpdeError):
                tensor = file.tensor(name)
                if tensor.spec.nbytes > LIMIT:
                    continue
                found = file.read(name).tobytes()
            if found is not None and needed is not None and found != needed:
                return f"tensor `{name}`: other words than the reference's"
            if found is None and needed is not None and not _of_the_container(file, name):
                return f"tensor `{name}`: refused, and the reference reads it"
            if found is not None and needed is None and _is_refused(blob):
                return f"tensor `{name}`: read, and the reference refuses it"
    return None


def _of_the_container(file: PackedFile, name: str) -> bool:
    """Whether a tensor is another than the source's header says, of which the reference knows nothing."""
    try:
        file.tensor(name)
    except TpdeError as error:
        return "in the source's header" in str(error)
    return False


def _is_refused(blob: bytes) -> bool:
    """Whether the reference refuses what every reader must.

    Reading a tensor does not check its hash, and `max_stream_bytes` binds those who rely on it (format.md 2).
    """
    try:
        reference.decode_blob(blob, limit=LIMIT)
    except TpdeError as error:
        return not (error.message.startswith("hash is") or error.message.endswith("above max_stream_bytes"))
    return False


def _work(folder: Path, seed: int, numbers: range, seconds: float, at: Any, told: Connection) -> None:
    """Try mutants in this process until the time is over."""
    faulthandler.disable()  # a process that ends is told of here
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process where it hangs
    warnings.simplefilter("ignore")
    workshop = _Workshop(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    end = time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() >= end:
            break
        at.value = number
        signal.alarm(_HANGS)
        for text in workshop.try_one(seed, number):
            told.send((number, text, str(workshop.mutant)))
            told.recv()  # when the mutant has been kept
    signal.alarm(0)
    at.value += 1
    told.send(None)
    os._exit(0)


def run(folder: Path, keep: Path, seed: int, numbers: range, seconds: float) -> tuple[int, list[Finding]]:
    """Try mutants in processes with limits; returns how many, and what was found with those that are kept."""
    fork = multiprocessing.get_context("fork")
    end = time.monotonic() + seconds
    findings: list[Finding] = []
    start = numbers.start
    while start < numbers.stop and time.monotonic() < end:
        place = folder / f"from-{start}"
        place.mkdir()
        at, (ours, theirs) = fork.Value("q", start), fork.Pipe()
        rest = range(start, numbers.stop)
        worker = fork.Process(target=_work, args=(place, seed, rest, end - time.monotonic(), at, theirs))
        worker.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            while (told := ours.recv()) is not None:
                number, text, mutant = told
                findings.append(Finding(str(number), f"{text} ({_keep(Path(mutant), keep, number)})"))
                ours.send(None)
        worker.join()
        start = int(at.value)
        if worker.exitcode:
            findings.append(Finding(str(start), f"the process ended with code {worker.exitcode}"))
            start += 1
        shutil.rmtree(place)
    return start - numbers.start, findings


def _keep(mutant: Path, keep: Path, number: int) -> Path:
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"mutant-{number}"
    if mutant.is_dir():
        shutil.copytree(mutant, path, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copyfile(mutant, path)
    return path
