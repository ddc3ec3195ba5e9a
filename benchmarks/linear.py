"""Products straight from the window layout on a GPU, beside the matrix library's with the plain matrix.

Linear layers of Llama 1 B, 8 B and 70 B and of Qwen3-32B, query, key and value as one matrix, gate and up as
one, with weights `0.02 * normal`, rows scaled by `exp(0.3 * normal)`. A time is that of a matrix in a CUDA
graph of products with different ones, more bytes in all than the cache has; `all` is one graph of a token's
products, the layers in the model's order and the head at its end. Medians of alternating runs after one to
warm up. More rows than products from windows take are multiplied by the matrix library, with a matrix that is
decoded before each product, as models do. Every result is compared with a product in float64. Beside it is
the time in which the device copies as many bytes, read and written, as the products must read: packed
weights, once. Glyd and NWC, where they are installed, pack the same matrices.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import tuned
from benchmarks.harness.gpu import graph_of, stream
from benchmarks.harness.processes import reason
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import alternate, medians, on_device
from benchmarks.peers import products
from tpde.cuda.window_products import DeviceWindow

TITLE, NEEDS_GPU = "Products from the window layout", True
COLD = 256 << 20  # bytes of different matrices: several times what caches have
# Of all layers of the 8 B shape, by the card and the rows of x.
BARS = {
    "H200": {1: 1.33, 4: 1.28, 8: 1.25, 16: 1.15, 32: 1.03, 64: 0.9, 128: 0.8},
    "H100": {1: 1.45, 4: 1.42, 8: 1.40, 16: 1.28, 32: 1.12, 64: 0.95, 128: 0.8},
}
WAYS = ("library", "fused")
MOST_ERROR = 1.01  # of the matrix library's


class Model(NamedTuple):
    """Shapes of a model."""

    name: str
    layers: int
    hidden: int
    queries: int
    keys: int
    middle: int
    vocabulary: int

    def layer(self) -> dict[str, tuple[int, int]]:
        """Its matrices in order."""
        return {
            "qkv": (self.queries + 2 * self.keys, self.hidden),
            "o": (self.hidden, self.queries),
            "gate and up": (2 * self.middle, self.hidden),
            "down": (self.hidden, self.middle),
        }


MODELS = {
    "1b": Model("Llama 1 B", 16, 2048, 2048, 512, 8192, 128256),
    "8b": Model("Llama 8 B", 32, 4096, 4096, 1024, 14336, 128256),
    "32b": Model("Qwen3-32B", 64, 5120, 8192, 1024, 25600, 151936),
    "70b": Model("Llama 70 B", 80, 8192, 8192, 1024, 28672, 128256),
}


class Matrix:
    """A weight, plain and in windows, and as others pack it."""

    def __init__(self, rows: int, columns: int, draw: Any) -> None:
        import torch

        from tpde.weights import windowing

        scale = torch.exp(0.3 * torch.randn((rows, 1), device="cuda", generator=draw))
        self.plain = (torch.randn((rows, columns), device="cuda", generator=draw) * 0.02 * scale).bfloat16()
        encoded = windowing.encode(self.plain)
        assert encoded is not None
        self.blob, window = encoded
        self._device = DeviceWindow(window, self.blob.data_ptr(), torch.cuda.current_device())
        self.others: dict[str, products.Product] = {}

    def run(self, which: str, x: Any, y: Any) -> Any:
        """The product in one of the ways; others give tensors of their own."""
        if which in self.others:
            return self.others[which](x)
        getattr(self, which)(x, y)
        return y

    def fused(self, x: Any, y: Any) -> None:
        """The product from windows; of many rows, from rows that are decoded."""
        import torch

        if not self._device.takes(len(x)):
            plain = torch.empty_like(self.plain)
            self._device.rows(plain.data_ptr(), plain.stride(0), stream())
            torch.mm(x, plain.T, out=y)
            return
        places = x.data_ptr(), x.stride(0), len(x), y.data_ptr(), y.stride(0)
        room = torch.empty(self._device.room(len(x)), dtype=torch.uint8, device=x.device)
        self._device.product(*places, 0, stream(), room.data_ptr())

    def library(self, x: Any, y: Any) -> None:
        """The matrix library's."""
        import torch

        torch.mm(x, self.plain.T, out=y)


