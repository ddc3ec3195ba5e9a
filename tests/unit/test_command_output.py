"""What commands print: colours and bars on terminals, sizes, tables, bounded texts, JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from typing import Any

import pytest

from tpde import errors
from tpde.cli import common, doctor
from tpde.errors import bounded, printable

# ---- terminals


class Screen(io.StringIO):
    """What says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "env", "draws", "colours"),
    [
        (None, {"TERM": "xterm"}, False, False),
        (io.StringIO(), {"TERM": "xterm"}, False, False),
        (Screen(), {}, False, False),
        (Screen(), {"TERM": "dumb"}, False, False),
        (Screen(), {"TERM": "xterm"}, True, True),
        (Screen(), {"TERM": "xterm", "NO_COLOR": ""}, True, True),
        (Screen(), {"TERM": "xterm", "NO_COLOR": "1"}, True, False),
    ],
)
def test_what_is_a_terminal(
    stream: Any, env: dict[str, str], draws: bool, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert (common.terminal(stream), common.coloured(stream)) == (draws, colours)


def test_lines_are_coloured_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, needed in ((Screen(), "\033[7mnote:\033[0m a\\x1bb\n"), (io.StringIO(), "note: a\\x1bb\n")):
        monkeypatch.setattr(sys, "stderr", stream)
        common.say("note", "a\x1bb", "7")
        assert stream.getvalue() == needed


def test_a_bar_is_drawn_on_a_terminal_and_moves_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.progress

    events: list[Any] = []
    shown: list[str] = []

    class Bar:
        def __init__(self, *columns: Any, console: Any, transient: bool) -> None:
            shown[:] = [type(it).__name__ for it in columns]
            assert console.stderr
            assert transient

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None:
            events.append("gone")

        def add_task(self, label: str, total: int | None) -> str:
            events.append((label, total))
            return "task"

        def advance(self, task: str, size: int) -> None:
            assert task == "task"
            events.append(size)

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    with common.progress_bar("packing", lambda: pytest.fail("nobody sees it")) as progress:
        progress(1 << 30)
    assert events == []
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Screen())
    with common.progress_bar("packing", lambda: 1 << 20) as progress:
        for size in (100 << 10, 100 << 10, 56 << 10, 1, (256 << 10) - 2, 1, 5 << 20):
            progress(size)
    assert events == [("packing", 1 << 20), 256 << 10, 256 << 10, 5 << 20, "gone"]

    assert "DownloadColumn" in shown
    events.clear()
    with common.progress_bar("timing", lambda: 2, steps=True) as progress:
        progress(1)
        progress(1)
    assert events == [("timing", 2), 1, 1, "gone"]
    assert "MofNCompleteColumn" in shown
    assert "DownloadColumn" not in shown

    def failing() -> int:
        raise errors.Truncated("the command meets it")

    def missing() -> int:
        raise FileNotFoundError

    for total in (failing, missing, lambda: 0):
        events.clear()
        with common.progress_bar("packing", total):
            pass
        assert events == [("packing", None), "gone"]


# ---- texts


def test_sizes_change_their_unit_at_1024() -> None:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    assert [common.size(n) for n in (0, 1, 1023)] == ["0 B", "1 B", "1023 B"]
    for power, unit in enumerate(units[1:], 1):
        assert common.size(1 << 10 * power) == f"1.0 {unit}"
        assert common.size(1023 << 10 * power) == f"1023.0 {unit}"
    assert common.size(1 << 51) == "2048.0 TiB"
    assert [common.plural(n, "tensor") for n in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


def test_columns_are_aligned_to_the_left_as_many_as_are_asked_for() -> None:
    rows = [("a", "bb", "1"), ("aaa", "b", "22")]
    assert common.table(("x", "y", "z"), rows, left=2).splitlines() == [
        "x    y    z",
        "a    bb   1",
        "aaa  b   22",
    ]
    assert common.table(("x", "y", "z"), rows).splitlines() == ["x     y   z", "a    bb   1", "aaa   b  22"]


def test_cells_have_at_most_120_characters() -> None:
    for size in (120, 121):
        cell = common.table(("n",), [("x" * size,)]).splitlines()[1]
        assert cell == ("x" * 120 if size == 120 else "x" * 60 + "…" + "x" * 59)


@pytest.mark.parametrize(
    ("size", "most"), [(10, 10), (10, 11), (11, 10), (11, 11), (50, 10), (50, 11), (3, 1)]
)
def test_bounded_texts_show_their_start_and_their_end(size: int, most: int) -> None:
    text = "".join(chr(ord("0") + i) for i in range(size))
    found = bounded(text, most)
    if size <= most:
        assert found == text
        return
    assert len(found) == most
    start, end = found.split("…")
    assert text.startswith(start)
    assert text.endswith(end)
    assert 0 <= len(start) - len(end) <= 1


def test_messages_are_bounded_and_names_are_printable() -> None:
    assert printable("aé😀") == "aé😀"
    assert printable("a\nb\x1b\u202e") == "a\\nb\\x1b\\u202e"
    assert printable(7) == "7"
    for size in (2000, 2001):
        assert len(errors.Corrupt("x" * size).message) == 2000
    assert len(errors.Corrupt("\x1b" * 1500).message) == 2000
    assert len(errors.Corrupt("x" * 1990).prefixed("y" * 100).message) == 2000
    log = "line\n" * 3000
    assert errors.CompileError(log).message == log


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2500])
def test_json_of_many_records_is_one_to_a_line(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    records = [doctor.Check(f'}}\0{{"{i}", }}, {{', "\0\n", True, "d", "\\u0000", None) for i in range(count)]
    common.print_json({"before": ["\0", 1], "checks": records, "after": {"a": [1, 2]}})
    text = capsys.readouterr().out
    expected = [dataclasses.asdict(record) for record in records]
    assert json.loads(text) == {"before": ["\0", 1], "checks": expected, "after": {"a": [1, 2]}}
    lines = text.splitlines()
    assert lines[6 : 6 + count] == [
        "    " + json.dumps(record) + "," * (i + 1 < count) for i, record in enumerate(expected)
    ]
    assert lines[-2] == '  "after": {"a": [1, 2]}'


def test_json_is_one_item_to_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"a": [1, {"b": "é"}], "c": [], "d": (), "e": ("x",)})
    out = capsys.readouterr().out
    assert out == (
        '{\n  "a": [\n    1,\n    {"b": "\\u00e9"}\n  ],\n  "c": [],\n  "d": [],\n  "e": [\n    "x"\n  ]\n}\n'
    )
    common.print_json(errors_as_check := doctor.Check("n", "ok", True, "d", "f", None))
    assert json.loads(capsys.readouterr().out) == {
        "name": "n", "status": "ok", "required": True, "detail": "d", "needed_for": "f", "command": None,
    }  # fmt: skip
    assert errors_as_check.required
