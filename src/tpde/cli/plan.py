"""`tpde plan`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import guard, print_json, size, table
from tpde.errors import InvalidInput
from tpde.planning.budget import MAX_BATCH, MAX_TOKENS, parse_budget

if TYPE_CHECKING:
    from pathlib import Path

    from tpde.planning.budget import Budget
    from tpde.planning.stream_plan import StreamPlan
    from tpde.planning.units import Rates, Unit
    from tpde.streaming.rates import Meters

_GB = 1e9

_PARTS = {
    "plain": "plain weights and buffers",
    "cache": "KV cache",
    "activations": "activations",
    "fixed": "kernels and libraries",
    "workspace": "workspace, to decode to",
    "strips": "rows of weights in the window layout, decoded",
    "tiles": "what a tile of a weight gives",
    "ring": "ring, to copy to",
    "kept": "packed weights copied once",
    "experts": "cache of packed experts, at least",
    "pages": "page tables for host memory",
    "index": "index maps of streamed weights",
    "packed": "packed weights",
    "windows": "weights in the window layout",
    "decoded": "weights decoded once",
}

# The rates that are measured on a GPU, if they are not named.
_RATES = {
    "--copy-rate": "from host memory to the GPU, 55 on PCIe 5",
    "--memory-rate": "of the GPU's memory, 4200 on an H200",
}

_LIMITS = {
    "copy": "copying from host memory",
    "disk": "reading from the disk",
    "memory": "the device's memory and decoder",
    "host": "the host's calls",
}


@guard
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A packed model directory, or the hub id of one."),
    ],
    vram: Annotated[
        str, typer.Option("--vram", metavar="SIZE", help="Device memory to use, such as `16GiB`.")
    ],
    ram: Annotated[
        str | None,
        typer.Option(
            "--ram",
            metavar="SIZE",
            help="Host memory for weights, such as `32GiB`.",
            show_default="as much as is needed",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Sequences times length that there is to be memory for.")
    ] = MAX_TOKENS,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Sequences at once that there is to be memory for.")
    ] = MAX_BATCH,
    kernels: Annotated[
        str,
        typer.Option(
            "--kernels",
            metavar="HOW",
            help="As of `tpde run`. With `fused`, weights may be kept in the window layout, from which "
            "linear layers multiply.",
        ),
    ] = "exact",
    device: Annotated[
        str | None,
        typer.Option(help="The CUDA device to measure.", show_default="the GPU if there is one"),
    ] = None,
    copy_rate: Annotated[
        float | None,
        typer.Option(
            "--copy-rate",
            metavar="GB/S",
            min=0.001,
            help="From host memory to the device, instead of measuring: some 25 on PCIe 4, 55 on PCIe 5.",
        ),
    ] = None,
    memory_rate: Annotated[
        float | None,
        typer.Option(
            "--memory-rate",
            metavar="GB/S",
            min=0.001,
            help="Of the device's memory, instead of measuring: 1000 on an RTX 4090, 3350 on an H100.",
        ),
    ] = None,
    disk_rate: Annotated[
        float | None,
        typer.Option(
            "--disk-rate",
            metavar="GB/S",
            min=0.001,
            help="Of the disk, instead of measuring: 3 to 7 for one on NVMe.",
        ),
    ] = None,
    call_time: Annotated[
        float | None,
        typer.Option(
            "--call-time",
            metavar="US",
            min=0.001,
            help="Of the host, for each module that a model calls, instead of measuring.",
            show_default="42 where the first two rates are named, so that no GPU is measured",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    r"""Show what of a model a memory budget keeps where, and its speed.

    Nothing is loaded. What is kept where does not depend on the rates. The time does: it is that of one
    token, one sequence at a time.

    Example:

    \b
      tpde plan llama-packed --vram 16GiB
      tpde plan llama-packed --vram 6GiB --ram 8GiB --max-tokens 1024
      tpde plan llama-packed --vram 12GiB --kernels fused
    """
    from tpde.integrations.transformers.require import require_transformers

    require_transformers()  # before torch is imported

    from tpde.integrations.transformers.budget_plan import plan_streaming
    from tpde.integrations.transformers.folder import model_directory, weight_files
    from tpde.integrations.transformers.fused import fused_names
    from tpde.integrations.transformers.shape import opened_shape
    from tpde.loading.model_units import units_of
    from tpde.nn.kernels import check_kernels

    budget = parse_budget(vram, ram, max_tokens, max_batch=max_batch)
    assert budget is not None  # `--vram` must be there
    how = check_kernels(kernels)
    folder, _ = model_directory(model, pack=False)
    files = weight_files(folder) if ram is not None else []
    rates = _rates(device, copy_rate, memory_rate, disk_rate, call_time, files)
    with opened_shape(folder) as (shape, checkpoint, weights):
        fused = fused_names(shape, weights.runs, experts=False) if how == "fused" else ()
        made = plan_streaming(shape, checkpoint, weights, budget, fused=fused).on(rates)
        units = units_of(shape, weights.runs)
    if as_json:
        print_json(as_dict(made, units, budget, rates, model) | {"kernels": how})
    else:
        print(render(made, units, max_tokens))


def _rates(
    device: str | None,
    copy: float | None,
    memory: float | None,
    disk: float | None,
    call: float | None,
    files: Sequence[Path],
    meters: Meters | None = None,
) -> Rates:
    """Those that were given, the others measured."""
    import torch

    from tpde.loading.devices import checked_device
    from tpde.streaming.rates import Meters, given_rates, measure_rates

    meters = meters or Meters()
    to_read = files if disk is None else ()
    if copy is None or memory is None:
        missing = [it for it, rate in (("--copy-rate", copy), ("--memory-rate", memory)) if rate is None]
        hint = f"name {' and '.join(f'`{it}` ({_RATES[it]})' for it in missing)}, in GB/s"
        if device is None and not torch.cuda.is_available():
            what = f", and `{missing[0]}` is not named" if len(missing) == 1 else ""
            raise InvalidInput(f"there is no GPU to measure{what}", hint=hint, where=missing[0])
        rates = measure_rates(checked_device(device or "cuda", hint), to_read, meters)
    elif device is not None:
        raise InvalidInput(
            "`--device` is what is measured, and with `--copy-rate` and `--memory-rate` none is",
            hint="leave it out",
        )
    else:
        rates = given_rates(copy * _GB, memory * _GB, meters.disk(to_read) if to_read else None)
    given = {"copy": copy, "memory": memory, "disk": disk}
    rates = replace(rates, **{key: value * _GB for key, value in given.items() if value is not None})
    return rates if call is None else replace(rates, launch=call / 1e6)


def ranges(names: Iterable[str]) -> str:
    """Write names, those that differ in a number only as ranges.

    Examples
    --------
    >>> ranges(["head", "layers.0", "layers.1", "layers.2", "layers.5"])
    'head, layers 0-2, 5'
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        found = re.fullmatch(r"(.+)\.([0-9]+)", name)
        if found is None:
            groups.setdefault(name, [])
        else:
            groups.setdefault(found[1], []).append(int(found[2]))
    written = []
    for name, numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        spans = ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)
        written.append(f"{name} {spans}".rstrip())
    return ", ".join(written)


