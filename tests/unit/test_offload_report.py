"""What the benchmark `offload` runs, and makes of its rows: medians, pairs, bars, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import offload
from benchmarks.harness import quiet as quietness
from benchmarks.harness.report import Page
from benchmarks.offload import report, results

GIB = 1 << 30
OPTIONS = {"hold": True, "shape": "llama-8b", "seed": 0, "host": "mapped", "tokens": 12}
MADE = {
    "streamed_packed": 10.03e9,
    "streamed_plain": 15e9,
    "packed_bytes": 10.7e9,
    "plain_bytes": 16e9,
    "layers": 32,
    "pack_s": 1.0,
}


def _row(token_s: float, **more: Any) -> dict[str, Any]:
    return {"token_s": token_s, "plan": "all", "private": 0, "peak": GIB, "difference": ""} | more


@pytest.fixture
def found() -> Any:
    """Two budgets in three turns, of which the second is slow: for all that runs in it."""
    made = results.Results()
    made.take({"made": MADE})
    made.take({"rate": 55e9})
    for turn, slow in enumerate((1.0, 2.0, 1.0)):
        made.take({"turn": turn, "plain": {"token_s": 0.02 * slow, "first_s": 0.3 * slow, "private": 0}})
        made.take({"turn": turn, "resident": _row(0.022 * slow)})
        first = {"first_s": 0.9 + 0.3 * slow} if turn else {}
        made.take({"turn": turn, "budget": 12.0, "ours": _row(0.023 * slow, beside_s=0.024 * slow) | first})
        made.take({"turn": turn, "predicted": [12.0, 0.021], "measured": [55e9, 4e12]})
        four = _row(0.138, plan="some") if not turn else {"plan": "some"}
        made.take({"turn": turn, "budget": 4.0, "ours": four | first})
    made.take({"turn": 0, "predicted": [4.0, 0.140], "measured": [55e9, 4e12]})
    return made


def _text(found: Any) -> str:
    page = Page("", {})
    report.draw(SimpleNamespace(**OPTIONS), found, page)
    return page.markdown()


def _checks(found: Any) -> dict[str, tuple[str, bool]]:
    return {what: (said, met) for what, said, _, met in report.checks(found, True)}


def test_turns_are_compared_in_pairs(found: Any) -> None:
    checks = _checks(found)
    assert all(met for _, met in checks.values()), checks
    assert checks["12 GiB, ms/token"][0] == "23.0"
    assert report.bar(found, 12.0) == pytest.approx(0.023 - 0.001 + 0.003)
    assert checks["12 GiB, predicted"][0] == "-8.7 %, beside +4.3 %"
    assert checks["4 GiB, predicted"][0] == "+1.4 %"
    assert checks["load to first token above plain's, s"][0] == "0.90"
    assert checks["12 GiB against less"][0] == "0.167"
    found.take({"turn": 1, "budget": 12.0, "ours": _row(0.023)})
    assert report.bar(found, 12.0) == pytest.approx(0.023 - 0.001 + 0.003), "one turn decides nothing"


def test_bars_can_be_missed(found: Any) -> None:
    for turn in range(3):
        slow = _row(0.029, peak=(13 if turn == 2 else 1) * GIB, first_s=2.0)
        slow["difference"] = "step 1" if turn == 1 else ""
        found.take({"turn": turn, "budget": 12.0, "ours": slow})
    missed = {what for what, (_, met) in _checks(found).items() if not met}
    assert missed == {
        "12 GiB, ms/token",
        "12 GiB, card peak, GiB",
        "12 GiB, bits",
        "12 GiB, predicted",
        "load to first token above plain's, s",
    }


def test_more_memory_that_is_slower(found: Any) -> None:
    found.take({"turn": 0, "budget": 16.0, "ours": _row(0.05, plan="other")})
    found.take({"turn": 0, "budget": 24.0, "ours": _row(0.05)})
    checks = _checks(found)
    assert checks["16 GiB against less"] == ("2.174", False)
    assert checks["24 GiB against less"] == ("2.174, same plan", True)


@pytest.mark.parametrize(
    "row",
    [
        {"turn": 0, "budget": 4.0, "ours": {"problem": "no room"}},
        {"turn": 0, "resident": {"problem": "no room"}},
        {"prefill": {"problem": "no room"}},
        {"peer": "accelerate cpu_offload", "found": {"problem": "no room"}},
        {"problem": "no room"},
    ],
)
def test_what_fails_is_in_the_report(found: Any, row: dict[str, Any]) -> None:
    assert "Problems" not in _text(found)
    found.take(row)
    assert "no room" in _text(found).split("Problems:")[1]
    assert len(found.problems) == 1


def test_what_is_left_out_is_a_problem(found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []

    def rows(_: Any, task: str, *more: Any) -> list[dict[str, Any]]:
        done.append(task)
        return []

    monkeypatch.setattr(offload, "rows", rows)
    options = SimpleNamespace(**OPTIONS, limit=9, only=["plain", "ours"], budgets=[4.0, 12.0])
    options.peers, options.seconds = False, None
    given = {"turn": 0, "serial": True, "prefill": True, "resident": True}
    offload.measure(options, given, found, 0.0, Page("", {}))
    assert not found.problems
    turn = ["plain", "ours", "predict", "ours", "ours"]
    begin = ["start", "plain", "predict", "ours", "predict", "ours", "prefill", "ours"]
    assert done == begin + turn * (offload.TURNS - 1) + ["rate"]
    options.seconds = 1.0
    offload.measure(options, given, found, 0.0, Page("", {}))
    assert "left out, from `plain` on" in found.problems[0]


def test_runs_that_do_not_count_are_said(found: Any) -> None:
    found.take({"turn": 0, "plain": {"token_s": 0.02, "first_s": 0.3, "private": 0, "runs": 5, "lost": 2}})
    assert "do not count then (2 of 7 here)" in " ".join(_text(found).split())


def test_first_tokens_on_a_slow_processor_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice at most; what else the turn has found stays."""
    took, options = [], SimpleNamespace(**OPTIONS, limit=1, seconds=None)
    given = {"turn": 1, "first_only": False, "budget": 12.0}
    found = results.Results()
    found.take({"made": MADE})

    def rows(_: Any, task: str, more: dict[str, Any], *rest: Any) -> Iterator[dict[str, Any]]:
        if task == "ours":
            took.append(more["first_only"])
            row = {"first_s": 2.0 / len(took), "slow": len(took) < slow}
            yield {"turn": 1, "budget": 12.0, "ours": row | ({} if more["first_only"] else _row(0.023))}

    monkeypatch.setattr(offload, "rows", rows)
    monkeypatch.setattr(offload, "tasks", lambda *_: [("ours", given)])
    slow = 2
    offload.measure(options, given, found, 0.0, Page("", {}))
    assert took == [False, True]
    assert found.again == 1
    assert found.ours[12.0]["turns"][1]["first_s"] == 1.0
    assert found.ours[12.0]["turns"][1]["token_s"] == 0.023
    slow, took[:] = 9, []
    offload.measure(options, given, found, 0.0, Page("", {}))
    assert took == [False, True, True]


