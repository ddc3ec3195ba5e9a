"""What `serve.py` needs: a model directory for vLLM, and a server to ask."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _machine import note
from _synthetic import shards_of, weight

# hidden, intermediate, layers, heads, key-value heads, head size, vocabulary, experts, experts a token
SHAPES = {
    "tiny": (256, 512, 2, 4, 2, 64, 2048, 0, 0),
    "tiny-experts": (128, 96, 2, 4, 2, 32, 2048, 8, 2),
    "llama-8b": (4096, 14336, 32, 32, 8, 128, 128256, 0, 0),
    "qwen3-30b-a3b": (2048, 768, 48, 32, 4, 128, 151936, 128, 8),
}
READY_SECONDS = 1800


def config_of(shape: str) -> dict[str, Any]:
    """The `config.json` of a shape."""
    hidden, middle, layers, heads, key_heads, head, vocabulary, experts, chosen = SHAPES[shape]
    common = {
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if not experts:
        return common | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return common | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": middle,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def shapes_of(shape: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint."""
    hidden, middle, layers, heads, key_heads, head, vocabulary, experts, _ = SHAPES[shape]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        at = f"model.layers.{number}"
        found[f"{at}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", heads * head), ("k", key_heads * head), ("v", key_heads * head)):
            found[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head)
        if experts:
            found[f"{at}.self_attn.q_norm.weight"] = found[f"{at}.self_attn.k_norm.weight"] = (head,)
            found[f"{at}.mlp.gate.weight"] = (experts, hidden)
        found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for part in [f"experts.{it}." for it in range(experts)] or [""]:
            found[f"{at}.mlp.{part}gate_proj.weight"] = (middle, hidden)
            found[f"{at}.mlp.{part}up_proj.weight"] = (middle, hidden)
            found[f"{at}.mlp.{part}down_proj.weight"] = (hidden, middle)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def make(directory: Path, shape: str, seed: int) -> int:
    """Write a plain model whose weights have a trained one's statistics, and a tokenizer; gives its bytes."""
    from safetensors.torch import save_file

    shapes = shapes_of(shape)
    files = shards_of(shapes)
    directory.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        made = {name: weight(name, shapes[name], seed).cpu().contiguous() for name in names}
        total += sum(it.nbytes for it in made.values())
        save_file(made, directory / file, {"format": "pt"})
        places.update(dict.fromkeys(names, file))
        note(f"wrote {file}")
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config_of(shape)))
    make_tokenizer(directory, SHAPES[shape][6])
    return total


def make_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer of words `t0`, `t1`, ..., so that prompts of random tokens keep their length."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


class Server:
    """A vLLM server of a model, in a process group of its own.

    Attributes
    ----------
    load_s : float
        Seconds from its start until it answers.
    """

    def __init__(self, model: Path, options: list[str], log: Path) -> None:
        self.port, self._log = free_port(), log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port), *options]
        start = time.perf_counter()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
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
                raise RuntimeError(self.reason())
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.2)
        raise RuntimeError(f"it does not answer after {READY_SECONDS} s")

    def lines(self) -> list[str]:
        """What it logged so far."""
        return self._log.read_text(errors="replace").splitlines()

    def reason(self) -> str:
        """The error that it ended with: the first that a line names after what vLLM puts before it."""
        names = r"(?:\w+\.)*(?:\w*Error|\w*Exception|InvalidInput|UnsupportedDevice|MissingDependency)"
        lines = self.lines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if found := re.search(rf"(?:^|\] |\) )({names}: .*)", line):
                more = f" {after.strip()}" if "validation error" in line else ""
                return f"{found.group(1)}{more}"[:160]
        return "it ended, and named no error"

    def figure(self, pattern: str) -> str:
        """What its log says, by a pattern with a group; `-` if nothing."""
        for line in self.lines():
            if found := re.search(pattern, line):
                return found.group(1)
        return "-"

    def bench(self, model: Path, concurrent: int, lengths: tuple[int, int], requests: int) -> dict[str, Any]:
        """What `vllm bench serve` measures with so many requests at a time."""
        out = self._log.with_suffix(f".{concurrent}.json")
        given = [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{self.port}", "--model", "model"),
            *("--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"),
            *("--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1])),
            *("--num-prompts", str(requests), "--max-concurrency", str(concurrent)),
            *("--num-warmups", str(min(concurrent, 8)), "--save-result", "--result-dir", str(out.parent)),
            *("--result-filename", out.name, "--temperature", "0"),
        ]
        # The command `vllm bench serve` runs this; not every distribution of vLLM has a working command.
        code = (
            "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
            "from vllm.benchmarks.serve import add_cli_args, main\n"
            "p = P(); add_cli_args(p); main(p.parse_args())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *given], capture_output=True, text=True, check=False
        )
        if done.returncode or not out.exists():
            note(done.stderr[-2000:])
            raise RuntimeError(done.stderr.strip().splitlines()[-1][:160] if done.stderr else "no result")
        return dict(json.loads(out.read_text()))

    def close(self) -> None:
        """End it and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def served(model: Path, options: list[str], log: Path) -> Iterator[Server]:
    """A server while the context is open."""
    server = Server(model, options, log)
    try:
        yield server
    finally:
        server.close()
