"""`tpde run`."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import guard, named, print_json, progress_bar, say
from tpde.cli.run_stats import say_copies, say_sizes
from tpde.cli.run_task import check_task
from tpde.errors import InvalidInput
from tpde.planning.budget import MAX_TOKENS, parse_budget

if TYPE_CHECKING:
    import torch

    from tpde.integrations.transformers.run_memory import Peak
    from tpde.nn.kernels import Kernels
    from tpde.planning.budget import Budget

_COLDEST = 1e-4  # logits are divided by it in fp32: those of any model stay far from what that holds


@guard
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A packed model directory, or the hub id of one; with `--pack`, a plain one, too.",
        ),
    ],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="What to embed, with `--embed`.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")
    ] = None,
    embed: Annotated[bool, typer.Option("--embed", help="Print a vector for each TEXT.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, help="0 takes the likeliest token; more draws, the higher the wilder: 0.7 is usual."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of the draws.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(help="`cpu`, `cuda` or `cuda:N`.", show_default="the GPU if there is one"),
    ] = None,
    kernels: Annotated[
        str,
        typer.Option(
            "--kernels",
            metavar="HOW",
            help="`exact`: the plain model's bits. `fused`: linear layers multiply straight from packed "
            "weights, and tokens come faster than from plain ones on a GPU; sums are added in another order.",
        ),
    ] = "exact",
    pack: Annotated[
        bool,
        typer.Option(
            "--pack", help="Take a plain model, too, and pack its weights as they come. Not with `--vram`."
        ),
    ] = False,
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram",
            metavar="SIZE",
            help="Device memory to use, such as `16GiB`: what exceeds it is streamed. Needs a GPU.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            "--ram",
            metavar="SIZE",
            help="Host memory to lock, such as `32GiB`; what exceeds it is read from the files.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of the prompt and the answer, with `--vram`.", show_default=str(MAX_TOKENS)
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write a timeline for ui.perfetto.dev (`--vram`).", parser=named
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed, memory and sizes on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, at the end.")] = False,
) -> None:
    r"""Continue a text, or embed texts, with a packed model.

    Weights stay packed. Outputs are the plain model's, bit for bit, but with `--kernels fused`.

    Example:

    \b
      tpde run llama-packed --prompt "The exponent of a weight"
      tpde run llama-packed --vram 16GiB --prompt "The exponent of a weight" --stats
      tpde run llama-packed --kernels fused --prompt "The exponent of a weight"
      tpde run llama --pack --prompt "The exponent of a weight"
      tpde run minilm-packed --embed "a sentence" "another one"
    """
    check_task(texts or [], prompt, embed)
    if 0 < temperature < _COLDEST:
        raise InvalidInput(
            f"a temperature of {temperature} makes numbers that overflow",
            hint=f"pass 0, which takes the likeliest token, or {_COLDEST} and more",
            where="--temperature",
            found=temperature,
            needed=_COLDEST,
        )
    if trace is not None and vram is None:
        raise InvalidInput(
            "`--trace` is of weights that are streamed", hint="pass `--vram` as well, or leave it out"
        )
    if trace is not None:
        from tpde.io.sinks import require_writable

        require_writable(trace)  # now, not when all has been generated
    from tpde.integrations.transformers.require import require_transformers

    require_transformers()  # before torch is imported

    from tpde.integrations.transformers.embed import BATCH
    from tpde.integrations.transformers.folder import model_directory
    from tpde.integrations.transformers.run_memory import Peak
    from tpde.loading.devices import WITHOUT_BUDGET, checked_device
    from tpde.nn.kernels import check_kernels

    batch = 1 if prompt is not None else BATCH
    budget = parse_budget(vram, ram, max_tokens, max_batch=batch if vram is not None else None)
    folder, _ = model_directory(model, pack=pack, instead=", or say `--pack`" if budget is None else "")
    if vram is None:
        where = checked_device(device)
    else:
        where = checked_device("cuda" if device is None else device, WITHOUT_BUDGET)
    if check_kernels(kernels) == "fused" and where.type == "cpu":
        say(
            "note",
            "`--kernels fused` multiplies by packed weights on a GPU only; the CPU decodes them, with the "
            "output of `exact`",
        )
    peak = Peak(where)
    start = {"model": model, "device": str(where), "kernels": kernels, "pack": pack}
    given = folder, where, budget, peak, start
    if prompt is not None:
        _generate(*given, prompt, max_new_tokens, temperature, seed, trace, stats, as_json)
    else:
        _embed(*given, texts or [], trace, stats, as_json)


def _load(
    folder: Path,
    device: torch.device,
    budget: Budget | None,
    record: bool,
    bar: ExitStack,
    model_class: Any = None,
    kernels: Kernels = "exact",
    pack: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """The model, and what loading came to; host memory may be loaded until `bar` is closed, and after."""
    from transformers.utils import logging

    from tpde.integrations.transformers.folder import weight_files
    from tpde.integrations.transformers.load_model import load_model
    from tpde.integrations.transformers.run_memory import weight_bytes

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    progress = None
    if budget is not None:
        progress = bar.enter_context(
            progress_bar("loading", lambda: sum(it.stat().st_size for it in weight_files(folder)))
        )
    model = load_model(
        folder, device, budget, model_class=model_class, progress=progress, kernels=kernels, pack=pack
    )
    if budget is not None and record:
        model.tpde_streamer.record()  # type: ignore[operator, union-attr]
    return model, {"load_seconds": time.perf_counter() - start, **weight_bytes(model)}


def _finish_streaming(model: Any, trace: Path | None) -> dict[str, Any]:
    """Check a streamed model's weights, and write the timeline; gives what its copying came to."""
    streaming = getattr(model, "tpde_streamer", None)
    if streaming is None:
        return {}
    streaming.check()
    if trace is not None:
        streaming.trace(trace)
    return {"streaming": streaming.stats()}


