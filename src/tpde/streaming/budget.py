"""Budgets of memory, as people write them and as everything below takes them."""

from __future__ import annotations

from dataclasses import dataclass

from tpde.errors import InvalidInput
from tpde.streaming.sizes import parse_size

MAX_TOKENS = 8192
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
    """

    vram: int
    ram: int | None = None
    max_tokens: int = MAX_TOKENS
    activations: int = ACTIVATIONS


def parse_budget(
    vram: int | str | None,
    ram: int | str | None = None,
    max_tokens: int | None = None,
    activations: int | str | None = None,
) -> Budget | None:
    """Read what a user names.

    Parameters
    ----------
    vram, ram, activations : int or str, optional
        Sizes as `parse_size` takes them.
    max_tokens : int, optional
        A whole number above zero.

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
    Budget(vram=17179869184, ram=None, max_tokens=100, activations=1073741824)
    """
    if vram is None:
        for name, value in (("ram", ram), ("max_tokens", max_tokens), ("activations", activations)):
            if value is not None:
                raise InvalidInput(
                    f"`{name}` is a part of a budget of GPU memory",
                    hint="pass `vram` as well, or leave it out",
                )
        return None
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool)):
        raise InvalidInput(f"`max_tokens` is {max_tokens!r}", hint="give a whole number")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidInput(f"`max_tokens` is {max_tokens}", hint="keep memory for at least one token")
    return Budget(
        parse_size(vram),
        None if ram is None else parse_size(ram),
        MAX_TOKENS if max_tokens is None else max_tokens,
        ACTIVATIONS if activations is None else parse_size(activations),
    )
