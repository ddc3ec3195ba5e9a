"""Work in processes of its own: new ones for one result, or forks that tell their results one by one.

What is cut short leaves something: `rows` gives each row as it comes. Its processes are forks of this one,
which has imported everything and has not touched a GPU. What it has is frozen for the garbage collector:
otherwise a collection in a fork would write to all of it, and so copy it, for half a second and hundreds of
MiB.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.report import note

Given = dict[str, Any]
Perform = Callable[[str, Given], None]
ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """A process did not do what it was to."""


def _command(handle: int, function: Callable[..., Any], given: list[Any]) -> list[str]:
    """What `main` below gets: a new interpreter that calls a function of a module."""
    what = [str(handle), function.__module__, function.__qualname__, json.dumps(given)]
    return [sys.executable, "-m", "benchmarks.harness.processes", *what]


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, **(more or {})}


def reason(error: BaseException) -> str:
    """One line that says why something has no result."""
    if isinstance(error, ImportError):
        return "not installed"
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:120]


def call(
    function: Callable[..., Any],
    *given: Any,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Call a function of a module in a new interpreter; arguments and the result are those of JSON.

    What it prints is thrown away; what it says on stderr is said here if there is a problem.

    Raises
    ------
    Failed
        If it fails, or takes more than `limit` seconds.
    """
    with tempfile.TemporaryFile() as answer:
        try:
            done = subprocess.run(
                _command(answer.fileno(), function, list(given)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                timeout=limit,
                pass_fds=[answer.fileno()],
                env=_environment(environment),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {limit:.0f} s") from None
        answer.seek(0)
        text = answer.read()
    found = json.loads(text) if text else {"failed": f"exit code {done.returncode}"}
    if isinstance(found, dict) and any("problem" in key or "failed" in key for key in found):
        note(done.stderr[-3000:])
        if "failed" in found:
            raise Failed(found["failed"])
    return found


def main() -> None:
    """What a new interpreter does."""
    handle, module, name, given = sys.argv[1:]
    try:
        result = getattr(importlib.import_module(module), name)(*json.loads(given))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        result = {"failed": reason(error)}
    os.write(int(handle), json.dumps(result).encode())
    if isinstance(result, dict) and "failed" in result:
        sys.exit(1)


def _fork(writer: int, perform: Perform, task: str, given: Given, environment: Mapping[str, str]) -> None:
    os.dup2(writer, 1)
    os.close(writer)
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        # Some library has looked for GPUs when it was imported: CUDA does not work in forks any more.
        command = _command(1, perform, [task, given])
        os.execve(sys.executable, command, _environment(None))
    perform(task, given)


def rows(
    perform: Perform,
    task: str,
    given: Mapping[str, Any],
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Given]:
    """Perform a task of a benchmark and give the JSON objects that it tells, each as it comes.

    The last is `{"problem": ...}` if the process failed, or took more than `limit` seconds and was ended.
    """
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_fork,
        args=(writer, perform, task, dict(given), dict(environment or {})),
        daemon=True,
    )
    process.start()
    os.close(writer)
    over = threading.Event()

    def end() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("{"):
                    with contextlib.suppress(ValueError):  # the last line of a process that was ended
                        yield json.loads(line)
        process.join()
    finally:
        timer.cancel()
        if process.is_alive():
            process.kill()
        process.join()
    if over.is_set():
        yield {"problem": f"{task}: took more than {limit:.0f} s"}
    elif process.exitcode:
        yield {"problem": f"{task}: exit code {process.exitcode}"}


def tell(**row: Any) -> None:
    """Print a row for the parent of a fork."""
    print(json.dumps(row), flush=True)


def told(found: list[Given], key: str, otherwise: Any = None) -> Any:
    """The first value that a fork told under a name."""
    return next((row[key] for row in found if key in row), otherwise)


def guarded(tasks: Mapping[str, Callable[[Given], None]], task: str, given: Given) -> None:
    """Do a task in this fork; what goes wrong is told."""
    try:
        tasks[task](given)
    except Exception as error:
        traceback.print_exc()
        tell(problem=f"{task}: {reason(error)}")


if __name__ == "__main__":
    main()
