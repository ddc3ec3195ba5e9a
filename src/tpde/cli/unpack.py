"""`tpde unpack`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from tpde.cli.common import few_threads, guard, plural, print_json, progress_bar, say_left_out, size


def original_bytes(path: Path) -> int:
    """Bytes of the original tensors of a packed file or directory, for a progress bar."""
    from tpde.files.inputs import safetensors_files
    from tpde.files.reader import PackedFile

    total = 0
    for file in safetensors_files(path):
        with PackedFile(file) as packed:
            total += sum(spec.nbytes for spec in packed.specs.values())
    return total


@guard
def unpack(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A packed file or directory.", readable=False)
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Where the original goes.")],
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=few_threads, help="How many threads decode.", show_default="all processors"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    r"""Restore what was packed, byte for byte.

    Every chunk and every tensor is checked on the way, and nothing is written if one is damaged.

    Example:

    \b
      tpde unpack packed.safetensors model.safetensors
    """
    from tpde.files import operations

    start = time.perf_counter()
    with progress_bar("unpacking", lambda: original_bytes(source)) as progress:
        result = operations.unpack(source, destination, threads=threads, force=force, progress=progress)
    seconds = time.perf_counter() - start
    say_left_out(result.left_out)
    if as_json:
        ratio = result.destination_bytes / max(result.source_bytes, 1)
        print_json(dataclasses.asdict(result) | {"ratio": ratio, "seconds": seconds})
        return
    print(
        f"{size(result.source_bytes)} unpacked into {size(result.destination_bytes)}: "
        f"{plural(result.tensors, 'tensor')} checked, {seconds:.2f} s "
        f"({size(result.destination_bytes / seconds)}/s)"
    )
