"""Ways that earlier runs have measured, from what `--json` wrote: for what is no matter of time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness.report import Page
from benchmarks.serve.tables import Row

OF_A_RUN = ("Command", "Date", "Load average at the start")  # facts in which runs of one machine may differ


def take(paths: Iterable[Path], ways: Iterable[str], page: Page) -> dict[str, Row]:
    """Rows of the ways that files have; the page gets the facts of their runs.

    Parameters
    ----------
    paths : iterable of Path
        Files that `--json` wrote, in the order in which they ran.
    ways : iterable of str
        What is asked for: others are left out.
    page : Page
        Its facts are this run's. Where files have all ways, nothing is measured here, and facts are theirs.

    Raises
    ------
    SystemExit
        A file is no result with rows, or of another machine, other versions or another text.
    """
    runs = [(path, *_read(path)) for path in paths]
    if not runs:
        return {}
    rows = {way: row for _, _, data in runs for way, row in data.items() if way in ways}
    here = [] if all(way in rows for way in ways) else [page.facts]
    facts = [found for _, found, _ in runs]
    for (path, found, _), beside in zip(runs, [*facts[1:], *(here or facts[-1:])], strict=True):
        for name in sorted({*found, *beside} - {*OF_A_RUN}):
            if found.get(name) != beside.get(name):
                raise SystemExit(
                    f"`--measured {path}` has {name} {found.get(name)!r}, the run beside it "
                    f"{beside.get(name)!r}: only runs of one machine and its versions can be compared"
                )
    page.facts = facts[0] | {
        name: "; ".join(dict.fromkeys(it.get(name, "") for it in [*facts, *here])) for name in OF_A_RUN
    }
    texts = {(row["text"]["tokens"], len(row["text"]["sums"])) for row in rows.values()}
    if len(texts) > 1:
        raise SystemExit(f"`--measured` has ways that read other texts, of (tokens, windows) {sorted(texts)}")
    return rows


def _read(path: Path) -> tuple[dict[str, str], dict[str, Row]]:
    """Facts of a run, and its rows."""
    try:
        whole = json.loads(path.read_text("utf-8"))
        facts, data = dict(whole["facts"]), dict(whole["data"])
        return facts, {way: row for way, row in data.items() if "text" in row}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"`--measured {path}` is no result of `--perplexity --json`: {error!r}") from error
