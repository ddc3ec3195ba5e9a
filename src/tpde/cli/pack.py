"""`tpde pack`."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import (
    CodecChoice,
    few_threads,
    guard,
    plural,
    print_json,
    progress_bar,
    say,
    say_left_out,
    say_unmatched,
    size,
    table,
)

if TYPE_CHECKING:
    from tpde.files.inspection_report import GroupReport


@guard
def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A safetensors file, a PyTorch state dict (.bin, .pt), a model directory, or the id of a "
            "model on the Hugging Face hub.",
        ),
    ],
    destination: Annotated[
        str,
        typer.Argument(metavar="DST", help="The packed file or directory. SRC is never modified."),
    ],
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=few_threads, help="How many threads encode.", show_default="all processors"
        ),
    ] = None,
    codec: Annotated[
        CodecChoice, typer.Option(help="`auto` chooses for each tensor; the others try only theirs.")
    ] = CodecChoice.auto,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="PATTERN",
            help="Leave out of a directory what has such a name, or, with a slash, such a path. May be "
            "repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    dtype_report: Annotated[
        bool, typer.Option("--dtype-report", help="Print sizes and ratios by dtype as well.")
    ] = False,
) -> None:
    r"""Make a file or a model directory smaller, losslessly.

    The result loads with the same names; `tpde unpack` restores every byte.

    Example:

    \b
      tpde pack model.safetensors packed.safetensors
      tpde pack ./my-model ./my-model-packed --dtype-report
    """
    from tpde.files import operations
    from tpde.files.inputs import resolve
    from tpde.files.inspection import survey

    path, start, patterns = resolve(source), time.perf_counter(), exclude or ()
    with progress_bar("packing", lambda: operations.total_bytes(path, patterns)) as progress:
        result = operations.pack(
            path,
            destination,
            threads=threads,
            codec=codec.value,
            force=force,
            exclude=patterns,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    groups = survey(destination, sample=False).by_dtype if dtype_report else None
    if as_json:
        fields: dict[str, Any] = dataclasses.asdict(result)
        fields["seconds"] = seconds
        if groups is not None:
            fields["by_dtype"] = [dataclasses.asdict(g) for g in groups]
        print_json(fields)
    else:
        print(
            f"{size(result.source_bytes)} packed into {size(result.destination_bytes)}: "
            f"ratio {result.ratio:.4f}, {result.packed} of {plural(result.tensors, 'tensor')} packed, "
            f"{seconds:.2f} s ({size(result.source_bytes / seconds)}/s)"
        )
        if groups is not None:
            print(dtype_table(groups))
    say_left_out(result.left_out)
    say_unmatched(result.unmatched, result.source)
    if not result.packed:
        every = "no tensor would shrink; all are stored as they were"
        say("note", every if result.tensors else "there is no tensor")


def dtype_table(groups: tuple[GroupReport, ...]) -> str:
    """Sizes by dtype."""
    return table(
        ("dtype", "tensors", "bytes", "packed bytes", "ratio"),
        [
            (g.name, str(g.tensors), str(g.source_bytes), str(g.stored_bytes), f"{g.ratio:.4f}")
            for g in groups
        ],
    )