def pack_by_others(made: dict[str, list[Matrix]], page: Page) -> list[str]:
    """Have others pack the matrices: which could, all of them."""
    able = []
    for name in products.installed():
        title, make, _ = products.PEERS[name]
        note(f"{title} packs")
        try:
            for matrices in made.values():
                for it in matrices:
                    it.others[name] = make(it.plain)
            able.append(name)
        except Exception as error:
            page.say(f"{title} does not pack them: {reason(error)}")
            for matrices in made.values():
                for it in matrices:
                    it.others.pop(name, None)
    return able


class Race:
    """A model's products with so many rows of x."""

    def __init__(
        self,
        model: Model,
        made: dict[str, list[Matrix]],
        count: int,
        runs: int,
        draw: Any,
        others: Sequence[str],
    ) -> None:
        import torch

        self._model, self._made, self._count, self._runs = model, made, count, runs
        self._others, self.refused = others, dict[str, str]()
        self._x, self._y = {}, {}
        for name, matrices in made.items():
            rows, columns = matrices[0].plain.shape
            self._x[name] = torch.randn((count, columns), device="cuda", generator=draw).bfloat16()
            self._y[name] = torch.empty((count, rows), dtype=torch.bfloat16, device="cuda")

    def _run(self, which: str, name: str, number: int) -> None:
        matrices = self._made[name]
        matrices[number % len(matrices)].run(which, self._x[name], self._y[name])

    def _times(self, run: Callable[[str], None]) -> dict[str, float]:
        """Microseconds on the device, by ways; others that fail are left out."""
        graphs = {which: graph_of(functools.partial(run, which)) for which in WAYS}
        for which in self._others:
            try:
                graphs[which] = graph_of(functools.partial(run, which))
            except Exception as error:
                self.refused[which] = reason(error)
        taken = medians(alternate(graphs, self._runs, clock=on_device))
        return {which: 1e6 * seconds for which, seconds in taken.items()}

    def matrix(self, name: str, page: Page) -> list[str]:
        """A line of the table."""
        matrices = self._made[name]
        count = -(-8 // len(matrices)) * len(matrices)

        def run(which: str) -> None:
            for number in range(count):
                self._run(which, name, number)

        taken = {which: time / count for which, time in self._times(run).items()}
        theirs, ours = (taken[which] for which in WAYS)
        errors = self._errors(name, taken)
        library, mine = (errors[which] for which in WAYS)
        rows, columns = matrices[0].plain.shape
        right = mine <= MOST_ERROR * library
        page.judge(right, f"error, {name}, {self._count} rows")
        line = [str(self._count), name, f"{rows} x {columns}", f"{theirs:.1f}", f"{ours:.1f}"]
        line += [f"{theirs / ours:.2f}", f"{matrices[0].blob.nbytes / ours / 1e6:.2f}"]
        line += [f"{mine:.3e}", f"{library:.3e}" + ("" if right else " FAIL")]
        for which in self._others:
            if which not in taken:
                line.append("-")
                continue
            right = errors[which] <= MOST_ERROR * library  # never of NaN
            line.append(f"{taken[which]:.1f}" + ("" if right else f" (error {errors[which]:.3e})"))
        return line

    def _errors(self, name: str, ways: Iterable[str]) -> dict[str, float]:
        """How far the products are from that in float64."""
        x, y, matrix = self._x[name], self._y[name], self._made[name][0]
        needed = x.double() @ matrix.plain.double().T
        norm, found = needed.norm(), dict[str, float]()
        for which in ways:
            found[which] = float((matrix.run(which, x, y).double() - needed).norm() / norm)
        return found

    def all(self) -> dict[str, float]:
        """Microseconds of all products of a token, by ways."""

        def run(which: str) -> None:
            for layer in range(self._model.layers):
                for name in self._model.layer():
                    self._run(which, name, layer)
            self._run(which, "head", 0)

        return self._times(run)


class Point(NamedTuple):
    """All products of a model's token: seconds of the library's, ours, and and at a copy's rate."""

    model: str
    rows: int
    library: float
    ours: float
    copied: float


def plot(points: list[Point], pyplot: Any) -> Any:
    """Draw how many times as fast as the library's all products are, and would be at the rate of a copy."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for model in dict.fromkeys(it.model for it in points):
        mine = [it for it in points if it.model == model]
        rows = [it.rows for it in mine]
        (line,) = axes.plot(rows, [it.library / it.ours for it in mine], marker="o", label=model)
        allowed = [it.library / it.copied for it in mine]
        axes.plot(
            rows, allowed, ls="--", lw=1, color=line.get_color(), label=f"{model}, at the rate of a copy"
        )
    axes.axhline(1, color="grey", lw=1)
    ticks = sorted({it.rows for it in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [*map(str, ticks)])
    axes.set(xlabel="rows of x", ylabel="times as fast as the library", ylim=(0, 2.5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def _memory_rate() -> float:
    """Bytes a second that the device reads and writes when it copies."""
    import torch

    source = torch.ones(4 * COLD, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    took = [on_device(functools.partial(target.copy_, source)) for _ in range(8)]
    return 2 * source.nbytes / statistics.median(took[2:])


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--runs", type=int, default=9)
    tuned.option(parser)
    parser.add_argument("--plot", type=Path, help="draw how many times as fast all layers run, by rows")


def run(options: argparse.Namespace, page: Page) -> None:
    """Run one model after the other."""
    import torch

    tuned.follow(options, page)
    card = torch.cuda.get_device_properties(0).name
    bars = next((it for name, it in BARS.items() if name in card), {})
    rate, points = _memory_rate(), list[Point]()
    page.say(f"A copy moves {rate / 1e12:.2f} TB/s, read and written; reading alone may be faster.")
    for key in options.models:
        model, draw, lines = MODELS[key], torch.Generator("cuda").manual_seed(7), []
        note(f"{model.name}: making weights")
        made = {
            name: [Matrix(*shape, draw) for _ in range(-(-COLD // (2 * shape[0] * shape[1])))]
            for name, shape in (model.layer() | {"head": (model.vocabulary, model.hidden)}).items()
        }
        each = {name: it[0].blob.nbytes for name, it in made.items()}
        copied = ((sum(each.values()) - each["head"]) * model.layers + each["head"]) / rate
        words = sum(it[0].plain.numel() for it in made.values())
        bits = 8 * sum(it[0].blob.nbytes for it in made.values()) / words
        page.section(model.name)
        page.say(f"{bits:.3f} bits a weight; at the rate of a copy all of them take {1e6 * copied:.0f} us.")
        others, refused = pack_by_others(made, page), dict[str, str]()
        for count in options.rows:
            note(f"{model.name}: {count} rows")
            race = Race(model, made, count, options.runs, draw, others)
            for name in made:
                lines.append(race.matrix(name, page))
            taken = race.all()
            theirs, ours = (taken[which] for which in WAYS)
            points.append(Point(model.name, count, theirs / 1e6, ours / 1e6, copied))
            times_as_fast = f"{theirs / ours:.2f}"
            if key == "8b" and count in bars:
                met = page.judge(theirs / ours >= bars[count], f"all, {count} rows")
                times_as_fast += f" (bar {bars[count]}: {met})"
            speed = f"{copied * rate / ours / 1e6:.2f}"
            line = [str(count), "all", "", f"{theirs:.0f}", f"{ours:.0f}", times_as_fast, speed, "", ""]
            lines.append([*line, *(f"{taken[it]:.0f}" if it in taken else "-" for it in others)])
            refused |= race.refused
        columns = ["rows", "", "shape", "library, us", "windows, us", "times", "TB/s", "error", "library's"]
        page.table([*columns, *(f"{products.PEERS[it][0]}, us" for it in others)], lines)
        for name, why in refused.items():
            page.say(f"{products.PEERS[name][0]} refuses what has a dash: {why}")
        page.save()
        del made, race
        torch.cuda.empty_cache()
    page.plot(options.plot, lambda pyplot: plot(points, pyplot))
    page.data = [it._asdict() for it in points]
