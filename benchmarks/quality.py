"""Perplexity and greedy tokens of a model with fused kernels, beside those of the plain model.

Perplexity is of a text, or of all Python files of a folder, in windows of 512 tokens, or as many as the
model allows, 16 at a time. Linear layers of the model with fused kernels multiply 64 rows of such a batch at
a time: as many as fused kernels do on every GPU. The plain model multiplies all at once, and again 64 at a
time. All else is computed alike. What is left after the last whole window is not read.

Greedy tokens are of the first 176 windows, which are read one at a time, with a cache and in steps of 64
tokens. The plain model reads them so, too, and again in steps of 8 tokens, two windows at a time, and, of
some windows, token by token: for 8, 128 rows and one PyTorch may take other kernels.

At each position, how far apart the plain model's two largest logits are, of 64 rows, is held against how far
apart another way's logits of these two tokens are. The plain model's noise is the largest change of that, at
any position, from 64 rows to 1, 8 or 128. Where the greedy token of fused kernels is not the plain model's,
the plain model's logits of these two tokens, of 64 rows, must be closer than the noise. Of logits that are
the same, the lower token is the greedy one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.gpu import device
from benchmarks.harness.parts import Reader, sums_of
from benchmarks.harness.report import Page, note
from benchmarks.harness.texts import STEP, WINDOW, Text, perplexities, tokens_of, windows_of

TITLE, NEEDS_GPU = "Quality of fused kernels", True
PLAIN, FUSED = "plain", "fused"
GROUP = 8  # windows that all ways read before the next ones
LOOKED = 22  # groups whose greedy tokens are compared
SEVERAL = 16  # groups, of which token by token only the first is read
# Windows at a time, tokens of a step, and of how many groups one is read.
_OTHERS = (1, 1, SEVERAL), (1, 8, 1), (2, STEP, 1)
OTHERS = {f"{PLAIN}, {it[0] * it[1]} rows": it for it in _OTHERS}
MOST = 0.999  # of the differences: the share that a table gives beside all
LISTED = 50  # positions; the JSON file has all


class Way(NamedTuple):
    """A model, how many windows it reads at a time, how many tokens of each, and of how many groups one."""

    model: Any
    together: int
    step: int = STEP
    every: int = 1


class Seen(NamedTuple):
    """Tensors of what a way makes of windows.

    By window and position, `greedy` are the tokens of the largest logits, `gaps` by how much the plain
    model's own greedy token has a larger logit there than that one, and `moved` by how much the difference of
    its two largest logits is another here.
    """

    greedy: Any
    gaps: Any
    moved: Any


def largest_two(logits: Any) -> Any:
    """Tokens of the two largest logits; the lower one first where they are the same."""
    import torch

    first = logits.argmax(-1, keepdim=True)
    return torch.cat([first, logits.scatter(-1, first, -math.inf).argmax(-1, keepdim=True)], -1)


def look(logits: Any, plain: Any, top: Any) -> Seen:
    """What there is to see in logits, beside the plain model's and its `largest_two`."""
    greedy, best = logits.argmax(-1, keepdim=True), plain.gather(-1, top).float()
    gaps = best[..., :1] - plain.gather(-1, greedy).float()
    moved = (logits.gather(-1, top).float() - best).diff(dim=-1).abs()[..., 0]
    return Seen(greedy[..., 0], gaps[..., 0], moved)


def read(model: Any, windows: Any, step: int) -> Any:
    """Logits of windows that are read together, so many tokens of each at a time."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    parts = [
        model(input_ids=it, past_key_values=cache, use_cache=True).logits for it in windows.split(step, 1)
    ]
    return torch.cat(parts, 1)


def measure(ways: Mapping[str, Way], windows: Any) -> dict[str, Seen]:
    """What ways, the plain one first, make of windows; it comes from the device at the end."""
    import torch

    found: dict[str, list[Seen]] = {name: [] for name in ways}
    with torch.inference_mode():
        for number, group in enumerate(windows.to(device()).split(GROUP)):
            note(f"{number * GROUP} of {len(windows)} windows, for greedy tokens")
            given = group[:, :-1]
            plain = top = None
            for name, (model, together, step, every) in ways.items():
                if number % every:
                    continue
                logits = torch.cat([read(model, it, step) for it in given.split(together)])
                if plain is None:
                    plain, top = logits, largest_two(logits)
                found[name].append(look(logits, plain, top))
        return {
            name: Seen(*(torch.cat(it).cpu() for it in zip(*parts, strict=True)))
            for name, parts in found.items()
        }


def of_groups(plain: Seen, every: int) -> Seen:
    """What the plain model makes of the windows that a way reads which takes one of so many groups."""
    import torch

    read = torch.arange(len(plain.greedy)) // GROUP % every == 0
    return Seen(*(it[read] for it in plain))


def differing(plain: Seen, other: Seen) -> list[dict[str, Any]]:
    """Positions whose greedy tokens differ, those first where the plain model's logits are farthest apart."""
    places = (other.greedy != plain.greedy).nonzero()
    at = tuple(places.T)
    columns = [it[at].tolist() for it in (plain.greedy, other.greedy, other.gaps)]
    rows = [
        {"window": window, "position": position, "plain": one, "other": two, "gap": gap}
        for (window, position), one, two, gap in zip(places.tolist(), *columns, strict=True)
    ]
    return sorted(rows, key=lambda it: -it["gap"])


