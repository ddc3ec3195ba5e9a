"""vLLM's own benchmarks: `vllm bench serve`, which a server is asked by, and `vllm bench latency`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.report import note
from benchmarks.serve.log import Log

# What the command `vllm bench NAME` runs; not every distribution of vLLM has a working command.
CODE = """
from vllm.benchmarks.{0} import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench(name: str, given: list[str], out: Path, log: Log, environment: dict[str, str]) -> dict[str, Any]:
    """Run one; gives what it writes to `out`."""
    out.unlink(missing_ok=True)
    with log.path.open("a") as lines:
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(name), *given],
            stdout=lines,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            check=False,
        )
    if done.returncode or not out.exists():
        note("\n".join(log.lines()[-30:]))
        raise RuntimeError(log.reason())
    return dict(json.loads(out.read_text()))


class Latency:
    """vLLM's `bench latency` of a model: it starts an engine for each number of requests at a time.

    Attributes
    ----------
    load_s : None
        It does not say how long that takes.
    """

    load_s = None

    def __init__(self, model: Path, options: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = Log(log)
        self._options, self._environment = ["--model", str(model), *options], environment

    def bench(self, model: Path, concurrent: int, lengths: tuple[int, int], requests: int) -> dict[str, Any]:
        """What is measured with so many requests at a time, after one batch to warm up."""
        out = self.log.path.with_suffix(f".{concurrent}.json")
        given = [
            *("--input-len", str(lengths[0]), "--output-len", str(lengths[1])),
            *("--batch-size", str(concurrent), "--disable-detokenize", "--num-iters-warmup", "1"),
            *("--num-iters", str(-(-requests // concurrent)), "--output-json", str(out)),
        ]
        found = bench("latency", [*self._options, *given], out, self.log, self._environment)
        return {"latency_ms": 1000 * found["avg_latency"]}

    def close(self) -> None:
        """Nothing runs any more."""
