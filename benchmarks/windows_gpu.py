"""Matrices encoded into the window layout on a GPU, and decoded: what that takes, and if bytes are right.

Weights are `0.02 * normal`, rows scaled by `exp(0.3 * normal)`, in bf16. `plan` and `encode` are timed on the
device from a cold cache; scratch memory is zeroed within `plan`. "Both" is their sum, "whole" the host's
clock from the call to the end of all work, with reading the counts, choosing, and allocating. Of the last row
all matrices are planned before the counts of all are read, as a model is packed. "Rows" are decoded. Half of
pruned weights are zeros. Rates are in 10^9 bytes of weights a second, medians after two runs to warm up.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.data.weights import on_device
from benchmarks.harness.gpu import Flush, stream
from benchmarks.harness.machine import cores
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import alternate, each, itself, medians
from tpde.codec import window_plan
from tpde.cuda.window_encode import COUNTS_BYTES, SAID_AT, ChosenWindow, Matrix, WindowEncoder
from tpde.cuda.window_products import DeviceWindow

TITLE, NEEDS_GPU = "Windows on a GPU", True
SHAPES = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (16384, 16384), (128256, 4096))
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
PRUNED = "the same, pruned"
BAR = 1000  # GB/s of both steps, of the largest matrix
ROWS_BARS = {"16384 x 16384": 2050, PRUNED: 1500}  # GB/s of `rows`, of 512 MiB on an H200


class Packing:
    """A matrix on its way into windows.

    Parameters
    ----------
    matrix : Tensor of bfloat16
        On the device; rows may be apart.
    """

    def __init__(self, matrix: Any) -> None:
        import torch

        self.matrix = matrix
        rows, columns = matrix.shape
        at = Matrix(matrix.data_ptr(), rows, columns, matrix.stride(0))
        self._encoder = WindowEncoder(at, matrix.device.index)
        self.scratch = torch.empty(self._encoder.scratch_bytes, dtype=torch.uint8, device=matrix.device)
        self.blob: Any = None
        self._chosen: ChosenWindow | None = None

    def plan(self) -> None:
        """Launch the first step."""
        self.scratch.zero_()
        self._encoder.plan(self.scratch.data_ptr(), stream())

    def choose(self, counts: Any) -> None:
        """Choose, and allocate."""
        import torch

        self._chosen = self._encoder.choose(counts.numpy())
        said = torch.from_numpy(self._chosen.said)
        self.scratch[SAID_AT : SAID_AT + said.numel()].copy_(said)
        nbytes = self._chosen.window.nbytes
        self.blob = torch.empty(nbytes, dtype=torch.uint8, device=self.matrix.device)

    def encode(self) -> None:
        """Launch the second step."""
        assert self._chosen is not None
        self._encoder.encode(self._chosen, self.scratch.data_ptr(), self.blob.data_ptr(), stream())

    def rows(self, out: Any) -> None:
        """Launch what decodes the blob."""
        assert self._chosen is not None
        window = DeviceWindow(self._chosen.window, self.blob.data_ptr(), out.device.index)
        window.rows(out.data_ptr(), out.stride(0), stream())


def pack(matrices: Sequence[Any]) -> list[Packing]:
    """Encode some matrices; the host waits once."""
    import torch

    packings = [Packing(it) for it in matrices]
    for it in packings:
        it.plan()
    counts = torch.stack([it.scratch[:COUNTS_BYTES] for it in packings]).cpu()
    for it, found in zip(packings, counts, strict=True):
        it.choose(found)
        it.encode()
    return packings


def is_right(packing: Packing) -> bool:
    """Whether the blob is the CPU's, and decodes to the matrix."""
    import torch

    out = torch.empty_like(packing.matrix)
    packing.rows(out)
    words = packing.matrix.contiguous().view(torch.int16)
    expected = window_plan.encode(words.cpu().numpy().view(np.uint16), cores())
    return torch.equal(out.view(torch.int16), words) and np.array_equal(packing.blob.cpu().numpy(), expected)


def clocks(packings: Sequence[Packing], matrices: Sequence[Any], flush: Flush) -> dict[str, Any]:
    """What is timed, and how."""
    import torch

    outs = [torch.empty_like(it) for it in matrices]

    def plan() -> float:
        return flush.cold(partial(each, Packing.plan, packings))

    def encode() -> float:
        for it in packings:  # it uses scratch memory up
            it.choose(it.scratch[:COUNTS_BYTES].cpu())
        return flush.cold(partial(each, Packing.encode, packings))

    def decode() -> None:
        for it, out in zip(packings, outs, strict=True):
            it.rows(out)

    whole = partial(flush.whole, partial(pack, matrices))
    return {"plan": plan, "encode": encode, "whole": whole, "rows": partial(flush.cold, decode)}


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--runs", type=int, default=9)


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure, and compare with the bar."""
    import torch

    flush, rows, right = Flush(), [], True
    card = torch.cuda.get_device_name()
    groups = [(f"{r} x {c}", [(r, c)]) for r, c in SHAPES]
    largest = groups[-1][0]
    groups[-1:-1] = [(PRUNED, [SHAPES[-2]])]
    for name, shapes in [*groups, ("a layer of 8 B", list(LAYER))]:
        note(name)
        matrices = [on_device(*shape, torch.bfloat16) for shape in shapes]
        if name == PRUNED:
            for it in matrices:
                it[torch.rand_like(it, dtype=torch.float32) < 0.5] = 0
        packings = pack(matrices)
        right &= all(map(is_right, packings))
        nbytes = 2 * sum(math.prod(it) for it in shapes)
        taken = medians(alternate(clocks(packings, matrices, flush), options.runs, warm=2, clock=itself))
        seconds = [taken["plan"], taken["encode"], taken["plan"] + taken["encode"]]
        seconds += [taken["whole"], taken["rows"]]
        rates = [nbytes / it / 1e9 for it in seconds]
        bits = 8 * sum(it.blob.numel() for it in packings) / (nbytes / 2)
        rows.append([name, f"{nbytes / 1e6:.0f}", f"{bits:.3f}", *(f"{it:.0f}" for it in rates)])
        if name == largest:
            rows[-1][-3] += f" (bar {BAR}: {page.judge(rates[2] >= BAR, 'both')})"
        if name in ROWS_BARS and "H200" in card:
            bar = ROWS_BARS[name]
            rows[-1][-1] += f" (bar {bar}: {page.judge(rates[-1] >= bar, f'rows, {name}')})"
    page.judge(right, "bytes")
    page.say(f"Medians of {options.runs} runs. Bytes: {'the same' if right else 'OTHERS'}.")
    columns = ["plan", "encode", "both", "whole", "rows"]
    page.table(["matrix", "MB", "bits a weight", *(f"{it}, GB/s" for it in columns)], rows)
