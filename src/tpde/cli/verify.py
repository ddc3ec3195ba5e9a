"""`tpde verify`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from tpde.cli.common import DAMAGE, OK, few_threads, guard, plural, print_json, progress_bar, say_left_out
from tpde.cli.unpack import original_bytes
from tpde.errors import printable


@guard
def verify(
    packed: Annotated[
        Path, typer.Argument(metavar="PACKED", help="A packed file or directory.", readable=False)
    ],
    against: Annotated[
        Path | None, typer.Option(metavar="SRC", help="Compare every byte with the source.", readable=False)
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=few_threads, help="How many threads decode.", show_default="all processors"
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="What was left out of SRC when it was packed. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    r"""Check every chunk and every tensor of a packed file or directory.

    Prints what is damaged by tensor and chunk, and exits with 1 if anything is.

    Example:

    \b
      tpde verify packed.safetensors --against model.safetensors
    """
    from tpde.packing import api
    from tpde.packing.tree import walk

    start = time.perf_counter()
    with progress_bar("verifying", lambda: original_bytes(packed)) as progress:
        problems = api.verify(
            packed, against=against, threads=threads, exclude=exclude or (), progress=progress
        )
    seconds = time.perf_counter() - start
    left_out = walk(against, exclude or ()).left_out if against is not None and against.is_dir() else ()
    say_left_out(left_out)
    if as_json:
        print_json(
            {
                "path": str(packed),
                "against": str(against) if against is not None else None,
                "ok": not problems,
                "problems": [dataclasses.asdict(p) for p in problems],
                "left_out": [dataclasses.asdict(it) for it in left_out],
                "seconds": seconds,
            }
        )
    elif problems:
        for problem in problems:
            print(printable(f"{problem.file}: {problem.message}"))
        print(f"{plural(len(problems), 'problem')} found")
    else:
        than = " and equal to its source" if against is not None else ""
        if left_out:
            than = (
                f", and so is what was packed of its source; {plural(len(left_out), 'thing')} of it was not"
            )
        print(f"intact{than}, {seconds:.2f} s")
    return DAMAGE if problems else OK
