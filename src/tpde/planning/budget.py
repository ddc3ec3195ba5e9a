"""Budgets of memory, as people write them and as everything below takes them."""

from __future__ import annotations

from dataclasses import dataclass

from tpde.errors import InvalidInput
from tpde.planning.sizes import parse_memory

MAX_TOKENS = 8192
MAX_BATCH = 8
ACTIVATIONS = 1 << 30


@dataclass(frozen=True)
class Budget:
    """What a model may take.

    Attributes
    ----------
    vram : int
        Bytes of each device, above zero.
    ram : int or None
        Bytes of host memory that weights may be page-locked in; None for what the machine has.
    max_tokens : int
        Sequences times length, at least one: a model whose activations its shape tells has room for those of
        so many tokens.
    activations : int
        Bytes of `vram` that are left for the activations of any other model.
    max_batch : int
        Sequences at once, at least one: there is room for what so many take however short they are.
    """

    vram: int
    ram: int | None = None
    max_tokens: int = MAX_TOKENS
    activations: int = ACTIVATIONS
    max_batch: int = MAX_BATCH


def parse_budget(
    vram: int | str | None,
    ram: int | str | None = None,
    max_tokens: int | None = None,
    activations: int | str | None = None,
    max_batch: int | None = None,
) -> Budget | None:
    """Read what a user names.

    Parameters
    ----------
    vram, ram, activations : int or str, optional
        Sizes as `parse_memory` takes them.
    max_tokens, max_batch : int, optional
        Whole numbers above zero.

    Returns
    -------
    Budget or None
        None if nothing is named. What is not named of a budget has its default.

    Raises
    ------
    InvalidInput
        If a part of it is no size or number, or is named without `vram`.

    Examples
    --------
    >>> parse_budget("16GiB", max_tokens=100)
    Budget(vram=17179869184, ram=None, max_tokens=100, activations=1073741824, max_batch=8)
    """
    counts = {"max_tokens": max_tokens, "max_batch": max_batch}
    if vram is None:
        for name, value in {"ram": ram, **counts, "activations": activations}.items():
            if value is not None:
                raise InvalidInput(
                    f"`{name}` is a part of a budget of GPU memory",
                    hint="pass `vram` as well, or leave it out",
                )
        return None
    for (name, count), what in zip(counts.items(), ("token", "sequence"), strict=True):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
            raise InvalidInput(f"`{name}` is {count!r}", hint="give a whole number")
        if count is not None and count < 1:
            raise InvalidInput(f"`{name}` is {count}", hint=f"keep memory for at least one {what}")
    return Budget(
        parse_memory(vram, "vram"),
        None if ram is None else parse_memory(ram, "ram"),
        MAX_TOKENS if max_tokens is None else max_tokens,
        ACTIVATIONS if activations is None else parse_memory(activations, "activations"),
        MAX_BATCH if max_batch is None else max_batch,
    )
