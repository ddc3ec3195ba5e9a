"""`tpde inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpde.cli.common import guard, named, plural, print_json, say, size, table

if TYPE_CHECKING:
    from tpde.files.inspection_report import GroupReport, Report


@guard
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A safetensors file, packed or not, a directory of them, or a delta.",
            readable=False,
        ),
    ],
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Draw ratios and exponents (needs `tpde[plot]`).",
            parser=named,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    r"""Show each tensor's sizes, codec and ratio, or a delta's changes.

    Dtype, shape and entropy are shown, too. The entropy is that of the symbol plane (the exponent, for BF16),
    from a sample of each tensor. Of a delta, it is how much of each tensor changed.

    Example:

    \b
      tpde inspect packed.safetensors
      tpde inspect ./my-model-packed --plot ratios.png
    """
    from tpde.cli.diff import render as render_delta
    from tpde.errors import InvalidInput
    from tpde.files.inspection import inspect as look
    from tpde.files.plot import plot as draw
    from tpde.store.delta_file import is_delta_file
    from tpde.store.delta_report import inspect_delta

    if is_delta_file(path):
        if plot is not None:
            raise InvalidInput(f"`{path}` is a delta, of which there is no plot", hint="leave out `--plot`")
        delta = inspect_delta(path)
        if as_json:
            print_json(delta)
        else:
            print(render_delta(delta))
        return
    report = look(path, histogram=plot is not None or as_json)
    if plot is not None:
        draw(report, plot)
        say("note", f"drawn into `{plot}`")
    if as_json:
        print_json(report)
    else:
        print(render(report))


def render(report: Report) -> str:
    """Lay a report out as text."""
    many = len(report.files) > 1
    rows = [
        (
            t.name,
            *((t.file,) if many else ()),
            t.codec,
            t.dtype,
            "x".join(map(str, t.shape)) or "scalar",
            str(t.source_bytes),
            str(t.stored_bytes),
            f"{t.ratio:.4f}",
            _number(t.bits_per_weight, 3),
            _number(t.entropy, 3),
        )
        for t in report.tensors
    ]
    titles = ("tensor", *(("file",) if many else ()), "codec", "dtype", "shape", "bytes", "stored", "ratio")
    titles += ("bits/weight", "entropy")
    parts = []
    if rows:
        parts.append(table(titles, rows, left=4 if many else 3))
    for key, groups in (("codec", report.by_codec), ("dtype", report.by_dtype)):
        if groups:
            parts.append(_groups(key, groups))
    bits = _number(report.bits_per_weight, 3)
    parts.append(
        f"{plural(len(report.tensors), 'tensor')} in {plural(len(report.files), 'file')} of "
        f"{size(report.file_bytes)}: {size(report.source_bytes)} stored in {size(report.stored_bytes)}, "
        f"ratio {report.ratio:.4f}, {bits} bits per weight"
    )
    return "\n\n".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _groups(key: str, groups: tuple[GroupReport, ...]) -> str:
    return table(
        (key, "tensors", "bytes", "stored", "ratio", "bits/weight"),
        [
            (
                g.name,
                str(g.tensors),
                str(g.source_bytes),
                str(g.stored_bytes),
                f"{g.ratio:.4f}",
                _number(g.bits_per_weight, 3),
            )
            for g in groups
        ],
    )
