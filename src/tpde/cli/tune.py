"""`tpde tune`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import guard, named, plural, print_json, progress_bar, say, table
from tpde.errors import InvalidInput, UnsupportedDevice

if TYPE_CHECKING:
    import torch

    from tpde.cuda.tuning import Choices, Shape
    from tpde.weights.product_timing import Timed

ROWS = "1,2,4,8,16,32,64"
_ON_A_GPU = "run it on the machine whose GPU is to be tuned"


@guard
def tune(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A model directory, packed or plain, or a hub id.", show_default=False
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            metavar="SHAPES",
            help="Rows x columns of matrices, instead of a model's: `14336x4096,4096x14336`.",
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option("--rows", metavar="ROWS", help="How many rows of inputs: sequences at a time.")
    ] = ROWS,
    device: Annotated[
        str | None, typer.Option(help="`cuda` or `cuda:N`.", show_default="the GPU that PyTorch uses")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the table there, and not to where products look for it.",
            parser=named,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the times as JSON.")] = False,
) -> None:
    r"""Measure how products with packed weights are fastest on this GPU.

    For `--kernels fused`. There are several ways to launch a product, which give the same bits. Each is timed
    for each shape of a model's linear layers, and the fastest are written to a table, which products on this
    card look in from then on. Without it they are launched as was the fastest on an H200 or an H100.

    Example:

    \b
      tpde tune llama-packed
      tpde tune --shapes 28672x4096,6144x4096 --rows 1,8
    """
    if (model is None) == (shapes is None):
        both = "`MODEL` and `--shapes` both say what is timed" if model else "it is not said what is timed"
        raise InvalidInput(both, hint="name a model directory, or `--shapes` such as `14336x4096`")
    given = _parse_shapes(shapes) if shapes is not None else []
    counts = _parse_rows(rows)
    if model is None:
        from tpde.frameworks import require_torch

        require_torch("timing products", extra="cuda")
    else:
        from tpde.integrations.transformers.require import require_transformers

        require_transformers()

    from tpde.cuda import tuning
    from tpde.cuda.backend import current
    from tpde.cuda.product_ways import KERNELS
    from tpde.loading.devices import checked_device

    where = checked_device("cuda" if device is None else device, _ON_A_GPU)
    if where.type != "cuda":
        raise UnsupportedDevice(
            f"products are tuned on a GPU, `{where}` is none",
            hint="name `cuda` or `cuda:N`",
            where="--device",
        )
    facts = current().facts(where.index or 0)
    timed = given if model is None else shapes_of(model)
    path = tuning.table_path(facts) if output is None else output
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    from tpde.io.sinks import require_writable

    require_writable(path)  # now, not when all has been timed
    known: Choices = {}
    if output is None:
        try:
            known = tuning.read_table(path, facts, KERNELS)
        except InvalidInput as error:
            say("note", f"{error.message}, and is replaced")
    found = _time(timed, counts, where)
    tuning.write_table(path, facts, KERNELS, merged(known, found))
    if as_json:
        print_json(as_dict(facts.name, path, found))
    else:
        print(render(found))
        changed = sum(it.best != it.default for it in found)
        print(
            f"\n{plural(len(found), 'product')} timed on {facts.name}, {changed} faster in another way than "
            f"by default; written to `{path}`"
        )


def _parse_shapes(text: str) -> list[Shape]:
    """The shapes that a text names, each once."""
    from tpde.codec.windows import sections

    found: list[Shape] = []
    hint = "write rows x columns, such as `14336x4096`"
    for it in _parts(text, "--shapes", "14336x4096,4096x14336"):
        match = re.fullmatch("([0-9]{1,18})x([0-9]{1,18})", it)
        if match is None:
            raise InvalidInput(f"`{it:.60}` is no shape", hint=hint, where="--shapes")
        found.append((int(match[1]), int(match[2])))
        try:
            sections(*found[-1])
        except InvalidInput as error:  # there is no such layout
            error.hint, error.where = hint, "--shapes"
            raise
    return list(dict.fromkeys(found))


def _parse_rows(text: str) -> list[int]:
    """The numbers of rows that a text names, each once."""
    from tpde.cuda.product_ways import MOST_ROWS

    found = []
    for it in _parts(text, "--rows", ROWS):
        if re.fullmatch("[0-9]{1,9}", it) is None or not 1 <= int(it) <= MOST_ROWS:
            raise InvalidInput(
                f"`--rows` names `{it:.60}`: products of 1 to {MOST_ROWS} rows can be timed",
                hint=f"write such as `{ROWS}`",
                where="--rows",
            )
        found.append(int(it))
    return list(dict.fromkeys(found))


def _parts(text: str, option: str, example: str) -> list[str]:
    """What stands between commas or spaces."""
    found = [it for it in re.split(r"[,\s]+", text) if it]
    if not found:
        raise InvalidInput(f"`{option}` names nothing", hint=f"write such as `{example}`", where=option)
    return found


def shapes_of(model: str) -> list[Shape]:
    """The shapes of the weights that a model with fused kernels has in the window layout, by their sizes."""
    from tpde.integrations.transformers.folder import model_directory
    from tpde.integrations.transformers.fused import fused_names
    from tpde.integrations.transformers.shape import opened_shape

    folder, _ = model_directory(model, pack=True)
    with opened_shape(folder, pack=True) as (shape, _, weights):
        names = fused_names(shape, weights.runs, experts=False)
        found = {(run.shape[0], run.shape[1]) for run in map(weights.runs.__getitem__, names)}
    if not found:
        raise InvalidInput(
            f"no weight of `{folder}` is multiplied as it is packed: those of `nn.Linear` layers in bfloat16 "
            "can be",
            hint="name a model that has some, or `--shapes`",
            where=str(folder),
        )
    return sorted(found, key=lambda it: (it[0] * it[1], it))


def _time(shapes: Sequence[Shape], counts: Sequence[int], device: torch.device) -> list[Timed]:
    """Time all products, with a bar."""
    from tpde.weights.product_timing import time_products

    found = []
    with progress_bar("timing", lambda: len(shapes) * len(counts), steps=True) as advance:
        for shape in shapes:
            for it in time_products(shape, counts, device):
                found.append(it)
                advance(1)
    return found


def merged(known: Choices, found: Sequence[Timed]) -> dict[Shape, dict[int, str]]:
    """What a table says, with what was found in the place of what it says of the same products."""
    made = {shape: dict(by_count) for shape, by_count in known.items()}
    for it in found:
        made.setdefault((it.rows, it.columns), {})[it.x_rows] = it.best
    return made


def render(found: Sequence[Timed]) -> str:
    """Lay times out as text."""
    lines = []
    for it in found:
        default, best = it.seconds[it.default], it.seconds[it.best]
        same = it.best == it.default
        line = [f"{it.rows}x{it.columns}", "the default" if same else it.best, str(it.x_rows)]
        line += [f"{1e6 * default:.1f}", f"{1e6 * best:.1f}"]
        lines.append([*line, "-" if same else f"{100 * (default / best - 1):.1f} %"])
    return table(("shape", "fastest way", "rows", "default, us", "fastest, us", "gain"), lines, left=2)


def as_dict(name: str, path: Path, found: Sequence[Timed]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "device": name,
        "path": str(path),
        "products": [
            {
                "shape": [it.rows, it.columns],
                "rows": it.x_rows,
                "default": it.default,
                "best": it.best,
                "seconds": it.seconds,
            }
            for it in found
        ],
    }
