"""`tpde patch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tpde.cli.common import few_threads, guard, print_json, progress_bar, size


def target_bytes(delta: Path) -> int:
    """Bytes of a delta's target, for a progress bar."""
    from tpde.store.delta_report import inspect_delta

    return inspect_delta(delta).target_bytes


@guard
def patch(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="BASE", help="What DELTA was made from, packed or not; or a delta.", readable=False
        ),
    ],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="What `tpde diff` wrote.", readable=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Where the target's files go.")],
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=few_threads, help="How many threads decode.", show_default="all processors"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    r"""Restore what `tpde diff` was given as TARGET, byte for byte.

    Another BASE than the one that DELTA was made from is refused.

    Example:

    \b
      tpde patch epoch_9 epoch_10.tpde epoch_10
    """
    from tpde.store import patching

    start, total = time.perf_counter(), 0
    with progress_bar("patching", lambda: target_bytes(delta)) as progress:

        def done(count: int) -> None:
            nonlocal total
            total += count
            progress(count)

        patching.patch(base, delta, target, threads=threads, force=force, progress=done)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"target": str(Path(target)), "target_bytes": total, "seconds": seconds})
    else:
        print(f"{size(total)} restored, {seconds:.2f} s ({size(total / seconds)}/s)")
