"""Products with many rows of x from the window layout: matrices are decoded, then the library multiplies.

The linear layers of the 8 B Llama shape, different weights each, with as many rows as a prompt has tokens.
Compared are the library's products of plain weights, decoding alone, and both: in turn into one buffer; the
next matrix meanwhile on another stream, of equal or higher priority, into the other of two buffers; and in
strips of rows that may stay in the cache. Times are of the device, with the host ahead of it, for 32 layers;
"host" is what launching takes the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.data.weights import on_device as weights_on_device
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import on_device

TITLE, NEEDS_GPU = "Products with many rows", True
LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
WHOLE = 32  # layers that times are of
AHEAD = 20_000_000  # clocks that the device waits for the host at first
STRIPES_AT = 16  # rows of a stripe


class Layers:
    """Plain and packed matrices, inputs, and room for two decoded matrices."""

    def __init__(self, layers: int, rows: int) -> None:
        import torch

        from tpde.weights.windowed import Windowed

        shapes = LAYER * layers
        self.plain = [weights_on_device(*shape, torch.bfloat16) for shape in shapes]
        made = [Windowed.of_plain(it, "weight", 1.0) for it in self.plain]
        self.packed = [it for it in made if it is not None]
        self.x = {
            columns: torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            for columns in {shape[1] for shape in LAYER}
        }
        size = max(it.nbytes for it in self.plain)
        self._rooms = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = {
            name: torch.cuda.Stream(priority=at)  # type: ignore[no-untyped-call]
            for name, at in (("", 0), ("high", -1))
        }

    def _multiply(self, weight: Any) -> Any:
        import torch

        return torch.nn.functional.linear(self.x[weight.shape[1]], weight)

    def _decode(self, at: int) -> Any:
        """A matrix, in the room that is its turn."""
        room = self._rooms[at % 2][: self.plain[at].nbytes]
        self.packed[at].decode_into(room)
        return room.view(self.plain[at].dtype).view(self.plain[at].shape)

    def library(self) -> None:
        """Products of plain weights."""
        for weight in self.plain:
            self._multiply(weight)

    def decode(self) -> None:
        """All matrices."""
        for at in range(len(self.plain)):
            self._decode(at)

    def in_turn(self) -> None:
        """Decode, multiply."""
        for at in range(len(self.plain)):
            self._multiply(self._decode(at))

    def in_strips(self, nbytes: int) -> None:
        """Decode and multiply so many bytes at a time."""
        for plain, packed in zip(self.plain, self.packed, strict=True):
            row_bytes = plain.nbytes // len(plain)
            step = max(nbytes // row_bytes // STRIPES_AT, 1)
            for first in range(0, packed.window.stripes, step):
                end = min(first + step, packed.window.stripes)
                size = (end - first) * STRIPES_AT * row_bytes
                packed.chunks(first, end - 1, 0)(self._rooms[0][:size])
                self._multiply(self._rooms[0][:size].view(plain.dtype).view(-1, plain.shape[1]))

    def meanwhile(self, priority: str) -> None:
        """Decode the next one while one is multiplied: after the product that had its room."""
        import torch

        here, beside = torch.cuda.current_stream(), self._streams[priority]
        weight, made = self._decode(0), None
        for at in range(len(self.plain)):
            ended = here.record_event()
            now, ready = weight, made
            if at + 1 < len(self.plain):
                beside.wait_event(ended)
                with torch.cuda.stream(beside):
                    weight, made = self._decode(at + 1), beside.record_event()
            if ready is not None:
                here.wait_event(ready)
            self._multiply(now)


def timed(ways: dict[str, Callable[[], None]], runs: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of the device and the host, medians of alternating runs after one to warm up."""
    import torch

    device: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(runs + 1):
        for name, way in ways.items():
            spent: list[float] = []

            def work(way: Callable[[], None] = way, spent: list[float] = spent) -> None:
                start = time.perf_counter()
                way()
                spent.append(time.perf_counter() - start)

            seconds = on_device(work, lambda: torch.cuda._sleep(AHEAD))  # type: ignore[no-untyped-call]
            if number:
                device[name].append(1e3 * seconds)
                host[name].append(1e3 * spent[0])
    return {name: (statistics.median(device[name]), statistics.median(host[name])) for name in ways}


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--layers", type=int, default=6, help="that are there; times are of 32")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1000, 4000])
    parser.add_argument("--runs", type=int, default=7)


def run(options: argparse.Namespace, page: Page) -> None:
    """Each number of rows."""
    lines: list[Sequence[str]] = []
    for rows in options.rows:
        note(f"{rows} rows")
        it = Layers(options.layers, rows)
        ways: dict[str, Callable[[], None]] = {
            "library, plain weights": it.library,
            "decoding alone": it.decode,
            "in turn": it.in_turn,
            "the next one meanwhile": partial(it.meanwhile, ""),
            "the same, high priority": partial(it.meanwhile, "high"),
            "in strips of 24 MiB": partial(it.in_strips, 24 << 20),
            "in strips of 128 MiB": partial(it.in_strips, 128 << 20),
        }
        found, times = timed(ways, options.runs), WHOLE / options.layers
        plain = found["library, plain weights"][0]
        for name, (device, host) in found.items():
            lines.append(
                [str(rows), name, f"{device * times:.1f}", f"{device / plain:.2f}", f"{host * times:.1f}"]
            )
    page.table(["rows", "", "ms, 32 layers", "of the library's", "host, ms"], lines)
