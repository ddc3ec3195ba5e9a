"""Put each mutant into a copy of the tree, and run the tests that should notice."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .lists import AREAS
from .mutant import ROOT, Mutant, Stale
from .runner import BROKEN, HUNG, KILLED, SURVIVED, Outcome, Runner, warm
from .tree import DoesNotCompile


def _chosen(only: Sequence[str]) -> list[Mutant]:
    """Those with one of these names, areas or files."""
    found = [
        it
        for area, mutants in AREAS.items()
        for it in mutants
        if not only or any(this in (it.name, area) or it.path.startswith(this) for this in only)
    ]
    if not found:
        raise Stale(f"no mutant is called, or lies in, {' or '.join(only)}")
    return found


def _score(outcomes: Iterable[Outcome]) -> str:
    """A table by areas."""
    area_of = {it.name: area for area, mutants in AREAS.items() for it in mutants}
    counts: dict[str, Counter[str]] = {}
    for it in outcomes:
        for key in (area_of[it.mutant.name], "all"):
            counts.setdefault(key, Counter())[it.result] += 1
    lines = [f"{'area':<14}{'mutants':>8}{'killed':>8}{'survived':>10}{'hung':>6}{'score':>8}"]
    for key in [*AREAS, "all"]:
        if found := counts.get(key):
            share = 100 * found[KILLED] / found.total()
            row = f"{found.total():>8}{found[KILLED]:>8}{found[SURVIVED]:>10}{found[HUNG]:>6}"
            lines.append(f"{key:<14}{row}{share:>6.0f} %")
    return "\n".join(lines)


def _list(mutants: Sequence[Mutant]) -> None:
    for it in mutants:
        print(f"{it.name}: {it.breaks} ({it.path})")


def _run(mutants: Sequence[Mutant], jobs: int, baseline: bool) -> int:
    for it in mutants:
        it.changed(ROOT)
        it.require_tests(ROOT)
    warm()
    with tempfile.TemporaryDirectory(prefix="tpde-mutants-") as folder:
        runner = Runner(Path(folder).resolve())
        if baseline:
            files = sorted({test.partition("::")[0] for it in mutants for test in it.tests})
            before = runner.baseline(files)
            print(f"{len(files)} files of tests without a mutant: {before.seconds:.0f} s", flush=True)
            if before.result != SURVIVED:
                print(before.log, file=sys.stderr)
                return 2
        outcomes = []
        for outcome in runner.run(mutants, jobs):
            outcomes.append(outcome)
            it = outcome.mutant
            what = "" if outcome.result == KILLED else f": {it.breaks} ({it.path})"
            print(f"{outcome.result:<9}{it.name} {outcome.seconds:.1f} s{what}", flush=True)
            if outcome.result in (BROKEN, HUNG):
                print(outcome.log, file=sys.stderr)
    print(_score(outcomes))
    if any(it.result == BROKEN for it in outcomes):
        return 2
    return int(any(it.result != KILLED for it in outcomes))


def main() -> int:
    """Run what the command line asks for; 1 if a mutant survives or hangs, 2 if it cannot be said."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        default=[],
        help="mutants, areas, or files and folders of the tree",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests on the tree as it is first"
    )
    options = parser.parse_args()
    try:
        mutants = _chosen(options.only)
        if options.list:
            _list(mutants)
            return 0
        return _run(mutants, options.jobs, not options.no_baseline)
    except (Stale, DoesNotCompile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
