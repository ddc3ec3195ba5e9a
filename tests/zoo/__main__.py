"""`python -m tests.zoo`: run the zoo."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from .architecture import DTYPES
from .report import page, summary
from .runner import Result, Task, run, warm


def main() -> int:
    """Run what the command line asks for; 1 if anything fails."""
    warm()
    from .architectures import ARCHITECTURES
    from .checks import CHECKS

    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these architectures", choices=ARCHITECTURES
    )
    parser.add_argument("--family", nargs="+", help="architectures of these families")
    parser.add_argument("--check", nargs="+", default=list(CHECKS), choices=CHECKS)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="write a page of the results")
    parser.add_argument("--verbose", action="store_true", help="also say what the plain models cannot do")
    options = parser.parse_args()
    chosen = [
        it.name
        for it in ARCHITECTURES.values()
        if (not options.only or it.name in options.only)
        and (not options.family or it.family in options.family)
    ]
    tasks = [
        Task(name, check, dtype) for name in chosen for dtype in options.dtype for check in options.check
    ]
    shown = {"fail"} | ({"plain"} if options.verbose else set())

    def report(result: Result) -> None:
        if result.status in shown:
            task = result.task
            print(f"{task.name}, {task.check}, {task.dtype}: {result.status}: {result.reason}", flush=True)

    start = time.monotonic()
    results = run(tasks, options.jobs, report)
    print(summary(results), f"{time.monotonic() - start:.0f} s")
    if options.out:
        options.out.write_text(page(results))
    return any(result.status == "fail" for result in results)


if __name__ == "__main__":
    sys.exit(main())
