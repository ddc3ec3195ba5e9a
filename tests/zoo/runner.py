"""Running checks in processes of their own: a crash or a hang is a failure, not the end of the run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 600.0  # seconds for one task
FLOW = "flow"  # the check of a task that is a flow


@dataclass(frozen=True)
class Task:
    """A check of an architecture in a dtype, or a flow."""

    name: str
    check: str
    dtype: str = ""


@dataclass(frozen=True)
class Result:
    """How it went.

    `ok`, `refused` by name, `fail`, `plain` where plain models do not do it either, or `absent` where the
    installed libraries do not have it.
    """

    task: Task
    status: str
    reason: str = ""
    libraries: str = ""  # and their versions, of results that were kept


def keep(file: Path, result: Result) -> None:
    """Add a result to a file of results, a line of JSON each."""
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def kept(file: Path) -> dict[Task, Result]:
    """Read a file of results; the last result of a task holds."""
    if not file.exists():
        return {}
    found = [json.loads(line) for line in file.read_text().splitlines()]
    results = [Result(Task(**it["task"]), it["status"], it["reason"], it["libraries"]) for it in found]
    return {result.task: result for result in results}


def warm() -> None:
    """Import what all processes are forked with. Nothing may compute yet, or threads would be left behind."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    import diffusers
    import torch
    import transformers

    import tpde.integrations.diffusers
    import tpde.integrations.transformers  # noqa: F401

    from . import checks, flows  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    diffusers.logging.set_verbosity_error()
    diffusers.logging.disable_progress_bar()
    logging.getLogger("tpde").setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def do(task: Task) -> Result:
    """Do one task here."""
    if task.check == FLOW:
        from .flows import FLOWS, verdict

        return Result(task, *verdict(FLOWS[task.name]))
    from .architectures import ARCHITECTURES
    from .case import Case, PlainFails, one_line
    from .checks import CHECKS
    from .shrink import Absent

    case = Case(ARCHITECTURES[task.name], task.dtype)
    try:
        CHECKS[task.check](case)
    except PlainFails as error:
        return Result(task, "plain", str(error))
    except Absent as error:
        return Result(task, "absent", str(error))
    except Exception as error:
        return Result(task, "fail", one_line(error))
    finally:
        case.close()
    return Result(task, "ok")


def _work(tasks: list[Task], pipe: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for task in tasks:
        pipe.send(do(task))
    pipe.close()


@dataclass
class _Worker:
    tasks: list[Task]
    pipe: Connection = field(init=False)
    process: Any = field(init=False)
    since: float = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(self.tasks, theirs))
        self.process.start()
        theirs.close()
        self.since = time.monotonic()

    def stop(self, late: bool) -> str:
        """End the process, and say how it ended: by itself, or because it was `late`."""
        if late:
            self.process.kill()
        self.process.join()
        self.pipe.close()
        if late:
            return f"still running after {LIMIT:.0f} s"
        code = self.process.exitcode
        return (
            f"the process died of {signal.Signals(-code).name}"
            if code < 0
            else f"the process exited with {code}"
        )


def run(tasks: Iterable[Task], jobs: int, report: Callable[[Result], None]) -> list[Result]:
    """Run tasks, those of one architecture one after the other in one process.

    Parameters
    ----------
    tasks : iterable of Task
    jobs : int
        How many processes at a time.
    report : callable
        Called with each result as it comes.

    Returns
    -------
    list of Result
        In the order of the tasks.
    """
    groups: dict[str, list[Task]] = {}
    order = list(tasks)
    for task in order:
        groups.setdefault(task.name, []).append(task)
    waiting = list(groups.values())[::-1]
    workers: list[_Worker] = []
    results: dict[Task, Result] = {}

    def done(result: Result) -> None:
        results[result.task] = result
        report(result)

    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(_Worker(waiting.pop()))
        ready = wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            late = time.monotonic() - worker.since > LIMIT
            ended = late
            if worker.pipe in ready:
                try:
                    done(worker.pipe.recv())
                    worker.tasks = worker.tasks[1:]
                    worker.since = time.monotonic()
                    late = ended = False
                except EOFError:
                    late, ended = False, True
            if ended:
                workers.remove(worker)
                how = worker.stop(late)
                if worker.tasks:  # what it was at is lost; the rest gets a new process
                    done(Result(worker.tasks[0], "fail", how))
                    if worker.tasks[1:]:
                        waiting.append(worker.tasks[1:])
    return [results[task] for task in order]
