"""A process with the shim, which forks once for each attack: an operation in it takes milliseconds.

`python -m tests.attack.server` reads requests from stdin, a line of JSON each, and answers each with one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import shim
from .shim import Arming

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 20  # seconds for one operation; they take a tenth of one
NEXT_RUN = "next run"


@dataclass(frozen=True)
class Outcome:
    """How an operation ended.

    Attributes
    ----------
    how : str
        `done`, `error`, `interrupted`, or `killed`; or `crash` for any other end.
    text : str
        The error, or what says why it is a crash.
    expected : bool
        Whether the error is one that callers are told of.
    calls : int
        How many calls counted.
    left_out : sequence of str
        What it says that it did not take.
    """

    how: str
    text: str = ""
    expected: bool = True
    calls: int = 0
    left_out: Sequence[str] = ()


def _act(request: dict[str, Any]) -> dict[str, Any]:
    """Run an operation in this process, which then ends."""
    from tpde.errors import TpdeError

    from .operations import OPERATIONS, PLACE, SOURCE, THERE, next_run

    root, name = Path(request["root"]), request["name"]
    log = Path(request["log"]) if request["log"] else None
    library = shim.arm(root, Arming(**request["arming"]), log)
    library.attack_counted.restype = ctypes.c_long
    try:
        if name == NEXT_RUN:
            done = next_run(root / SOURCE, root / PLACE)
        else:
            done = OPERATIONS[name].act(root / SOURCE, root / PLACE / THERE)
        left_out = [it.name for it in getattr(done, "left_out", ())]
        answer: dict[str, Any] = {"how": "done", "left_out": left_out}
    except (TpdeError, OSError) as error:
        answer = {"how": "error", "text": f"{type(error).__name__}: {error}"}
    except (KeyboardInterrupt, SystemExit):
        answer = {"how": "interrupted"}
    except BaseException:
        answer = {"how": "error", "text": traceback.format_exc(), "expected": False}
    return answer | {"calls": library.attack_counted()}


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, let the child act, and say how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            signal.alarm(LIMIT)
            # As the command line does, and this process's parent.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            answer = _act(request)
            os.write(writing, json.dumps(answer).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], request["moment"])[0]:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return dict(json.loads(text))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return {"how": "killed"}
        if number == signal.SIGALRM:
            return {"how": "crash", "text": f"it took more than {LIMIT} s"}
        return {"how": "crash", "text": f"it ended with {signal.Signals(number).name}"}
    return {"how": "crash", "text": f"it ended with code {os.WEXITSTATUS(status)}"}


class Server:
    """The process with the shim, from outside.

    Parameters
    ----------
    folder : Path
        Where the shim is built.
    """

    def __init__(self, folder: Path) -> None:
        library = shim.build(folder)
        environment = os.environ | {"LD_PRELOAD": str(library), shim.VARIABLE: str(library)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def run(
        self,
        name: str,
        root: Path,
        arming: Arming,
        log: Path | None = None,
        moment: float | None = None,
    ) -> Outcome:
        """Run an operation, or `NEXT_RUN`, in a folder; it is killed after `moment` seconds."""
        request = {"name": name, "root": str(root), "arming": arming.values(), "log": log and str(log)}
        request["moment"] = moment
        self._in.write(json.dumps(request) + "\n")
        self._in.flush()
        return Outcome(**json.loads(self._out.readline()))

    def close(self) -> None:
        """End it."""
        self._in.close()
        self._out.close()
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from .operations import make_sources

    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        make_sources(Path(folder))  # what is imported when it is wanted is imported before all forks
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
