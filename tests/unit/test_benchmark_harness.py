"""What all benchmarks share: results and bars, turns, commands without places, processes that fail."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import machine, processes, timing
from benchmarks.harness.report import Page, Table

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page("Title", {"CPU": "some", "GPU": ""}, tmp_path / "new" / "page.md", tmp_path / "page.json")


def test_a_table_is_markdown_whose_numbers_are_right() -> None:
    made = Table(["what", "ms"], [["a", "1.5"], ["longer", "10.0"]]).markdown()
    assert made.splitlines() == [
        "| what   |   ms |",
        "| ------ | ---: |",
        "| a      |  1.5 |",
        "| longer | 10.0 |",
    ]


def test_a_page_has_all_that_was_said(page: Page, tmp_path: Path) -> None:
    page.say("One.\n")
    page.section("Part")
    page.table(["a"], [["1"]])
    page.judge(True, "good")
    page.data = {"seconds": [1.0]}
    page.save()
    text = (tmp_path / "new" / "page.md").read_text()
    assert text == "# Title\n\n- CPU: some\n\nOne.\n\n## Part\n\n| a |\n| - |\n| 1 |\n"
    found = json.loads((tmp_path / "page.json").read_text())
    assert found["parts"][2] == {"columns": ["a"], "rows": [["1"]]}
    assert (found["passed"], found["data"]) == (True, {"seconds": [1.0]})
    page.clear()
    page.save()
    assert "One." not in (tmp_path / "new" / "page.md").read_text()


def test_what_is_not_measured_misses_no_bar(page: Page) -> None:
    checks: list[tuple[str, float | None, float]] = [
        ("fast", 2.0, 1.0),
        ("slow", 0.5, 1.0),
        ("none", None, 1.0),
    ]
    page.limits(checks, least=True)
    assert page.missed == ["slow"]
    page.limits(checks, least=False)
    assert page.missed == ["slow", "fast"]
    assert page.markdown().count("not measured") == 2


def test_a_terminal_gets_drawn_tables(page: Page, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page.table(["[what]"], [["[1]"]])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    page.show()
    shown = capsys.readouterr().out
    assert "[1]" in shown
    assert "| " not in shown


def test_places_on_this_machine_are_no_part_of_the_command() -> None:
    given = [
        "--dir",
        "/home/me",
        "--out=a.md",
        "--json",
        "b.json",
        "--model",
        "/data/models/small:1.4",
        "--runs",
        "3",
    ]
    assert machine.command("ratio", given) == "python -m benchmarks ratio --model small:1.4 --runs 3"


def test_ways_take_turns_and_the_first_turns_do_not_count() -> None:
    order: list[str] = []
    seconds = iter(range(100))

    def clock(way: Any) -> float:
        way()
        return float(next(seconds))

    taken = timing.alternate({it: lambda it=it: order.append(it) for it in "ab"}, 2, warm=1, clock=clock)
    assert order == [*"ababab"]
    assert taken == {"a": [2.0, 4.0], "b": [3.0, 5.0]}
    assert timing.medians(taken) == {"a": 3.0, "b": 4.0}


def test_laps_keep_results_and_seconds() -> None:
    laps = timing.Laps()
    assert [laps("work", lambda: 7) for _ in range(3)] == [7, 7, 7]
    assert len(laps.seconds["work"]) == 3
    laps.seconds["work"] = [9.0, 1.0, 3.0]
    assert laps.median("work", 1) == 2.0


def add(one: int, other: int) -> int:
    print("what is printed is no result")
    return one + other


def fail() -> None:
    raise ValueError("no such thing\nmore")


def partly() -> dict[str, str]:
    print("said on stderr", file=sys.stderr)
    return {"eager_problem": "no"}


def wait_long() -> None:
    time.sleep(60)


def leave() -> None:
    os._exit(3)


class TestCall:
    """A function of a module in an interpreter of its own."""

    @pytest.fixture(autouse=True)
    def named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tests are no module that a new interpreter finds by the name that pytest gives them."""
        paths = f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parents[1]}"
        monkeypatch.setenv("PYTHONPATH", paths)
        for function in (add, fail, partly, wait_long, leave):
            monkeypatch.setattr(function, "__module__", Path(__file__).stem)

    def test_gives_the_result(self) -> None:
        assert processes.call(add, 2, 3) == 5

    def test_a_failure_is_told_by_its_reason(self) -> None:
        with pytest.raises(processes.Failed, match=r"^ValueError: no such thing$"):
            processes.call(fail)
        with pytest.raises(processes.Failed, match="exit code 3"):
            processes.call(leave)

    def test_a_limit(self) -> None:
        with pytest.raises(processes.Failed, match="more than 2 s"):
            processes.call(wait_long, limit=2)

    def test_a_problem_is_said_with_what_the_process_said(self, capsys: Any) -> None:
        assert processes.call(partly) == {"eager_problem": "no"}
        assert "said on stderr" in capsys.readouterr().err


def perform(task: str, given: dict[str, Any]) -> None:
    def work(given: dict[str, Any]) -> None:
        processes.tell(first=given["number"], place=os.environ.get("PLACE"))
        print("not a row")
        if task == "fail":
            raise ValueError("no")
        if task == "leave":
            os._exit(3)
        if task == "wait":
            time.sleep(60)

    processes.guarded({task: work}, task, given)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("work", None),
        ("fail", "fail: ValueError: no"),
        ("leave", "leave: exit code 3"),
        ("wait", "wait: took more than 1 s"),
    ],
)
def test_a_fork_tells_rows_and_how_it_ended(
    task: str, problem: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = 1.0 if task == "wait" else 60.0
    with capsys.disabled():  # a fork prints its rows
        found = list(processes.rows(perform, task, {"number": 1}, limit, {"PLACE": "there"}))
    assert found[0] == {"first": 1, "place": "there"}
    assert processes.told(found, "problem") == problem
    assert processes.told(found, "first") == 1
