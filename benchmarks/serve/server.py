"""A vLLM server, and vLLM's own benchmark of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.serve.commands import bench
from benchmarks.serve.log import Log

READY_SECONDS = 1800


_ports: set[int] = set()
_lock = threading.Lock()


def free_port() -> int:
    """A port that nobody listens on, and that this process did not give before."""
    with _lock:
        while True:
            with socket.socket() as it:
                it.bind(("127.0.0.1", 0))
                port = int(it.getsockname()[1])
            if port not in _ports:
                _ports.add(port)
                return port


class Server:
    """A vLLM server of a model, in a process group of its own.

    Attributes
    ----------
    load_s : float
        Seconds from its start until it answers.
    """

    def __init__(self, model: Path, options: list[str], log: Path, environment: dict[str, str]) -> None:
        self.port, self.log = free_port(), Log(log)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port), *options]
        start = time.perf_counter()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | environment,
            )
        try:
            self._wait(start)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - start

    def _wait(self, start: float) -> None:
        while time.perf_counter() - start < READY_SECONDS:
            if self._process.poll() is not None:
                raise RuntimeError(self.log.reason())
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.2)
        raise RuntimeError(f"it does not answer after {READY_SECONDS} s")

    def bench(self, model: Path, concurrent: int, lengths: tuple[int, int], requests: int) -> dict[str, Any]:
        """What `vllm bench serve` measures with so many requests at a time."""
        out = self.log.path.with_suffix(f".{concurrent}.json")
        given = [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{self.port}", "--model", "model"),
            *("--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"),
            *("--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1])),
            *("--num-prompts", str(requests), "--max-concurrency", str(concurrent)),
            *("--num-warmups", str(concurrent), "--save-result", "--result-dir", str(out.parent)),
            *("--result-filename", out.name, "--temperature", "0"),
        ]
        log = Log(self.log.path.with_suffix(".bench.log"))
        found = bench("serve", given, out, log, {})
        if found["completed"] < requests:
            raise RuntimeError(f"{found['failed']} of {requests} requests failed")
        return found

    def close(self) -> None:
        """End it and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