def render(plan: StreamPlan, units: Sequence[Unit], max_tokens: int) -> str:
    """Lay a plan out as text."""
    where = [
        (str(row["placement"]), str(len(row["units"])), size(row["packed_bytes"]), size(row["plain_bytes"]))
        for row in _places(plan, units)
    ]
    titles = ("kept", "units", "packed", "plain")
    parts = [table(titles, where)]
    wide = max(len(title) for title, *_ in where) + 1
    parts.append(
        "\n".join(f"{row['placement'] + ':':<{wide}} {ranges(row['units'])}" for row in _places(plan, units))
    )
    if plan.tiled:
        parts.append(f"used row by row, since they do not fit whole: {ranges(plan.tiled)}")
    budget = [(_PARTS[key], size(nbytes)) for key, nbytes in plan.parts.items() if nbytes]
    budget += [("in all", size(plan.used)), ("of", size(plan.vram))]
    parts.append(table(("device memory", "bytes"), budget))
    host = f"host memory: {size(plan.host)} page-locked"
    if plan.staging:
        host += f", {size(plan.staging)} to read files to"
    if plan.ram is not None:
        host += f", of {size(plan.ram)}"
    times = [(_LIMITS[key], f"{seconds * 1e3:.2f}") for key, seconds in plan.times.items() if seconds]
    parts += [host, table(("a token takes", "ms"), times)]
    parts.append(
        f"{plan.seconds * 1e3:.1f} ms for each token, {1 / plan.seconds:.1f} tokens/s, for up to "
        f"{max_tokens} tokens; limited by {_LIMITS[plan.limit]}"
    )
    return "\n\n".join(parts)


def _places(plan: StreamPlan, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """The units in each place that has some."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(plan.placements[unit.name].value, []).append(unit)
    return [
        {
            "placement": place,
            "units": [unit.name for unit in here],
            "packed_bytes": sum(unit.packed for unit in here),
            "plain_bytes": sum(unit.plain for unit in here),
        }
        for place, here in found.items()
    ]


def as_dict(
    plan: StreamPlan, units: Sequence[Unit], budget: Budget, rates: Rates, model: str
) -> dict[str, Any]:
    """Everything, for JSON."""
    known = {"copy": rates.copy, "memory": rates.memory, "decode": rates.decode, "disk": rates.disk}
    known["windows"] = rates.windows
    return {
        "model": model,
        "vram": plan.vram,
        "ram": plan.ram,
        "max_tokens": budget.max_tokens,
        "max_batch": budget.max_batch,
        "placements": _places(plan, units),
        "tiled": list(plan.tiled),
        "workspace_bytes": plan.workspace,
        "ring_slots": plan.slots,
        "piece_bytes": plan.piece,
        "device_bytes": dict(plan.parts),
        "used_bytes": plan.used,
        "host_bytes": plan.host,
        "staging_bytes": plan.staging,
        "seconds": dict(plan.times),
        "seconds_per_token": plan.seconds,
        "tokens_per_second": 1 / plan.seconds,
        "limit": plan.limit,
        "rates": {key: value for key, value in known.items() if value != float("inf")}
        | {"launch_seconds": rates.launch},
    }
