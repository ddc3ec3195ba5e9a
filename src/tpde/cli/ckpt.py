"""`tpde ckpt`: the steps of a checkpoint store."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpde.cli.command import Command
from tpde.cli.common import (
    DAMAGE,
    OK,
    few_threads,
    guard,
    plural,
    print_json,
    progress_bar,
    size,
    table,
)
from tpde.errors import printable

if TYPE_CHECKING:
    from tpde.store.checkpoints import CheckpointStore

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="List, check, prune and export checkpoints."
)

_Dir = Annotated[
    Path, typer.Argument(metavar="DIR", help="What a `tpde.CheckpointStore` wrote.", readable=False)
]
_Threads = Annotated[
    int | None,
    typer.Option(min=1, callback=few_threads, help="How many threads.", show_default="all processors"),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def _ckpt() -> None:
    pass


def _open(directory: Path, threads: int | None = None) -> CheckpointStore:
    """The store of a folder that has steps."""
    from tpde.errors import InvalidInput
    from tpde.store.checkpoints import CheckpointStore

    if not directory.exists():
        raise InvalidInput(f"`{directory}` does not exist", hint="check the path", where=str(directory))
    store = CheckpointStore(directory, threads=threads)
    if not store.steps:
        raise InvalidInput(
            f"`{directory}` has no steps",
            hint="name a folder that `tpde.CheckpointStore` wrote",
            where=str(directory),
        )
    return store


@app.command("list", cls=Command)
@guard
def list_steps(directory: _Dir, as_json: _Json = False) -> None:
    r"""Show the steps, what each takes, and what it stands on.

    Example:

    \b
      tpde ckpt list checkpoints
    """
    steps = _open(directory).describe()
    if as_json:
        print_json({"path": str(directory), "steps": steps})
        return
    rows = [
        (
            str(it.step),
            "nothing" if it.base is None else str(it.base),
            str(it.tensors),
            str(it.changed),
            str(it.state_bytes),
            str(it.file_bytes),
            f"{it.state_bytes / it.file_bytes:.2f}",
        )
        for it in steps
    ]
    print(table(("step", "on", "tensors", "changed", "bytes", "stored", "ratio"), rows))
    total, stored = sum(it.state_bytes for it in steps), sum(it.file_bytes for it in steps)
    print(
        f"\n{plural(len(steps), 'step')}: {size(total)} stored in {size(stored)}, ratio {total / stored:.2f}"
    )


@app.command("verify", cls=Command)
@guard
def verify(directory: _Dir, as_json: _Json = False) -> int:
    r"""Check every byte of every step, and what each stands on.

    Each must stand on what it was made from. Prints what is damaged by file and tensor, and exits with 1 if
    anything is.

    Example:

    \b
      tpde ckpt verify checkpoints
    """
    start, store = time.perf_counter(), _open(directory)
    with progress_bar("verifying", lambda: sum(it.stat().st_size for it in directory.iterdir())) as progress:
        problems = store.verify(progress=progress)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(
            {
                "path": str(directory),
                "ok": not problems,
                "problems": [dataclasses.asdict(it) for it in problems],
                "seconds": seconds,
            }
        )
    elif problems:
        for it in problems:
            print(printable(f"{it.file}: {it.message}"))
        print(f"{plural(len(problems), 'problem')} found")
    else:
        print(f"{plural(len(store.steps), 'step')} intact, {seconds:.2f} s")
    return DAMAGE if problems else OK


@app.command("prune", cls=Command)
@guard
def prune(
    directory: _Dir,
    keep: Annotated[int | None, typer.Option(min=1, help="How many of the newest steps stay.")] = None,
    drop: Annotated[
        list[int] | None, typer.Option("--drop", metavar="STEP", help="A step to remove. May be repeated.")
    ] = None,
    threads: _Threads = None,
    as_json: _Json = False,
) -> None:
    r"""Remove steps. Those that stand on them are rewritten, with the bits that they have.

    Example:

    \b
      tpde ckpt prune checkpoints --keep 5
      tpde ckpt prune checkpoints --drop 300 --drop 400
    """
    from tpde.errors import InvalidInput

    if keep is None and not drop:
        raise InvalidInput("it is not said what to remove", hint="pass `--keep N` or `--drop STEP`")
    with _open(directory, threads) as store:
        gone = store.prune(keep, drop=drop or ())
        there = store.steps
    if as_json:
        print_json({"path": str(directory), "removed": gone, "steps": there})
    else:
        print(f"{plural(len(gone), 'step')} removed, {plural(len(there), 'step')} left")


@app.command("export", cls=Command)
@guard
def export(
    directory: _Dir,
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="A folder that is made.", readable=False)
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Which step.", show_default="the newest")] = None,
    threads: _Threads = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an export wrote.")] = False,
    as_json: _Json = False,
) -> None:
    r"""Write a step as plain safetensors files.

    There is one for each part of the state, and `state.json`.

    Example:

    \b
      tpde ckpt export checkpoints step_400 --step 400
    """
    store = _open(directory, threads)
    wanted = store.steps[-1] if step is None else step
    store.export(wanted, destination, force=force)
    files = sorted(it.name for it in destination.iterdir())
    if as_json:
        print_json({"path": str(directory), "step": wanted, "destination": str(destination), "files": files})
    else:
        print(f"step {wanted} as {plural(len(files), 'file')} in `{destination}`")
