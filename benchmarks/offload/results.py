"""What came in from the processes of `offload`: turns, their medians, and what is compared in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.harness.report import note
from benchmarks.offload.work import PREFILL

FIXED = 2.1e9  # bytes of a budget that hold no streamed weights: ring, workspace, cache, libraries
GB = 1e9
Found = dict[str, Any]


def limit(streamed: float, budget: float, rate: float) -> float:
    """Seconds a token that no system beats which streams what does not fit into a budget of GiB."""
    return max(streamed - max(0.0, budget * 2**30 - FIXED), 0.0) / rate


class Results:
    """What came in so far.

    Attributes
    ----------
    gpu : str
        What the machine has.
    made : dict
        Sizes of the model.
    rates : list of float
        Bytes a second of copies, before and after.
    measured : list of float
        What `tpde plan` measures of a device: bytes a second that are copied to it, and of its memory.
    plain, resident, prefill : dict
        The plain model, ours packed and resident, ours with a long prompt.
    ours, predicted, peers : dict
        By budget, by budget and turn, by name.
    again : int
        First tokens that were taken once more.
    problems : list of str
        What failed, or was left out.

    What is run in turns has `turns`, what each of them found by its number, besides medians of their seconds,
    the most memory, and all else as the first has it.
    """

    def __init__(self) -> None:
        self.gpu = ""
        self.made: Found = {}
        self.rates: list[float] = []
        self.measured: list[float] = []
        self.plain: Found = {}
        self.resident: Found = {}
        self.prefill: Found = {}
        self.ours: dict[float, Found] = {}
        self.predicted: dict[float, dict[int, float]] = {}
        self.peers: dict[str, Found] = {}
        self.again = 0
        self.problems: list[str] = []

    def take(self, row: Found) -> None:
        """Sort a row of a process in."""
        if "problem" in row:
            self._fail("", row)
        elif "gpu" in row:
            self.gpu = row["gpu"]
        elif "made" in row:
            self.made = row["made"]
        elif "rate" in row:
            self.rates.append(row["rate"])
            note(f"copy rate: {row['rate'] / GB:.2f} GB/s")
        elif "predicted" in row:
            budget, seconds = row["predicted"]
            self.predicted.setdefault(budget, {})[row["turn"]] = seconds
            self.measured = row["measured"]
        elif "budget" in row:
            _add_turn(self.ours.setdefault(row["budget"], {}), row["turn"], row["ours"])
            self._fail(f"{row['budget']:g} GiB: ", row["ours"])
        elif "plain" in row:
            _add_turn(self.plain, row["turn"], row["plain"])
        elif "resident" in row:
            _add_turn(self.resident, row["turn"], row["resident"])
            self._fail("packed, resident: ", row["resident"])
        elif "peer" in row:
            self.peers[row["peer"]] = row["found"]
            self._fail(f"{row['peer']}: ", row["found"])
        elif "prefill" in row:
            self.prefill = row["prefill"]
            self._fail(f"{PREFILL} tokens: ", row["prefill"])

    def _fail(self, what: str, found: Found) -> None:
        if "problem" in found and (said := what + found["problem"]) not in self.problems:
            self.problems.append(said)
            note(f"error: {said}")

    def slow(self, task: str, given: Found) -> bool:
        """Whether a first token that counts was taken on a processor that others use, too."""
        row = self.plain if task == "plain" else {}
        if task == "ours":
            row = self.ours.get(given["budget"], {})
        return bool(given["turn"] and row.get("turns", {}).get(given["turn"], {}).get("slow"))

    def fits(self, budget: float) -> bool:
        """Whether all packed weights do, beside what holds none."""
        return not limit(self.made["streamed_packed"], budget, 1.0)

    @property
    def rate(self) -> float:
        """Bytes a second: the faster of before and after."""
        return max(self.rates, default=0.0)


def _add_turn(kept: Found, turn: int, found: Found) -> None:
    kept.setdefault("turns", {}).setdefault(turn, {}).update(found)
    for key, value in found.items():
        if key in {"peak", "private", "locked"}:
            kept[key] = max(kept.get(key, value), value)
        else:
            kept[key] = kept.get(key) or value
    for key in ("token_s", "first_s", "beside_s"):
        if several := [it[key] for it in kept["turns"].values() if key in it]:
            kept[key] = statistics.median(several)


def turns_of(kept: Found) -> list[Found]:
    """What each turn found."""
    return list(kept.get("turns", {}).values())


def paired(
    one: Found, other: Found, compare: Callable[[float, float], float], what: str = "token_s"
) -> float | None:
    """The median over turns that have both: the host, which may make a whole turn slow, is in both."""
    both = one["turns"].keys() & other.get("turns", {}).keys()
    seconds = [tuple(it["turns"][turn].get(what) for it in (one, other)) for turn in both]
    compared = [compare(a, b) for a, b in seconds if a and b]
    return statistics.median(compared) if compared else None
