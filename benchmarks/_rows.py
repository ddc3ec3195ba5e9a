"""Work in a process of its own that tells its results one by one: what is cut short leaves something.

Processes are forks of this one, which has imported everything and has not touched a GPU. What it has is
frozen for the garbage collector: otherwise a collection in a fork would write to all of it, and so copy it,
for half a second and hundreds of MiB.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Given = dict[str, Any]
Perform = Callable[[str, Given], None]


def _child(
    writer: int, script: str, task: str, given: Given, environment: Mapping[str, str], perform: Perform
) -> None:
    os.dup2(writer, 1)
    os.close(writer)
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        # Some library has looked for GPUs when it was imported: CUDA does not work in forks any more.
        os.execv(sys.executable, [sys.executable, script, "--task", task, json.dumps(given)])
    perform(task, given)


def rows(
    script: str,
    task: str,
    given: Mapping[str, Any],
    limit: float,
    perform: Perform,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Given]:
    """Perform a task of a benchmark and give the JSON objects that it tells, each as it comes.

    The last is `{"problem": ...}` if the process failed, or took more than `limit` seconds and was ended.
    """
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_child,
        args=(writer, str(script), task, dict(given), dict(environment or {}), perform),
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
    """Print a row for the parent."""
    print(json.dumps(row), flush=True)
