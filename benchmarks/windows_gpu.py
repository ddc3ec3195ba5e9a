"""Matrices encoded into the window layout on a GPU: what each step takes, and whether the bytes are right.

    python benchmarks/windows_gpu.py [--runs 9] [--out FILE.md]

Weights are `0.02 * normal`, rows scaled by `exp(0.3 * normal)`, in bf16. `plan` and `encode` are timed on the
device from a cold cache; scratch memory is zeroed within `plan`. "Both" is their sum, "whole" the host's
clock from the call to the end of all work, with reading the counts, choosing, and allocating. Of the last row
all matrices are planned before the counts of all are read, as a model is packed. Rates are in 10^9 bytes of
weights a second, medians after two runs to warm up.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from _gpu import Flush, need_cuda, seconds
from _machine import arguments, emit, header, note, table, verdict

from tpde.codec import window_plan
from tpde.cuda.window_encode import COUNTS_BYTES, SAID_AT, ChosenWindow, Matrix, WindowEncoder

SHAPES = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (16384, 16384), (128256, 4096))
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
BAR = 1000  # GB/s of both steps, of the largest matrix


def weights(rows: int, columns: int) -> Any:
    """A matrix on the device."""
    import torch

    draw = torch.Generator("cuda").manual_seed(rows + columns)
    scale = 0.02 * torch.exp(0.3 * torch.randn((rows, 1), device="cuda", generator=draw))
    return (torch.randn((rows, columns), device="cuda", generator=draw) * scale).bfloat16()


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
        at = Matrix(matrix.data_ptr(), *matrix.shape, matrix.stride(0))
        self._encoder = WindowEncoder(at, matrix.device.index)
        self.scratch = torch.empty(self._encoder.scratch_bytes, dtype=torch.uint8, device=matrix.device)
        self.blob: Any = None
        self._chosen: ChosenWindow | None = None

    def plan(self) -> None:
        """Launch the first step."""
        self.scratch.zero_()
        self._encoder.plan(self.scratch.data_ptr(), _stream())

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
        self._encoder.encode(self._chosen, self.scratch.data_ptr(), self.blob.data_ptr(), _stream())


def _stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


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


def whole(matrices: Sequence[Any], flush: Flush) -> tuple[float, list[Packing]]:
    """Seconds of all of it by the host's clock."""
    import torch

    flush()
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = pack(matrices)
    torch.cuda.synchronize()
    return time.perf_counter() - start, made


def is_right(packing: Packing) -> bool:
    """Whether the blob is the CPU's."""
    import torch

    words = packing.matrix.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    expected = window_plan.encode(words, len(os.sched_getaffinity(0)))
    return np.array_equal(packing.blob.cpu().numpy(), expected)


def main() -> int:
    """Measure, and compare with the bar."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=9)
    chosen = parser.parse_args()
    need_cuda()
    head, flush = header("Windows on a GPU", gpu=True), Flush()
    rows, right, met = [], True, False
    groups = [(f"{r} x {c}", [(r, c)]) for r, c in SHAPES] + [("a layer of 8 B", list(LAYER))]
    for name, shapes in groups:
        note(name)
        matrices = [weights(*shape) for shape in shapes]
        packings = pack(matrices)
        right &= all(map(is_right, packings))
        nbytes = 2 * sum(math.prod(it) for it in shapes)
        steps: dict[str, list[float]] = {"plan": [], "encode": [], "whole": []}
        for _ in range(chosen.runs + 2):
            steps["plan"].append(seconds(lambda p=packings: [it.plan() for it in p], flush))
            for it in packings:  # `encode` uses scratch memory up
                it.choose(it.scratch[:COUNTS_BYTES].cpu())
            steps["encode"].append(seconds(lambda p=packings: [it.encode() for it in p], flush))
            steps["whole"].append(whole(matrices, flush)[0])
        taken = {step: statistics.median(times[2:]) for step, times in steps.items()}
        both = nbytes / (taken["plan"] + taken["encode"]) / 1e9
        met |= both >= BAR and name == groups[-2][0]
        bits = 8 * sum(it.blob.numel() for it in packings) / (nbytes / 2)
        rates = [nbytes / taken["plan"] / 1e9, nbytes / taken["encode"] / 1e9, both]
        rates.append(nbytes / taken["whole"] / 1e9)
        rows.append([name, f"{nbytes / 1e6:.0f}", f"{bits:.3f}", *(f"{it:.0f}" for it in rates)])
    rows[-2][-2] += f" (bar {BAR}: {verdict(met)})"
    about = f"Medians of {chosen.runs} runs. Bytes: {'the same' if right else 'OTHERS'}.\n"
    columns = ["matrix", "MB", "bits a weight", "plan, GB/s", "encode, GB/s", "both, GB/s", "whole, GB/s"]
    emit(f"{head}\n{about}\n{table(columns, rows)}", chosen.out)
    return 0 if right and met else 1


if __name__ == "__main__":
    sys.exit(main())
