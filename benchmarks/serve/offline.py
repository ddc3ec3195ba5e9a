"""vLLM without a server: its engine in a process of its own, which is asked for so many requests at a time.

It starts in half the time, and leaves out what HTTP and tokenizing cost. `python -m benchmarks.serve.offline
MODEL [options of vLLM]` answers each line of its input by a line of JSON after `ANSWER`. A line is a JSON
list: what is asked, `speed` or `tokens`, how many requests are run at a time, how many tokens a prompt has
and are generated, and how many requests there are; or `perplexity`, the path of a text, and which of how many
shares of its windows are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.texts import STEP, WINDOW, Text, tokens_of, windows_of
from benchmarks.serve.log import Log

ANSWER = "ANSWER "
READING = [
    *("--max-num-batched-tokens", f"{STEP}", "--max-num-seqs", f"{STEP}"),
    *("--max-model-len", "auto"),  # whatever the model and the memory allow
]
TOGETHER = 64  # windows that are asked for at a time: what is known of each token is large


class Engine:
    """vLLM's engine of a model, in another process.

    Attributes
    ----------
    load_s : float
        Seconds from the process's start until it answers.
    """

    def __init__(self, model: Path, options: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = Log(log)
        start = time.perf_counter()
        with log.open("a") as out:  # lines of its output are added between
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.serve.offline", str(model), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=os.environ | environment,
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
        return dict(self._ask("speed", concurrent, *lengths, requests))

    def tokens(self, concurrent: int, lengths: tuple[int, int], requests: int) -> list[list[int]]:
        """What is generated for as many prompts, of up to so many tokens, with so many at a time."""
        return list(self._ask("tokens", concurrent, *lengths, requests))

    def perplexity(self, text: Path, share: int, shares: int) -> Text:
        """Logarithms of the probabilities of a text's tokens, in one of so many shares of its windows."""
        said: Text = self._ask("perplexity", str(text.resolve()), share, shares)
        return said

    def _ask(self, *what: str | int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()


def _generate(llm: Any, prompts: list[list[int]], tokens: int, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)
    return list(llm.generate([{"prompt_token_ids": it} for it in prompts], how, use_tqdm=False))


def _prompts(llm: Any, draw: random.Random, lengths: list[int]) -> list[list[int]]:
    most = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    return [[draw.randrange(3, most) for _ in range(length)] for length in lengths]


def _speed(llm: Any, concurrent: int, prompt: int, tokens: int, requests: int) -> dict[str, Any]:
    """Requests in batches, each of which starts when the one before it has ended; one batch to warm up."""
    draw = random.Random(concurrent)
    seconds, found = 0.0, []
    for number in range(1 + -(-requests // concurrent)):
        prompts = _prompts(llm, draw, [prompt] * concurrent)
        start = time.perf_counter()
        done = _generate(llm, prompts, tokens)
        if number:
            seconds += time.perf_counter() - start
            found += [it.metrics for it in done]
    steps = [(it.last_token_ts - it.first_token_ts) / max(it.num_generation_tokens - 1, 1) for it in found]
    firsts = [1000 * it.first_token_latency for it in found]
    return {
        "output_throughput": len(found) * tokens / seconds,
        "median_ttft_ms": statistics.median(firsts),
        "most_ttft_ms": max(firsts),
        "median_tpot_ms": 1000 * statistics.median(steps),
    }


def _tokens(llm: Any, concurrent: int, prompt: int, tokens: int, requests: int) -> list[list[int]]:
    """The same prompts whatever runs at a time, of 1 to `prompt` tokens."""
    draw = random.Random(0)
    prompts = _prompts(llm, draw, [draw.randint(1, prompt) for _ in range(requests)])
    found: list[list[int]] = []
    for first in range(0, requests, concurrent):
        done = _generate(llm, prompts[first : first + concurrent], tokens)
        found += [list(it.outputs[0].token_ids) for it in done]
    return found


def _perplexity(llm: Any, text: str, share: int, shares: int) -> Text:
    """Of each so many windows one; the first token of a window is not predicted."""
    config = llm.llm_engine.vllm_config
    window = min(WINDOW, config.model_config.max_model_len - 1)  # one more is generated
    prompts = windows_of(tokens_of(llm.get_tokenizer(), Path(text)), window)[share::shares]
    sums, tokens = [], 0
    for first in range(0, len(prompts), TOGETHER):
        for done in _generate(llm, prompts[first : first + TOGETHER], 1, prompt_logprobs=0):
            said = zip(done.prompt_token_ids[1:], done.prompt_logprobs[1:], strict=True)
            each = [known[token].logprob for token, known in said]
            sums.append(math.fsum(each))
            tokens += len(each)
    step = config.scheduler_config.max_num_batched_tokens
    return {"tokens": tokens, "window": window, "step": step, "sums": sums}


ANSWERS: dict[str, Callable[..., object]] = {"speed": _speed, "tokens": _tokens, "perplexity": _perplexity}


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
        what, *given = json.loads(line)
        print(ANSWER + json.dumps(ANSWERS[what](llm, *given)), flush=True)


if __name__ == "__main__":
    main()
