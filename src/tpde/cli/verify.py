"""`tpde verify`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from tpde.cli.common import (
    DAMAGE,
    OK,
    few_threads,
    guard,
    named,
    plural,
    print_json,
    progress_bar,
    say,
    say_left_out,
    say_unmatched,
)
from tpde.cli.patch import target_bytes
from tpde.cli.unpack import original_bytes
from tpde.errors import printable


def _say_what_to_compare(packed: Path, against: Path | None, base: Path | None) -> None:
    """Say what to compare with: the source or base that was named may be another one, and nothing damaged."""
    if against is None and base is None:
        return
    if base is None:
        option, made = "--against", f"`{packed}` was packed from"
    else:
        option, made = "--base", f"`{packed}` was made from (`tpde inspect {packed}` names it)"
    hint = f"compare with what {made}, or leave out `{option}` to look for damage alone"
    if against is not None and against.is_dir():
        hint += "; name with `--exclude` what was left out"
    say("hint", hint, "1;36")


@guard
def verify(
    packed: Annotated[
        Path,
        typer.Argument(metavar="PACKED", help="A packed file or directory, or a delta.", readable=False),
    ],
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="SRC", help="Compare every byte with the source.", parser=named),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="BASE",
            help="Of a delta: check that its target comes out of it.",
            parser=named,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=few_threads, help="How many threads decode.", show_default="all processors"
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="PATTERN",
            help="What was left out of SRC when it was packed. May be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    r"""Check every byte of a packed file, a packed directory or a delta.

    Prints what is damaged by tensor and chunk, and exits with 1 if anything is.

    Example:

    \b
      tpde verify packed.safetensors --against model.safetensors
      tpde verify epoch_10.tpde --base epoch_9
    """
    from tpde.errors import InvalidInput
    from tpde.files import operations
    from tpde.files.walk import walk
    from tpde.store.delta_file import is_delta_file
    from tpde.store.verify_delta import verify_delta

    start, delta = time.perf_counter(), is_delta_file(packed)
    if (against if delta else base) is not None and packed.exists():
        raise InvalidInput(
            f"`{packed}` is {'a' if delta else 'no'} delta",
            hint=f"name its {'base with `--base`' if delta else 'source with `--against`'}",
            where=str(packed),
        )
    if exclude and against is None:
        raise InvalidInput(
            "`--exclude` says what of the source was left out, and no source is named",
            hint="name it with `--against`, or leave `--exclude` out",
            where="--exclude",
        )
    with progress_bar("verifying", lambda: (target_bytes if delta else original_bytes)(packed)) as progress:
        if delta:
            problems = verify_delta(packed, base=base, threads=threads, progress=progress)
        else:
            problems = operations.verify(
                packed, against=against, threads=threads, exclude=exclude or (), progress=progress
            )
    seconds = time.perf_counter() - start
    tree = walk(against, exclude or ()) if against is not None and against.is_dir() else None
    left_out = tree.left_out if tree is not None else ()
    say_left_out(left_out)
    say_unmatched(tree.unmatched if tree is not None else exclude or (), against)
    if as_json:
        print_json(
            {
                "path": str(packed),
                "against": str(against) if against is not None else None,
                "base": str(base) if base is not None else None,
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
        _say_what_to_compare(packed, against, base)
    else:
        than = " and equal to its source" if against is not None else ""
        if left_out:
            things = f"{plural(len(left_out), 'thing')} of it {'was' if len(left_out) == 1 else 'were'} not"
            than = f", and so is what was packed of its source; {things}"
        than = " and made from this base" if base is not None else than
        print(f"intact{than}, {seconds:.2f} s")
    return DAMAGE if problems else OK
