"""A campaign: as many attacks of each kind as there is time for, drawn by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import calls, kills, mutants, power
from .field import Field, Finding
from .server import Server

KINDS = ("mutate", "calls", "kills", "power")
_ENDLESS = 1 << 40


@dataclass
class Tally:
    """What one kind of attack came to.

    Attributes
    ----------
    kind : str
        Which.
    tried : int
        Mutated files and directories, failing calls, kills, or states after a loss of power.
    of : int or None
        How many there are, where that is known.
    seconds : float
        How long it took.
    findings : list of Finding
        What should not have happened.
    """

    kind: str
    tried: int = 0
    of: int | None = None
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def _draw(
    tally: Tally, cases: Sequence[str], seed: int, seconds: float, attack: Callable[[str], list[Finding]]
) -> int:
    """Try cases in an order that the seed gives; returns how many."""
    order, end, tried = list(cases), time.monotonic() + seconds, 0
    random.Random(seed).shuffle(order)
    for case in order:
        if time.monotonic() >= end:
            break
        tally.findings += attack(case)
        tried += 1
    return tried


def run(kind: str, folder: Path, keep: Path, seed: int, seconds: float, only: str | None = None) -> Tally:
    """Attack for some seconds.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    folder : Path
        An empty one, which may be in memory.
    keep : Path
        Where mutants are kept that something was found with.
    seed : int
        Draws the mutants, the order of the others, and what a loss of power leaves.
    seconds : float
        How long, once everything is prepared.
    only : str, optional
        The one case to try.
    """
    tally, began = Tally(kind), time.monotonic()
    if kind == "mutate":
        numbers = range(int(only), int(only) + 1) if only is not None else range(_ENDLESS)
        tally.tried, tally.findings = mutants.run(folder, keep, seed, numbers, seconds)
    else:
        with Server(folder) as server:
            place = Field(folder / "root", server)
            modules = {"calls": calls, "kills": kills, "power": power}
            cases = [only] if only is not None else list(modules[kind].cases(place))
            if kind == "power":
                states: list[int] = []
                _draw(tally, cases, seed, seconds, lambda it: power.attack(place, it, seed, states))
                tally.tried = sum(states)
            else:
                attack = calls.attack if kind == "calls" else kills.attack
                tally.of = len(cases)
                tally.tried = _draw(tally, cases, seed, seconds, lambda it: attack(place, it))
    tally.seconds = time.monotonic() - began
    return tally
