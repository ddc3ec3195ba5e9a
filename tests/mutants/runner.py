"""Runs tests in copies of the tree, each in a process that has the libraries, but not yet the package."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .mutant import ROOT, Mutant
from .tree import Core, copy_library, copy_tree

KILLED, SURVIVED, HUNG, BROKEN = "killed", "survived", "hung", "broken"
TEST_SECONDS = 120  # of one test, after which it hangs
_ALL_SECONDS = 1200  # of all tests of a mutant
# Importing these takes 5 to 10 s, most of a mutant's time: processes are forked from one that has them.
_LIBRARIES = ("numpy", "torch", "torch._dynamo", "transformers.modeling_utils", "diffusers")
_FAILED = re.compile("^(FAILED|ERROR) ", re.MULTILINE)
_NO_PACKAGE = 90  # an exit code that pytest does not have
_LIMITS = (f"faulthandler_timeout={TEST_SECONDS}", "faulthandler_exit_on_timeout=true")


class Outcome(NamedTuple):
    """What became of a mutant.

    Attributes
    ----------
    mutant : Mutant
        Which.
    result : str
        `killed`: a test failed; `survived`: none did; `hung`: a test did not end; `broken`: none ran.
    seconds : float
        That it took.
    log : str
        What pytest said.
    """

    mutant: Mutant
    result: str
    seconds: float
    log: str


def warm() -> None:
    """Import the libraries, as `tests/conftest.py` would have it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:  # its tests skip themselves
            continue
    if "tpde" in sys.modules:
        raise RuntimeError("a library imports tpde: forked processes would test that one")


def _main(tree: Path, tests: Sequence[str], log: Path) -> None:
    """Run tests of a copy, in a process of its own."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(tree)
    package = str(tree / "src")
    sys.path[:] = [
        package,
        str(tree),
        *(it for it in sys.path if it not in ("", str(ROOT), str(ROOT / "src"))),
    ]
    os.environ["PYTHONPATH"] = package
    sys.modules["__main__"] = ModuleType("__main__")  # else processes that tests spawn import this one's
    code = _NO_PACKAGE
    try:
        import pytest

        import tpde

        if Path(tpde.__file__).is_relative_to(tree):
            # Plugins are there already, as parts of libraries.
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            options += [it for limit in _LIMITS for it in ("-o", limit)]
            code = int(pytest.main([*options, *(f"tests/{it}" for it in tests)]))
        else:
            print(f"tpde comes from {tpde.__file__}, not from the copy in {tree}")
    except BaseException as error:  # a mutant may break the import
        print(f"ERROR {type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def result_of(code: int | None, log: str) -> str:
    """What an exit code, None of a run that did not end, and a log of pytest say of a mutant."""
    if code is None or "Timeout (" in log:
        return HUNG
    if code == 0:
        return SURVIVED
    # Else pytest itself failed, or found no tests. Signals have negative numbers: a core may crash.
    killed = code < 0 or (code in (1, 2) and _FAILED.search(log) is not None)
    return KILLED if killed else BROKEN


class _Job(NamedTuple):
    process: Any
    mutant: Mutant
    tree: Path
    start: float


class Runner:
    """Runs mutants.

    Parameters
    ----------
    folder : Path
        For copies, objects and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._base = folder, folder / "base"
        self._core = Core(folder / "objects")
        self._fork = multiprocessing.get_context("fork")
        copy_tree(ROOT, self._base)
        copy_library(self._base)

    def baseline(self, tests: Sequence[str]) -> Outcome:
        """Run tests on the tree as it is; they must pass, or they would kill everything.

        Their compiled modules are then copied with the tree.
        """
        none = Mutant("", "", "", "", "", tuple(tests))
        job = self._start(none, self._base)
        job.process.join()  # however long it takes
        return self._finish(job)

    def run(self, mutants: Sequence[Mutant], jobs: int) -> Iterator[Outcome]:
        """Run mutants, several at a time; their outcomes come as they are there.

        Raises
        ------
        Stale
            If one of them cannot be put into the tree.
        DoesNotCompile
            If one of the core is no C.
        """
        waiting, running = list(reversed(mutants)), list[_Job]()
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(self._begin(waiting.pop()))
            ends = min(it.start for it in running) + _ALL_SECONDS
            connection.wait([it.process.sentinel for it in running], max(ends - time.monotonic(), 0))
            now = time.monotonic()
            for job in [it for it in running if not it.process.is_alive() or now - it.start > _ALL_SECONDS]:
                running.remove(job)
                yield self._finish(job)

    def _begin(self, mutant: Mutant) -> _Job:
        tree = self._folder / mutant.name
        copy_tree(self._base, tree)
        (tree / mutant.path).write_text(mutant.changed(tree), encoding="utf-8")
        if mutant.in_core:
            self._core.build(tree, mutant)
        return self._start(mutant, tree)

    def _start(self, mutant: Mutant, tree: Path) -> _Job:
        process = self._fork.Process(target=_main, args=(tree, mutant.tests, tree / "log"))
        process.start()
        return _Job(process, mutant, tree, time.monotonic())

    def _finish(self, job: _Job) -> Outcome:
        job.process.join(max(job.start + _ALL_SECONDS - time.monotonic(), 1))
        if alive := job.process.is_alive():
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.join()
        log = (job.tree / "log").read_text(encoding="utf-8", errors="replace")
        seconds = time.monotonic() - job.start
        outcome = Outcome(job.mutant, result_of(None if alive else job.process.exitcode, log), seconds, log)
        if job.tree != self._base:
            shutil.rmtree(job.tree)
        return outcome
