"""Results by sizes and contestants: their speeds, as a table and as a plot, and who had other bits."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.gpu import Result
from benchmarks.harness.report import Page

COPY, OURS, CHECKED = "device copy", "tpde", "tpde, checksums"

Grid = dict[int | str, tuple[int, dict[str, Result]]]


def speed(nbytes: int, result: Result | None) -> float | None:
    """GB/s of output, if there is a result."""
    if result is None or not result.times or result.problem:
        return None
    return nbytes / result.median / 1e9


def shown(key: int | str) -> str:
    """A column's title."""
    return str(key) if isinstance(key, str) else f"{key} MiB"


def dtype_table(grid: Grid, page: Page) -> None:
    """One dtype: a row for each contestant, a column for each size."""
    names = list(next(iter(grid.values()))[1])
    rows = []
    for name in names:
        ratio, cells, problems = "", [], []
        for nbytes, results in grid.values():
            found = results.get(name)
            value = speed(nbytes, found)
            cells.append(f"{value:.0f}" if value else "-")
            if found and found.problem:
                problems.append(found.problem)
            elif found and value:
                ratio = f"{nbytes / found.stored:.4f}"
        rows.append([name, ratio or "-", *cells, problems[0] if problems else ""])
    page.table(["GB/s of output", "ratio", *map(shown, grid), "remark"], rows)


def plot(grids: dict[str, Grid], pyplot: Any) -> Any:
    """Speed by size, a panel for each dtype."""
    figure, panels = pyplot.subplots(1, len(grids), figsize=(4.2 * len(grids), 4), sharey=True, squeeze=False)
    for panel, (name, grid) in zip(panels[0], grids.items(), strict=True):
        for who in next(iter(grid.values()))[1]:
            points = [
                (key, value)
                for key, (nbytes, results) in grid.items()
                if isinstance(key, int) and (value := speed(nbytes, results.get(who)))
            ]
            if points:
                dashed = {"color": "grey", "linestyle": "--"}
                style = dashed if who == COPY else {"marker": "o", "markersize": 3}
                panel.plot(*zip(*points, strict=True), label=who, **style)
        panel.set(xscale="log", title=name, xlabel="MiB of output")
        sizes = [key for key in grid if isinstance(key, int)]
        panel.set_xticks(sizes, [*map(str, sizes)])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylim(bottom=0)  # of all: only now is the largest value known
    panels[0][0].set_ylabel("GB/s of output, cold cache")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    return figure


def wrong_bits(grids: dict[str, Grid]) -> list[str]:
    """Who of ours gave other bits than the source's."""
    return [
        f"{who}, {name}, {shown(key)}"
        for name, grid in grids.items()
        for key, (_, results) in grid.items()
        for who, result in results.items()
        if who in (OURS, CHECKED) and result.problem
    ]
