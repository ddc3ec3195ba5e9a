"""Several fine-tunes over one resident base: memory, switching, the time of a token, and bits.

A packed model of the 8 B Llama shape with random bf16 weights, and deltas of it in each of which 3.5 % of all
words are one more. Logits under each are compared with those of the plain model that has its weights. Without
a GPU, `--small --layers 2` tries the same on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import tpde
from benchmarks.harness.gpu import device as device_of
from benchmarks.harness.machine import gpu
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import alternate, to_the_end

TITLE = "Several fine-tunes over one base"
SHARE = 0.035
BARS = {"memory": 0.15, "use_ms": 50.0}
# Vocabulary, hidden size, intermediate size.
LARGE = (128256, 4096, 14336)
SMALL = (2048, 256, 1024)


def tune(model: Any, seed: int, device: str) -> None:
    """Change a share of all words, in place."""
    import torch

    draw = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        for part in parameter.detach().view(torch.int16).view(-1).split(1 << 26):
            part.add_((torch.rand(part.shape, generator=draw, device=device) < SHARE).to(torch.int16))


def milliseconds(run: Any, runs: int) -> list[float]:
    """Of each run, and of what it started on the device, after two to warm up."""
    return [1e3 * it for it in alternate({"": run}, runs, warm=2, clock=to_the_end)[""]]


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--deltas", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="narrow, for trying it out")


def run(options: argparse.Namespace, page: Page) -> None:
    """Tune, pack, and use one after the other."""
    import torch
    import transformers

    device = device_of()
    page.facts["GPU"] = gpu() if device == "cuda" else ""
    vocabulary, hidden, middle = SMALL if options.small else LARGE
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=middle,
        num_attention_heads=8 if options.small else 32,
        num_key_value_heads=2 if options.small else 8,
        num_hidden_layers=options.layers,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    torch.set_default_dtype(torch.float32)
    plain = sum(it.nbytes for it in model.parameters())
    ids = torch.arange(1, 33, device=device).view(1, -1)
    expected: dict[str | None, Any] = {}
    deltas = {}
    with torch.no_grad():
        base = {name: it.detach().clone() for name, it in model.named_parameters()}
        expected[None] = model(ids).logits.clone()
        for seed in range(options.deltas):
            note(f"delta {seed}")
            tune(model, seed, device)
            deltas[str(seed)] = tpde.make_delta(base, dict(model.named_parameters()))
            expected[str(seed)] = model(ids).logits.clone()
            for name, it in model.named_parameters():
                it.copy_(base[name])
        del base
        token = lambda: model(ids[:, :1])  # noqa: E731
        times = {"plain": statistics.median(milliseconds(token, 10))}
        tpde.pack_module(model)
        times["packed"] = statistics.median(milliseconds(token, 10))
        tpde.nn.add_deltas(model, deltas)
        same = True
        for key, logits in expected.items():
            model.use(key)
            found = model(ids).logits
            same &= torch.equal(found.view(torch.int16), logits.view(torch.int16))
        times["under a delta"] = statistics.median(milliseconds(token, 10))
        keys = [None, *deltas]
        order = iter(keys * 10)
        used = milliseconds(lambda: model.use(next(order)), 5 * len(keys))
    share = model.tpde_deltas.nbytes / plain
    small, quick = share <= BARS["memory"], max(used) <= BARS["use_ms"]
    rows = [
        [
            "all deltas, of one plain copy",
            f"{share:.4f}",
            f"{BARS['memory']} ({page.judge(small, 'memory')})",
        ],
        ["`use`, median, ms", f"{statistics.median(used):.2f}", ""],
        ["`use`, most, ms", f"{max(used):.2f}", f"{BARS['use_ms']:.0f} ({page.judge(quick, 'use')})"],
        ["logits of the base and of all", "equal" if same else "WRONG", page.judge(same, "bits")],
        *([f"a token, {name}, ms", f"{it:.1f}", ""] for name, it in times.items()),
    ]
    page.say(f"{options.deltas} deltas of {100 * SHARE:.1f} % over {plain / 1e9:.2f} GB of bf16, {device}.")
    page.table(["", "here", "bar"], rows)
