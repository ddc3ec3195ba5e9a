"""Deltas of training steps: sizes of whole files against the peers', and the speed of one thread.

The steps are those of a small GPT that is trained here on Python's own sources by AdamW with fp32 masters, at
learning rates of 1e-6 to 1e-3: its weights in bf16, its masters, and its Adam states. `--pair` adds two model
directories or files. The peers' figures leave out names and headers; ours are those of whole files.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import Laps
from benchmarks.peers.deltas import PEERS, Pairs, sizes
from tpde.codec import delta, delta_planner, fingerprints
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec
from tpde.format.container_writer import canonical_header
from tpde.store.diffing import diff
from tpde.store.patching import patch

TITLE = "Deltas of training steps"
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
ORIGIN, ORIGIN_BAR = (768, 2304), 10.5
SPEED_BARS = {"make": 0.5, "apply": 1.0, "make, fast": 2.0, "apply, fast": 4.0}


Point = tuple[str, float, dict[str, float]]
"""Of a case: its name, the share of words that changed, ratios."""


class Case(NamedTuple):
    """Two states, and what the ratio must be: a number, or so many times the best peer."""

    name: str
    pairs: Pairs
    bar: float | None = None
    times: float | None = None


# ---- states


def train(width: int, warm: int, rates: Sequence[float]) -> Iterator[tuple[float, dict[str, Pairs]]]:
    """Train a small GPT, and give the states one step apart at each learning rate."""
    import torch

    from benchmarks.data.training import Training

    training = Training(width)
    model, optimizer, step = training.model, training.optimizer, training.step

    def snapshot() -> dict[str, list[tuple[str, Any]]]:
        states: dict[str, list[tuple[str, Any]]] = {"bf16": [], "fp32": [], "exp_avg": [], "exp_avg_sq": []}
        for weight in model.parameters():
            flat = weight.detach().flatten()
            states["bf16"].append(("BF16", flat.bfloat16().view(torch.int16).numpy().view(np.uint16).copy()))
            states["fp32"].append(("F32", flat.numpy().view(np.uint32).copy()))
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[weight][name].flatten().numpy()
                states[name].append(("F32", moment.view(np.uint32).copy()))
        return states

    for i in range(warm):
        loss = step()
        if i % 50 == 49:
            note(f"step {i + 1}: loss {loss:.3f}")
    for rate in rates:
        training.set_rate(rate)
        for _ in range(5):
            step()
        before = snapshot()
        step()
        after = snapshot()
        yield (
            rate,
            {
                kind: [(d, old, new) for (d, old), (_, new) in zip(before[kind], after[kind], strict=True)]
                for kind in before
            },
        )


def origin() -> Pairs:
    """The prototypes' own case: a tenth of a layer's weights moved."""
    draw = np.random.default_rng(0)
    old = (0.02 * draw.standard_normal(math.prod(ORIGIN))).astype(np.float32)
    new, places = old.copy(), draw.random(old.size) < 0.1
    new[places] += (0.01 * draw.standard_normal(int(places.sum()))).astype(np.float32)
    return [("F32", old.view(np.uint32), new.view(np.uint32))]


def read_pairs(base: Path, target: Path) -> Pairs:
    """Give the tensors that two files or directories have in common."""
    kinds = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
    names = sorted(base.rglob("*.safetensors")) if base.is_dir() else [base]
    pairs: Pairs = []
    for path in names:
        with PackedFile(path) as old, PackedFile(target / path.relative_to(base)) as new:
            for name, spec in old.specs.items():
                if spec.dtype in kinds and new.specs.get(name) == spec:
                    before, after = (it.read(name).view(kinds[spec.dtype]) for it in (old, new))
                    pairs.append((spec.dtype, before, after))
    return pairs


# ---- sizes


def write(path: Path, state: Sequence[tuple[str, np.ndarray[Any, Any]]]) -> None:
    """Write one state as a file, under names as models have them."""
    specs = {f"model.layers.{i}.weight": TensorSpec(it[0], (it[1].size,)) for i, it in enumerate(state)}
    head = canonical_header(specs, {"format": "pt"})
    order = sorted(range(len(state)), key=lambda i: f"model.layers.{i}.weight".encode())
    data = b"".join(state[i][1].tobytes() for i in order)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def ours(pairs: Pairs, fast: bool) -> int:
    """The size of our whole delta file, from which the target came back byte for byte."""
    with tempfile.TemporaryDirectory() as name:
        base, target, out = (Path(name) / it for it in ("base", "target", "delta"))
        write(base, [(dtype, old) for dtype, old, _ in pairs])
        write(target, [(dtype, new) for dtype, _, new in pairs])
        report = diff(base, target, out, fast=fast, threads=1)
        patch(base, out, Path(name) / "again", threads=1)
        if (Path(name) / "again").read_bytes() != target.read_bytes():
            raise SystemExit("the target differs")
        return report.file_bytes


def row(case: Case, points: list[Point], page: Page) -> list[str]:
    """Measure one case: a row of the table."""
    note(case.name)
    total = sum(new.nbytes for _, _, new in case.pairs)
    words = sum(new.size for _, _, new in case.pairs)
    changed = sum(int((old != new).sum()) for _, old, new in case.pairs) / words
    best, fast = total / ours(case.pairs, False), total / ours(case.pairs, True)
    peers = {name: total / size if size else None for name, size in sizes(case.pairs).items()}
    known = {name: ratio for name, ratio in peers.items() if ratio is not None}
    bar = case.bar if case.times is None else case.times * max(known.values(), default=0.0)
    points.append((case.name, changed, {"tpde": best, "tpde --fast": fast, **known}))
    cells = [case.name, f"{100 * changed:.3f} %", f"{best:.2f}", f"{fast:.2f}"]
    cells += [f"{known[name]:.2f}" if name in known else "-" for name in PEERS]
    return cells + (["", ""] if bar is None else [f"{bar:.2f}", page.judge(best >= bar, case.name)])


# ---- speed


def _share(share: float, words: int) -> tuple[Any, Any]:
    """Weights of bf16, of which a share moves by one unit in the last place, small ones before large ones."""
    draw = np.random.default_rng(1)
    old = (0.02 * draw.standard_normal(words)).astype(np.float32).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    weight = np.exp2(127.0 - (old >> 7 & 255))
    moved = draw.random(words) < weight * (share * words / weight.sum())
    return old, np.where(moved, old + draw.choice([1, 0xFFFF], words).astype(np.uint16), old)


def speeds(mib: int, runs: int, page: Page) -> list[list[str]]:
    """Measure making and applying in memory on one thread."""
    rows = []
    for share in (0.005, 0.035):
        old, new = (it.view(np.uint8) for it in _share(share, mib << 19))
        work, laps = old.copy(), Laps()

        def make(fast: bool, old: Any = old, new: Any = new) -> tuple[Any, Any]:
            model = delta.ChangeModel(delta_planner.plan([(old, new)], 2, 1, fast=fast), encode=True)
            return model, model.encode(old, new)

        for _ in range(runs + 1):
            for fast in (False, True):
                suffix = ", fast" if fast else ""
                model, sparse = laps(f"make{suffix}", partial(make, fast))
                work[:] = old
                laps(f"apply{suffix}", partial(model.apply, sparse, work))
                if not np.array_equal(work, new):
                    raise SystemExit("the target differs")
            laps("fingerprint", partial(fingerprints.fingerprint, work))
        for name in laps.seconds:
            speed = old.size / laps.median(name, 1) / 1e9
            bar = SPEED_BARS.get(name) if share == 0.005 else None
            judged = ["", ""] if bar is None else [f"{bar:g}", page.judge(speed >= bar, name)]
            rows.append([name, f"{100 * share:.1f} %", f"{speed:.2f}", *judged])
    return rows


# ---- the plot


def plot(points: list[Point], pyplot: Any) -> Any:
    """Draw ratios of bf16 against the share of words that changed."""
    chosen = sorted((it for it in points if it[0].startswith("bf16")), key=lambda it: it[1])
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in ("tpde", "tpde --fast", *PEERS):
        line = [(100 * changed, ratios[name]) for _, changed, ratios in chosen if name in ratios]
        if line:
            axes.plot(*zip(*line, strict=True), marker="o", label=name, lw=2.5 if name == "tpde" else 1.2)
    axes.set(
        xscale="log", yscale="log", xlabel="words changed, %", ylabel="size of the plain weights / delta"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--pair", action="append", default=[], metavar="NAME:BASE:TARGET[:BAR]")
    parser.add_argument("--width", type=int, default=192, help="of the model that is trained")
    parser.add_argument("--warm", type=int, default=200, help="steps before the first state")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor whose speed is measured")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="draw ratios against the share that changed")


def run(options: argparse.Namespace, page: Page) -> None:
    """Train, then measure one case after the other."""
    cases = [Case("origin, {}x{} fp32".format(*ORIGIN), origin(), bar=ORIGIN_BAR)]
    for rate, states in train(options.width, options.warm, options.rates):
        for kind, pairs in states.items():
            changed = sum(int((a != b).sum()) for _, a, b in pairs) / sum(a.size for _, a, _ in pairs)
            times = 1.0 if kind != "bf16" else 1.3 if changed <= 0.1 else 1.05
            cases.append(Case(f"{kind}, {rate:g}", pairs, times=times))
    for text in options.pair:
        name, base, target, *bar = text.split(":")
        cases.append(
            Case(f"{name}, bf16", read_pairs(Path(base), Path(target)), float(bar[0]) if bar else None)
        )
    points: list[Point] = []
    titles = ["state, learning rate", "changed", "tpde", "tpde --fast", *PEERS, "bar", ""]
    page.section("Size of the plain weights over the delta's")
    page.table(titles, [row(case, points, page) for case in cases])
    page.section("Speed of one thread, GB/s of the weights' bytes")
    page.table(["", "changed", "GB/s", "bar", ""], speeds(options.mib, options.runs, page))
    page.plot(options.plot, lambda pyplot: plot(points, pyplot), dpi=150)
    page.data = points
