"""`tpde diff`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import few_threads, guard, plural, print_json, progress_bar, size, table
from tpde.errors import printable

if TYPE_CHECKING:
    from tpde.store.delta_report import DeltaReport


@guard
def diff(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="BASE", help="A safetensors file, a model directory or a delta.", readable=False
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="What it became; likewise.", readable=False),
    ],
    delta: Annotated[str, typer.Argument(metavar="DELTA", help="Where what changed goes.")],
    fast: Annotated[bool, typer.Option("--fast", help="Larger, and faster to make and to apply.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, callback=few_threads, help="How many threads encode.", show_default="all processors"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DELTA if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    r"""Store only what changed between two states of a model.

    `tpde patch` makes TARGET from BASE and DELTA, byte for byte.

    Example:

    \b
      tpde diff epoch_9 epoch_10 epoch_10.tpde
    """
    from tpde.files.operations import total_bytes
    from tpde.store import diffing

    start = time.perf_counter()
    with progress_bar("comparing", lambda: total_bytes(target)) as progress:
        report = diffing.diff(base, target, delta, fast=fast, threads=threads, force=force, progress=progress)
    seconds = time.perf_counter() - start
    if as_json:
        fields: dict[str, Any] = dataclasses.asdict(report)
        print_json(fields | {"seconds": seconds})
    else:
        print(f"{summary(report)}, {seconds:.2f} s ({size(report.target_bytes / seconds)}/s)")


def summary(report: DeltaReport) -> str:
    """Say in a line what a delta is."""
    counts: dict[str, int] = {}
    for it in report.tensors:
        counts[it.codec] = counts.get(it.codec, 0) + 1
    how = ", ".join(f"{count} {codec}" for codec, count in counts.items())
    return (
        f"{size(report.target_bytes)} in a delta of {size(report.file_bytes)}: ratio {report.ratio:.1f}, "
        f"{plural(len(report.tensors), 'tensor')} ({how or 'none'})"
    )


def render(report: DeltaReport) -> str:
    """Lay a delta out as text."""
    many = len({it.file for it in report.tensors}) > 1
    rows = [
        (
            it.name,
            *((it.file,) if many else ()),
            it.codec,
            it.dtype,
            "x".join(map(str, it.shape)) or "scalar",
            str(it.bytes),
            str(it.stored_bytes),
            "-" if it.changed is None else f"{100 * it.changed:.3f} %",
        )
        for it in report.tensors
    ]
    titles = ("tensor", *(("file",) if many else ()), "codec", "dtype", "shape", "bytes", "stored", "changed")
    parts = [table(titles, rows, left=4 if many else 3)] if rows else []
    if report.others:
        others = [(name, "same" if not stored else str(stored)) for name, stored in report.others]
        parts.append(table(("file", "stored"), others))
    if report.base is not None:
        stands = f"its base was at `{printable(report.base)}`"
    elif report.tensors and not report.needs_base:
        stands = "it stands on nothing"
    else:
        stands = "its base was at an unknown place"
    parts.append(f"{summary(report)}; {stands}")
    return "\n\n".join(parts)
