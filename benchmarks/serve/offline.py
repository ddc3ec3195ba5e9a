"""vLLM without a server: its engine in a process of its own, which is asked for so many requests at a time.

It starts in half the time, and leaves out what HTTP and tokenizing cost. `python -m benchmarks.serve.offline
MODEL [options of vLLM]` answers each line of its input, a JSON list of how many requests are run at a time,
how many tokens a prompt has and are generated, and how many requests there are, by a line of JSON after
`ANSWER`.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.serve.log import Log

ANSWER = "ANSWER "


class Engine:
    """vLLM's engine of a model, in another process.

    Attributes
    ----------
    load_s : float
        Seconds from the process's start until it answers.
    """

    def __init__(self, model: Path, options: list[str], log: Path) -> None:
        self.log = Log(log)
        start = time.perf_counter()
        with log.open("a") as out:  # lines of its output are added between
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.serve.offline", str(model), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - start

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
            self.log.add(line)
        raise RuntimeError(self.log.reason())

    def bench(self, model: Path, concurrent: int, lengths: tuple[int, int], requests: int) -> dict[str, Any]:
        """What is measured with so many requests at a time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([concurrent, *lengths, requests]) + "\n")
        self._process.stdin.flush()
        return dict(self._answer())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def engine(model: Path, options: list[str], log: Path) -> Iterator[Engine]:
    """An engine while the context is open."""
    made = Engine(model, options, log)
    try:
        yield made
    finally:
        made.close()


def _generate(llm: Any, draw: random.Random, count: int, lengths: tuple[int, int]) -> tuple[float, list[Any]]:
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(lengths[0])]} for _ in range(count)
    ]
    how = SamplingParams(temperature=0, max_tokens=lengths[1], ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    done = llm.generate(prompts, how, use_tqdm=False)
    return time.perf_counter() - start, [it.metrics for it in done]


def _measured(llm: Any, concurrent: int, lengths: tuple[int, int], requests: int) -> dict[str, Any]:
    """Requests in batches, each of which starts when the one before it has ended; one batch to warm up."""
    draw = random.Random(concurrent)
    _generate(llm, draw, concurrent, lengths)
    seconds, found = 0.0, []
    for _ in range(max(requests // concurrent, 1)):
        took, metrics = _generate(llm, draw, concurrent, lengths)
        seconds += took
        found += metrics
    steps = [(it.last_token_ts - it.first_token_ts) / max(it.num_generation_tokens - 1, 1) for it in found]
    apart = 1000 * statistics.mean(steps)
    return {
        "completed": requests if len(found) >= concurrent else len(found),
        "failed": 0,
        "output_throughput": len(found) * lengths[1] / seconds,
        "mean_ttft_ms": 1000 * statistics.mean(it.first_token_latency for it in found),
        "mean_itl_ms": apart,
        "mean_tpot_ms": apart,
    }


def main() -> None:
    """Answer what comes."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--model", sys.argv[1], *sys.argv[2:]])
    given.disable_log_stats = False  # which has the times of requests
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(given))
    print(ANSWER + "0", flush=True)
    for line in sys.stdin:
        concurrent, prompt, tokens, requests = json.loads(line)
        print(ANSWER + json.dumps(_measured(llm, concurrent, (prompt, tokens), requests)), flush=True)


if __name__ == "__main__":
    main()