def compare(page: Page, found: Mapping[str, Seen]) -> dict[str, Any]:
    """Greedy tokens and logits of all ways, and the bar of fused kernels; gives what programs get."""
    plain, lines, ways = found[PLAIN], [], {}
    for name, seen in found.items():
        if name == PLAIN:
            continue
        moved = seen.moved.flatten()
        every = OTHERS[name][2] if name in OTHERS else 1
        rows, largest = differing(of_groups(plain, every), seen), moved.max().item()
        most = moved.kthvalue(math.ceil(MOST * len(moved))).values.item()
        ways[name] = {"differ": rows, "moved": largest, "mostly_moved": most}
        gap = f"{rows[0]['gap']:.4g}" if rows else "-"
        lines.append([name, str(len(moved)), str(len(rows)), gap, f"{largest:.4g}", f"{most:.4g}"])
    noise = max(ways[name]["moved"] for name in OTHERS)
    page.say(
        f"Greedy tokens that are not {PLAIN}'s; how far apart {PLAIN}'s logits of "
        f"such two tokens are at most; and by how much the difference of {PLAIN}'s largest two changes:"
    )
    columns = ["way", "of tokens", "others", "logits apart, at most", "moved, at most"]
    page.table([*columns, f"{100 * MOST:.1f} % of them"], lines)
    differ = ways[FUSED]["differ"]
    far = sum(not it["gap"] < noise for it in differ)
    met = page.judge(not far, f"{FUSED}: greedy tokens differ only where {PLAIN}'s logits are close")
    page.say(
        f"{PLAIN}'s noise is {noise:.4g}. At {far} of the {len(differ)} positions where the token of {FUSED} "
        f"is another, {PLAIN}'s logits of the two are not closer than that (bar: none; {met})."
    )
    if differ:
        _list(page, differ[:LISTED], noise)
    return {"noise": noise, "ways": ways}


def _list(page: Page, rows: Sequence[Mapping[str, Any]], noise: float) -> None:
    page.say(f"{len(rows)} of them, those first where these logits are farthest apart:")
    lines = []
    for it in rows:
        below = "yes" if it["gap"] < noise else "NO"
        place = str(it["window"]), str(it["position"]), str(it["plain"]), str(it["other"])
        lines.append([*place, f"{it['gap']:.4g}", below])
    columns = ["window", "position", f"{PLAIN}'s token", f"{FUSED}'s", "apart", "closer than the noise"]
    page.table(columns, lines)


def load(path: Path) -> tuple[Any, Any]:
    """The model of a folder, plain and with fused kernels."""
    import torch
    from transformers import AutoModelForCausalLM

    import tpde

    note("loads")
    plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    packed = tpde.from_pretrained(path, device=device(), dtype=torch.bfloat16, pack=True, kernels="fused")
    return plain.to(device()), packed


def multiplied(model: Any, rows: int) -> tuple[int, int]:
    """How many weights are multiplied as they are packed, so many rows at a time; and of how many."""
    from tpde.nn import packed_modules

    slots = [slot for _, module in packed_modules(model) for slot in module.tpde_slots.values()]
    packed = {slot.packed for slot in slots if slot.packed.multiplies}
    return sum(it.most_rows >= rows for it in packed), len(packed)


def text_of(sums: Any, window: int) -> Text:
    """What the perplexity is of."""
    return {"tokens": len(sums) * (window - 1), "window": window, "step": STEP, "sums": sums.tolist()}


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--model", type=Path, required=True, help="folder of a plain model and its tokenizer")
    parser.add_argument(
        "--text", type=Path, required=True, help="file, or folder whose Python files are read"
    )
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the text, from its beginning")
    parser.add_argument("--seconds", type=float, default=3600, help="for perplexities")


def run(options: argparse.Namespace, page: Page) -> None:
    """Read the text in all ways."""
    import torch
    from transformers import AutoTokenizer

    for name in ("model", "text"):
        if not getattr(options, name).exists():
            raise SystemExit(f"`--{name} {getattr(options, name)}` is not there")
    ids = tokens_of(AutoTokenizer.from_pretrained(options.model), options.text, options.tokens)
    plain, fused = load(options.model)
    most = getattr(plain.config.get_text_config(), "max_position_embeddings", WINDOW)
    cut = windows_of(ids, min(WINDOW, most))
    windows = torch.tensor([it for it in cut if len(it) == len(cut[0])])
    count, most = multiplied(fused, STEP)
    page.say(f"{FUSED} multiplies {count} of {most} weights as they are packed.")
    page.judge(0 < count == most, f"{FUSED}: weights are multiplied as they are packed")
    readers = {PLAIN: Reader(plain), f"{PLAIN}, {STEP} rows": Reader(plain, STEP), FUSED: Reader(fused, STEP)}
    sums = sums_of(readers, windows, device(), options.seconds)
    texts = {name: text_of(it, windows.shape[1]) for name, it in sums.items()}
    perplexities(page, {name: name for name in texts}, texts, PLAIN, [FUSED])
    others = {name: Way(plain, *how) for name, how in OTHERS.items()}
    found = measure({PLAIN: Way(plain, 1), **others, FUSED: Way(fused, 1)}, windows[: GROUP * LOOKED])
    page.data = compare(page, found) | {"texts": texts}