def _generate(
    folder: Path,
    device: torch.device,
    budget: Budget | None,
    peak: Peak,
    result: dict[str, Any],
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    trace: Path | None,
    stats: bool,
    as_json: bool,
) -> None:
    from tpde.integrations.transformers.folder import read_config
    from tpde.integrations.transformers.generate import generate, load_tokenizer
    from tpde.integrations.transformers.tokens import check_tokens

    tokenizer = load_tokenizer(folder)
    if budget is not None:
        count = len(tokenizer(prompt)["input_ids"])
        # The last token is not read; a decoder beside an encoder reads one that starts it.
        read = max_new_tokens - (not read_config(folder).get("is_encoder_decoder"))
        check_tokens(1, count + read, budget.max_tokens)
    with ExitStack() as bar:
        model, loading = _load(
            folder, device, budget, stats or trace is not None, bar, None, result["kernels"], result["pack"]
        )

        def write(text: str) -> None:
            bar.close()  # the first token
            if not as_json and sys.stdout is not None:  # closed by the caller
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
        **_finish_streaming(model, trace),
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
        say_sizes(result, device)
        say_copies(model)


def _embed(
    folder: Path,
    device: torch.device,
    budget: Budget | None,
    peak: Peak,
    result: dict[str, Any],
    texts: list[str],
    trace: Path | None,
    stats: bool,
    as_json: bool,
) -> None:
    from tpde.integrations.transformers.embed import embed, encoder_class, read_recipe
    from tpde.integrations.transformers.generate import load_tokenizer

    recipe, tokenizer = read_recipe(folder), load_tokenizer(folder)
    record = stats or trace is not None
    with ExitStack() as bar:
        way = result["kernels"], result["pack"]
        model, loading = _load(folder, device, budget, record, bar, encoder_class(folder), *way)
        start = time.perf_counter()
        vectors, tokens = embed(model, tokenizer, texts, recipe)
        seconds = time.perf_counter() - start
    # Nine digits hold an fp32 exactly.
    rows = [[float(f"{value:.9g}") for value in row] for row in vectors.float().tolist()]
    result |= {
        "pooling": recipe.pooling,
        "normalized": recipe.normalize,
        "dimensions": vectors.shape[1],
        "embeddings": [[it if math.isfinite(it) else None for it in row] for row in rows],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **loading,
        **_finish_streaming(model, trace),
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
        say_sizes(result, device)
        say_copies(model)
