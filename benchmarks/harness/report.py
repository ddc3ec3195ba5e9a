"""What a benchmark says: paragraphs, tables and bars, as Markdown, on a terminal, and for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def note(text: str) -> None:
    """Say on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


def verdict(met: bool) -> str:
    """How a table says it."""
    return "pass" if met else "FAIL"


def mib(count: float | None) -> str:
    """Bytes for a table."""
    return "" if count is None else f"{count / 2**20:.0f}"


def gib(count: float | None) -> str:
    """Bytes for a table."""
    return "" if count is None else f"{count / 2**30:.2f}"


def ms(seconds: float | None, digits: int = 1) -> str:
    """Seconds for a table."""
    return "" if seconds is None else f"{seconds * 1e3:.{digits}f}"


@dataclass
class Table:
    """Columns and rows of text: the first column left, the others right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """So that it is also readable as text."""
        widths = [max(len(row[i]) for row in [self.columns, *self.rows]) for i in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            pairs = enumerate(zip(cells, widths, strict=True))
            padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in pairs]
            return "| " + " | ".join(padded) + " |"

        rule = ["-" * w if not i else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
        return "\n".join([line(self.columns), line(rule), *map(line, self.rows)])

    def __rich__(self) -> Any:
        from rich.box import SIMPLE
        from rich.table import Table as Drawn
        from rich.text import Text

        drawn = Drawn(box=SIMPLE)
        for number, column in enumerate(self.columns):
            drawn.add_column(Text(column), justify="right" if number else "left")
        for row in self.rows:
            drawn.add_row(*map(Text, row))
        return drawn


class Page:
    """A result that grows while it is measured.

    Parameters
    ----------
    title : str
        Of the page.
    facts : mapping of str to str
        What `machine.facts` says; empty ones are left out.
    out, json : Path, optional
        Files for the Markdown page, and for the same and `data` as JSON.

    Attributes
    ----------
    data : object
        What programs get besides, by which a benchmark gives numbers that its tables round.
    """

    def __init__(
        self, title: str, facts: Mapping[str, str], out: Path | None = None, json: Path | None = None
    ) -> None:
        self.title, self.facts = title, dict(facts)
        self._out, self._json = out, json
        self.clear()

    def clear(self) -> None:
        """Begin anew, as what is drawn again each time that something comes in."""
        self.parts: list[str | Table] = []
        self.bars: list[tuple[str, bool]] = []
        self.data: Any = None

    def say(self, text: str) -> None:
        """Add a paragraph, or what else is Markdown."""
        self.parts.append(text.rstrip())

    def section(self, title: str) -> None:
        """Begin a section."""
        self.parts.append(f"## {title}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        self.parts.append(Table(columns, rows))

    def judge(self, met: bool, what: str) -> str:
        """Hold against a bar, and give what a table says of that; missed ones are the exit code."""
        self.bars.append((what, bool(met)))
        return verdict(met)

    def limits(self, checks: Iterable[tuple[str, float | None, float]], *, least: bool) -> None:
        """Add a table of figures that must be at most, or at least, their bars; None was not measured."""
        rows = []
        for what, found, bar in checks:
            if found is None:
                rows.append([what, "not measured", f"{bar:.2f}", "-"])
            else:
                met = found >= bar if least else found <= bar
                rows.append([what, f"{found:.2f}", f"{bar:.2f}", self.judge(met, what)])
        self.table(["bar", "found", "at least" if least else "at most", ""], rows)

    @property
    def missed(self) -> list[str]:
        """Bars that are not met."""
        return [what for what, met in self.bars if not met]

    def _head(self) -> str:
        return "\n".join(f"- {name}: {fact}" for name, fact in self.facts.items() if fact)

    def markdown(self) -> str:
        """All of it as a page."""
        parts = [it.markdown() if isinstance(it, Table) else it for it in self.parts]
        return "\n\n".join([f"# {self.title}", self._head(), *parts]) + "\n"

    def as_json(self) -> str:
        """All of it for programs."""
        parts = [{"text": it} if isinstance(it, str) else vars(it) for it in self.parts]
        bars = [{"what": what, "met": met} for what, met in self.bars]
        whole = {"title": self.title, "facts": self.facts, "parts": parts, "bars": bars}
        return json.dumps(whole | {"passed": not self.missed, "data": self.data}, indent=1) + "\n"

    def save(self) -> None:
        """Write the files that were asked for: a run that is cut short leaves what it has saved."""
        for path, text in ((self._out, self.markdown), (self._json, self.as_json)):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text(), "utf-8")

    def show(self) -> None:
        """Print it: drawn on a terminal, Markdown elsewhere."""
        if not sys.stdout.isatty():
            print(self.markdown())
            return
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        for part in (f"# {self.title}\n\n{self._head()}", *self.parts):
            console.print(Markdown(part) if isinstance(part, str) else part)

    def plot(self, path: Path | None, draw: Callable[[Any], Any], **size: Any) -> None:
        """Draw a figure into a file if one is named: `draw` gets Matplotlib's `pyplot`, and returns it."""
        if path is None:
            return
        try:
            import matplotlib
        except ImportError:
            note("no plot: pip install 'tpde[plot]'")
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        path.parent.mkdir(parents=True, exist_ok=True)
        draw(pyplot).savefig(path, **({"dpi": 120} | size))
