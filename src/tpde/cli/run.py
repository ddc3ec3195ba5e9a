"""`tpde run`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import guard, print_json, say, size
from tpde.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from tpde.integrations.transformers.memory import Peak


@guard
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A packed model directory.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="What to embed, with `--embed`.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The text to continue.")] = None,
    embed: Annotated[bool, typer.Option("--embed", help="Print a vector for each TEXT.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; more draws, the higher the wilder.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(help="`cpu`, `cuda` or `cuda:N`.", show_default="the GPU if there is one"),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed, memory and sizes on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, at the end.")] = False,
) -> None:
    r"""Run a model from its packed weights: continue a text, or embed texts.

    Its outputs are the plain model's, bit for bit.

    Example:

    \b
      tpde run llama-packed --prompt "The exponent of a weight"
      tpde run minilm-packed --embed "a sentence" "another one"
    """
    if embed == (prompt is not None) or embed != bool(texts):
        raise InvalidInput(
            "nothing to do, or too much; give `--prompt TEXT`, or `--embed` and one TEXT or more"
        )
    from tpde.integrations.device import checked_device
    from tpde.integrations.transformers.folder import packed_directory
    from tpde.integrations.transformers.memory import Peak

    folder, where = packed_directory(model), checked_device(device or _default_device())
    peak = Peak(where)
    start = {"model": model, "device": str(where)}
    if prompt is not None:
        _generate(folder, where, peak, start, prompt, max_new_tokens, temperature, seed, stats, as_json)
    else:
        _embed(folder, where, peak, start, texts or [], stats, as_json)


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load(folder: Path, device: torch.device, model_class: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """The model, its tokenizer, and what loading came to."""
    from transformers.utils import logging

    from tpde.integrations.transformers import from_pretrained
    from tpde.integrations.transformers.generate import load_tokenizer
    from tpde.integrations.transformers.memory import weight_bytes

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = load_tokenizer(folder)
    start = time.perf_counter()
    model = from_pretrained(folder, device, model_class=model_class)
    return model, tokenizer, {"load_seconds": time.perf_counter() - start, **weight_bytes(model)}


def _generate(
    folder: Path,
    device: torch.device,
    peak: Peak,
    result: dict[str, Any],
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stats: bool,
    as_json: bool,
) -> None:
    from tpde.integrations.transformers.generate import generate

    model, tokenizer, loading = _load(folder, device)

    def write(text: str) -> None:
        if not as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    made = generate(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        write=write,
    )
    result |= {
        "text": made.text,
        "tokens": made.tokens,
        "prompt_tokens": made.prompt_tokens,
        "new_tokens": len(made.tokens),
        "first_token_seconds": made.first_token_seconds,
        "tokens_per_second": made.tokens_per_second,
        "seconds": made.seconds,
        **loading,
        "peak_bytes": peak.bytes(),
    }
    if as_json:
        print_json(result)
    else:
        print(flush=True)
    if stats:
        speed = "" if made.tokens_per_second is None else f", then {made.tokens_per_second:.1f} tokens/s"
        say("tokens", f"{made.prompt_tokens} read, {len(made.tokens)} written")
        say("speed", f"first token after {made.first_token_seconds * 1e3:.0f} ms{speed}")
        _say_sizes(result, device)


def _embed(
    folder: Path,
    device: torch.device,
    peak: Peak,
    result: dict[str, Any],
    texts: list[str],
    stats: bool,
    as_json: bool,
) -> None:
    from transformers import AutoModel

    from tpde.integrations.transformers.embed import embed, read_recipe

    recipe = read_recipe(folder)
    model, tokenizer, loading = _load(folder, device, AutoModel)
    start = time.perf_counter()
    vectors, tokens = embed(model, tokenizer, texts, recipe)
    seconds = time.perf_counter() - start
    # Nine digits hold an fp32 exactly.
    rows = [[float(f"{value:.9g}") for value in row] for row in vectors.float().tolist()]
    result |= {
        "pooling": recipe.pooling,
        "normalized": recipe.normalize,
        "dimensions": vectors.shape[1],
        "embeddings": rows,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **loading,
        "peak_bytes": peak.bytes(),
    }
    if as_json:
        print_json(result)
    else:
        for row in rows:
            print(json.dumps(row, allow_nan=True))
    if stats:
        unit = ", length 1" if recipe.normalize else ""
        say("vectors", f"{len(rows)} of {vectors.shape[1]} dimensions, pooling {recipe.pooling}{unit}")
        say("speed", f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s")
        _say_sizes(result, device)


def _say_sizes(result: dict[str, Any], device: torch.device) -> None:
    say(
        "weights",
        f"{size(result['packed_bytes'])} packed, {size(result['unpacked_bytes'])} unpacked; "
        f"{size(result['plain_bytes'])} stored plain; loaded in {result['load_seconds']:.2f} s",
    )
    what = "of the GPU's memory beyond the context" if device.type == "cuda" else "of memory, Python included"
    say("peak", f"{size(result['peak_bytes'])} {what}")
