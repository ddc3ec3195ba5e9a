"""Texts that models read: how they are cut, and perplexities beside that of a plain model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from benchmarks.harness.report import Page

WINDOW = 512  # tokens of a text that are read together, or as many as the model allows
# Rows of a step when a text is read: as many as every GPU multiplies straight from packed weights. More would
# be multiplied by other kernels, and say nothing of the fused ones.
STEP = 64
FILES = 512  # of a folder that are read before it is asked whether there are tokens enough
DIGITS = 5  # of a perplexity that are the plain model's: half a unit of the last


class Text(TypedDict):
    """What a way to compute a model makes of a text.

    `tokens` were predicted, in windows and steps of so many; `sums` are those of the logarithms of their
    probabilities, one for each window.
    """

    tokens: int
    window: int
    step: int
    sums: list[float]


def tokens_of(tokenizer: Any, path: Path, most: int | None = None) -> list[int]:
    """All or so many tokens of a file, or of the Python files of a folder, in the order of their names."""
    paths = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found: list[int] = []
    for first in range(0, len(paths), FILES):
        texts = [
            it.read_text("utf-8", errors="replace") for it in paths[first : first + FILES] if it.is_file()
        ]
        for ids in tokenizer(texts, verbose=False)["input_ids"]:
            found += ids
        if most is not None and len(found) >= most:
            break
    return found[:most]


def windows_of(ids: list[int], most: int) -> list[list[int]]:
    """Tokens of a text in windows that do not overlap; the last may be shorter, and has two at least."""
    if len(ids) < 2:
        raise ValueError("the text has less than two tokens")
    return [ids[at : at + most] for at in range(0, len(ids) - 1, most)]


def perplexities(
    page: Page, titles: Mapping[str, str], found: Mapping[str, Text], plain: str, judged: Iterable[str]
) -> None:
    """Perplexity of a text, and how far its logarithm is from plain's, with the standard error of that.

    Parameters
    ----------
    page : Page
        Gets the table, and the bars.
    titles : mapping of str to str
        What the table calls each way.
    found : mapping of str to Text
        Those of the ways that have one.
    plain : str
        The way that others are beside; without it there are no bars.
    judged : iterable of str
        Ways whose perplexity must be plain's to `DIGITS` significant digits.
    """
    if not found:
        return
    base = found.get(plain)
    lines = []
    for way, text in found.items():
        beside = _apart(text, base) if base and text is not base else ("-", "-")
        lines.append([titles[way], str(text["tokens"]), f"{perplexity(text):#.7g}", *beside])
    one = next(iter(found.values()))
    page.say(
        f"Perplexity, in windows of {one['window']} tokens that do not overlap, {one['step']} rows at a time:"
    )
    page.table(["way", "tokens", "perplexity", f"its logarithm less {plain}'s", "standard error"], lines)
    if base:
        checks = []
        for way in judged:
            off = units(perplexity(found[way]), perplexity(base)) if way in found else None
            what = f"{titles[way]}: off {plain}'s perplexity, in units of its digit {DIGITS}"
            checks.append((what, off, 0.5))
        if checks:
            page.limits(checks, least=False)


def perplexity(text: Text) -> float:
    """Of the tokens that a model predicted."""
    return math.exp(-math.fsum(text["sums"]) / text["tokens"])


def units(found: float, base: float) -> float:
    """How far apart two figures are, in units of the last of the base's `DIGITS` significant digits."""
    return abs(found - base) / 10.0 ** (math.floor(math.log10(base)) - DIGITS + 1)


def _apart(text: Text, plain: Text) -> tuple[str, str]:
    """The mean a token of what windows differ by; windows are taken as independent."""
    apart = [a - b for a, b in zip(plain["sums"], text["sums"], strict=True)]
    error = statistics.stdev(apart) * math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return f"{math.fsum(apart) / text['tokens']:.1e}", f"{error / text['tokens']:.1e}"