class TestQuiet:
    """`harness.quiet`: arithmetic that takes as long as a test says, by processor."""

    @pytest.fixture
    def quiet(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        import math
        import multiprocessing
        import os

        self.at, self.slow, self.moves = 0, {0}, []

        def move(_: int, to: set[int]) -> None:
            self.moves.append(to)
            self.at = min(to) if len(to) == 1 else self.at

        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", move, raising=False)
        monkeypatch.setattr(quietness, "_fastest", multiprocessing.Value("d", math.inf))
        monkeypatch.setattr(quietness, "arithmetic", lambda: 2.0 if self.at in self.slow else 1.0)
        return quietness

    def test_all_processors_are_tried_first(self, quiet: Any) -> None:
        assert quiet.quiet()  # as far as is known
        quiet.calibrate()
        assert self.moves == [{0}, {1}, {2}, {0, 1, 2}]
        self.at = 0
        assert not quiet.quiet()

    def test_a_thread_moves_to_a_quiet_one_and_may_go_anywhere(self, quiet: Any) -> None:
        quiet.calibrate()
        self.at, self.moves = 0, []
        assert quiet.settle()
        assert self.at == 1
        assert self.moves[-1] == {0, 1, 2}
        self.moves = []
        assert quiet.settle()
        assert not self.moves  # it stays

    def test_none_is_quiet(self, quiet: Any) -> None:
        quiet.calibrate()
        self.slow = {0, 1, 2}
        assert not quiet.settle(0.0)
        assert self.moves[-1] == {0, 1, 2}
