"""Run the zoo: all of it, or some architectures, checks, dtypes, flows."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from .architecture import DTYPES
from .report import label, libraries, pages, summary
from .runner import FLOW, Result, Task, keep, kept, run, warm


def main() -> int:
    """Run what the command line asks for; 1 if anything fails."""
    warm()
    from .architectures import ARCHITECTURES
    from .checks import CHECKS, applies
    from .flows import FLOWS

    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    families = sorted({it.family for it in ARCHITECTURES.values()})
    names = {"metavar": "NAME", "nargs": "+"}
    parser.add_argument("--only", **names, choices=ARCHITECTURES, help="these architectures")
    parser.add_argument("--family", nargs="+", choices=families, help="architectures of these families")
    parser.add_argument("--check", nargs="+", choices=CHECKS, help="these checks")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="in these dtypes")
    parser.add_argument(
        "--flow", metavar="NAME", nargs="*", choices=FLOWS, help="these flows, or all of them"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="write the results as a page, and flows as one beside it")
    parser.add_argument(
        "--results",
        type=Path,
        help="keep the results in this file as they come; what is in it is not run again",
    )
    parser.add_argument("--verbose", action="store_true", help="say everything that is not as plain")
    options = parser.parse_args()
    some = options.only or options.family or options.check or options.dtype
    chosen = [
        it.name
        for it in ARCHITECTURES.values()
        if (not options.only or it.name in options.only)
        and (not options.family or it.family in options.family)
        and (some or options.flow is None)
    ]
    tasks = [
        Task(name, check, dtype)
        for name in chosen
        for dtype in options.dtype or DTYPES
        for check in options.check or CHECKS
        if applies(check, ARCHITECTURES[name])
    ]
    if not some or options.flow is not None:
        tasks += [Task(name, FLOW) for name in options.flow or FLOWS]
    shown = {"fail", "plain", "refused"} if options.verbose else {"fail"}

    ended = kept(options.results) if options.results else {}

    def report(result: Result) -> None:
        if result.status in shown:
            print(f"{label(result.task)}: {result.status}: {result.reason}", flush=True)
        if options.results:
            keep(options.results, replace(result, libraries=libraries()))

    start = time.monotonic()
    ended |= {it.task: it for it in run((task for task in tasks if task not in ended), options.jobs, report)}
    results = [ended[task] for task in tasks]
    print(summary(results), f"{time.monotonic() - start:.0f} s")
    if options.out:
        for path, text in pages(results, options.out).items():
            path.write_text(text)
    return int(any(result.status == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
