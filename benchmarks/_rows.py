"""Work in a process of its own that tells its results one by one: what is cut short leaves something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any


def rows(
    script: str,
    task: str,
    given: Mapping[str, Any],
    limit: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a task of a benchmark and give the JSON objects that it prints, each as it comes.

    The last is `{"problem": ...}` if the process failed, or took more than `limit` seconds and was ended.
    """
    process = subprocess.Popen(
        [sys.executable, script, "--task", task, json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | dict(environment or {}),
    )
    assert process.stdout is not None
    over = threading.Event()

    def end() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if over.is_set():
        yield {"problem": f"{task}: took more than {limit:.0f} s"}
    elif code:
        yield {"problem": f"{task}: exit code {code}"}


def tell(**row: Any) -> None:
    """Print a row for the parent."""
    print(json.dumps(row), flush=True)
