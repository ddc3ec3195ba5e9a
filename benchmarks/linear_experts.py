"""Products of routed experts straight from the window layout on a GPU, beside PyTorch's grouped product.

Each row of x has the products of experts that are drawn at random, as a router would choose them: gate and
up, then down. PyTorch takes rows that are sorted by experts before; where its grouped product does not run,
`bmm` with copies of the chosen experts stands for it. A time is that of a layer's two products in a graph of
layers with different experts, more bytes in all than the cache has. Medians of alternating runs after one
to warm up. Every result is compared with a product in float64.
"""

from __future__ import annotations

import argparse
import functools
import math
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.gpu import graph_of
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import alternate, medians, on_device

TITLE, NEEDS_GPU = "Experts from the window layout", True
MOST_ERROR = 1.01  # of PyTorch's

COLD = 256 << 20  # bytes of different experts: several times what caches have
WAYS = ("library", "fused")


@dataclass(frozen=True)
class Experts:
    """Shapes of a model's experts.

    Attributes
    ----------
    name : str
        Of the model.
    count, used : int
        How many there are, and of how many each row has the products.
    hidden, middle : int
        Columns of x, and of what is between the products.
    """

    name: str
    count: int
    used: int
    hidden: int
    middle: int

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Its weights in order."""
        return {
            "gate and up": (self.count, 2 * self.middle, self.hidden),
            "down": (self.count, self.hidden, self.middle),
        }


EXPERTS = {"30b-a3b": Experts("Qwen3-30B-A3B", 128, 8, 2048, 768)}


class ExpertWeight:
    """A weight of experts, plain and in windows, whose library computes with what is there of this device."""

    def __init__(self, shape: tuple[int, int, int], parts: int, draw: Any) -> None:
        import torch

        from tpde.weights.expert_products import Experts as Held
        from tpde.weights.experts_in_windows import parts_in_windows
        from tpde.weights.packed_tensor import PackedTensor
        from tpde.weights.windowed_experts import WindowedExperts

        count, rows, columns = shape
        scale = torch.exp(0.3 * torch.randn((count, rows, 1), device=draw.device, generator=draw))
        self.plain = (torch.randn(shape, device=draw.device, generator=draw) * 0.02 * scale).bfloat16()
        if parts == 1:
            one = WindowedExperts.of_plain(self.plain, "experts", 1.0, False)
            assert one is not None
            self.packed = PackedTensor(one)
        else:
            matrices = self.plain.view(count * parts, rows // parts, columns).unbind()
            made = parts_in_windows(matrices, [f"expert {i}" for i in range(count * parts)])
            assert made is not None
            self.packed = PackedTensor(made, shape, "experts")
        self.held: Held = self.packed.experts

    def fused(self, x: Any, routes: Routes) -> Any:
        """The product from windows: rows in the router's order."""
        return self.held.product(x, routes.ids, routes.ids.numel() // len(x), None, routes.tokens)

    def library(self, x: Any, routes: Routes) -> Any:
        """PyTorch's: of the rows of x that `routes` has sorted."""
        import torch

        if not routes.grouped:
            return torch.bmm(self.plain[routes.ids], x.unsqueeze(-1)).squeeze(-1)
        return grouped_mm(str(x.device))(x, self.plain.transpose(1, 2), offs=routes.ends)


class Routes:
    """What a router chose for rows of x, and what PyTorch's product needs to know of it.

    Attributes
    ----------
    ids : torch.Tensor
        Experts, row by row of x.
    order : torch.Tensor
        Their places, sorted by experts.
    ends : torch.Tensor
        Where the rows of each expert end then.
    grouped : bool
        Whether PyTorch's grouped product runs.
    tokens : int
        How many rows x has.
    """

    def __init__(self, chosen: Any, experts: int) -> None:
        import torch

        self.tokens = len(chosen)
        self.ids = chosen.reshape(-1).contiguous()
        self.order = torch.argsort(self.ids, stable=True)
        self.ends = torch.cumsum(torch.bincount(self.ids, minlength=experts), 0, dtype=torch.int32)
        self.grouped = grouped_mm(str(chosen.device)) is not None


@functools.cache
def grouped_mm(device: str = "cuda") -> Any:
    """PyTorch's grouped product; None if it does not run on a device."""
    import torch

    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        return None
    x = torch.zeros((8, 64), dtype=torch.bfloat16, device=device)
    try:
        found(x, x.new_zeros((2, 64, 64)), offs=torch.tensor([4, 8], dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):
        return None
    return found


def chosen_by(draw: Any, tokens: int, shape: Experts) -> Any:
    """Different experts for each row, at random."""
    import torch

    scores = torch.rand((tokens, shape.count), device=draw.device, generator=draw)
    return scores.topk(shape.used, dim=1).indices


def race(shape: Experts, parts: int, tokens: int, runs: int, draw: Any, page: Page) -> list[str]:
    """A line of the table: both products of a layer for so many rows."""
    import torch

    made: list[list[ExpertWeight]] = []
    plain = sum(2 * a * b * c for a, b, c in shape.shapes().values())
    # What is used of a layer's experts must not be in the cache when it comes again.
    share = 1 - (1 - shape.used / shape.count) ** tokens
    for _ in range(max(2, math.ceil(COLD / (share * plain)))):
        up, down = shape.shapes().values()
        made.append([ExpertWeight(up, parts, draw), ExpertWeight(down, 1, draw)])
    routes = [Routes(chosen_by(draw, tokens, shape), shape.count) for _ in made]
    x = torch.randn((tokens, shape.hidden), device=draw.device, generator=draw).bfloat16()
    middle = torch.randn((tokens * shape.used, shape.middle), device=draw.device, generator=draw).bfloat16()
    taken = [
        (x[it.order // shape.used], middle[it.order])
        if it.grouped
        else (x.repeat_interleave(shape.used, 0), middle)
        for it in routes
    ]

    def run(which: str) -> None:
        for (up, down), route, sorted_x in zip(made, routes, taken, strict=True):
            first, second = (x, middle) if which == "fused" else sorted_x
            getattr(up, which)(first, route)
            getattr(down, which)(second, route)

    taken_by = medians(
        alternate({it: graph_of(functools.partial(run, it)) for it in WAYS}, runs, clock=on_device)
    )
    theirs, ours = (1e6 * taken_by[it] / len(made) for it in WAYS)
    mine, library = _errors_of_experts(made[0], routes[0], (x, middle), taken[0])
    right = mine <= MOST_ERROR * library
    page.judge(right, f"{shape.name}, {tokens} rows, {parts} matrices: error")
    used = len(routes[0].ids.unique())
    packed = sum(it.packed.packed_bytes for it in made[0]) * used / shape.count
    line = [str(tokens), f"{used}", f"{parts}", f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}"]
    line += [f"{packed / ours / 1e6:.2f}", f"{mine:.3e}", f"{library:.3e}" + ("" if right else " FAIL")]
    return line


def _errors_of_experts(
    layer: list[ExpertWeight], routes: Routes, ours: tuple[Any, Any], theirs: tuple[Any, Any]
) -> tuple[float, float]:
    """How far the products are from those in float64, at most: from windows, and the library's."""
    found: tuple[list[float], list[float]] = ([], [])
    for weight, x, sorted_x in zip(layer, ours, theirs, strict=True):
        each = routes.ids.numel() // len(x)
        rows = x.repeat_interleave(each, 0).double()
        needed = rows.new_empty((len(rows), weight.plain.shape[1]))
        for number in routes.ids.unique().tolist():
            mine = routes.ids == number
            needed[mine] = rows[mine] @ weight.plain[number].double().t()
        library = needed[routes.order] if routes.grouped else needed
        for to, y, right in (
            (found[0], weight.fused(x, routes), needed),
            (found[1], weight.library(sorted_x, routes), library),
        ):
            to.append(float((y.double() - right).norm() / right.norm()))
    return max(found[0]), max(found[1])


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--models", nargs="+", choices=list(EXPERTS), default=list(EXPERTS))
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000],
    )
    parser.add_argument("--runs", type=int, default=9)


def run(options: argparse.Namespace, page: Page) -> None:
    """Run one model after the other."""
    import torch

    library = "grouped_mm" if grouped_mm() is not None else "bmm"
    columns = ["rows", "experts used", "gate and up", f"{library}, us", "windows, us", "times", "TB/s"]
    columns += ["error", "library's"]
    for key in options.models:
        shape, draw, lines = EXPERTS[key], torch.Generator("cuda").manual_seed(7), []
        for count in options.rows:
            for parts in (1, 2):
                note(f"{shape.name}: {count} rows, {parts} matrices for gate and up")
                lines.append(race(shape, parts, count, options.runs, draw, page))
                torch.cuda.empty_cache()
        page.section(shape.name)
        page.table(columns, lines)
        page.save()
