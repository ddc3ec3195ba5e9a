"""Rebuilding only those rows of packed matrices that are asked for, on CPU or GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tpde.codec.native import Bytes
from tpde.codec.registry import Gpu
from tpde.weights.decoder import repeat
from tpde.weights.launch import Launch, RowsLaunch, capturing, locked_reports
from tpde.weights.source import Source
from tpde.weights.transforms import refuse_trace

if TYPE_CHECKING:
    from tpde.cuda.items import Item


class RowReader:
    """Rebuilds only the rows of a packed matrix that are asked for.

    Parameters
    ----------
    packed : Source
        A matrix.
    """

    def __init__(self, packed: Source) -> None:
        self.packed, self.device = packed, packed.device
        self._count, self._width = packed.header.spec.shape
        self._row_bytes = packed.nbytes // max(self._count, 1)
        self._rows: RowsLaunch | None = None
        self._verified = False
        self._fill = packed.codec.gpu is Gpu.FILL
        if self.device.type == "cuda" and not self._fill:
            item = packed.item(0)
            if item is not None:
                self._prepare(item)

    def _prepare(self, item: Item) -> None:
        from tpde.cuda.decode import Rows

        assert self.device.index is not None
        # Nobody waits to look at what is reported in locked memory.
        reports = None if self.packed.settled else locked_reports(1)
        self._rows = Launch([Rows(item, self.device.index)], self.device, reports)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` of the matrix: a tensor of shape `(*ids.shape, columns)`.

        Raises
        ------
        RuntimeError
            If `ids` are not integers on the matrix's device.
        IndexError
            On the CPU, if a number is not a row's. On a GPU the kernel traps, as the framework's own does; of
            a matrix whose words are all the same, it reads no numbers, and any stands for a row.
        Corrupt
            Naming tensor and chunk. Of rows that a GPU reads in the host's memory, what was damaged after the
            first use is reported at the next one.
        ReadError
            If the rows are read where they are streamed from, and that was closed.
        PackedWeight
            Within `torch.jit.trace`.
        """
        refuse_trace(self.packed.name)
        with self.packed.opened():  # kernels read the host's memory, whether it is there or not
            return self._look_up(ids)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.device != self.device or ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(
                f"rows of `{self.packed.name}` on {self.device} are asked for by {ids.dtype} on "
                f"{ids.device}; integers of 32 or 64 bits on the same device are needed"
            )
        shape = (*ids.shape, self._width)
        if self._fill:
            return self._constant(shape, ids)
        if self._rows is None:
            rows = self._on_host(ids.detach().reshape(-1).cpu().numpy().astype(np.int64))
            return torch.from_numpy(rows).to(self.device).view(self.packed.dtype).view(shape)
        flat = ids.detach().reshape(-1).to(torch.int64).contiguous()
        if not self._verified and not capturing(self.device):
            self._verify()
        self.packed.watch(self)
        out = torch.empty(shape, dtype=self.packed.dtype, device=self.device)
        # What is on the device stays as it is; the host's memory may be a file that somebody overwrites.
        self._launch(flat, out, check=not (self.packed.settled and self._verified))
        return out

    def report(self) -> None:
        """Raise what looking up rows in the host's memory has found so far.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        assert self._rows is not None
        self._rows.report([self.packed.name])

    def _launch(self, ids: torch.Tensor, out: torch.Tensor | None, check: bool) -> None:
        assert self._rows is not None
        self._rows(0, ids.data_ptr(), ids.numel(), 0 if out is None else out.data_ptr(), check)

    def _verify(self) -> None:
        """Compare the checksums of all chunks and wait for the result: looking up rows then waits no more."""
        header = self.packed.header
        row = max(self._row_bytes // header.word_bytes, 1)
        with torch.inference_mode(False):
            # Rows that hold each chunk's first word, or all rows. In one launch: while memory is page-locked,
            # each waits for 2 ms.
            first = torch.arange(0, header.words, max(header.chunk_words, row), device=self.device)
            self._launch(first // row, None, check=True)
            torch.cuda.current_stream(self.device).synchronize()
        self.report()
        self._verified = True

    def _constant(self, shape: tuple[int, ...], ids: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            self._check(ids.numpy().reshape(-1))
        out = torch.empty(shape, dtype=self.packed.dtype, device=self.device)
        repeat(self.packed, out)
        return out

    def _check(self, ids: npt.NDArray[np.int64]) -> None:
        if ids.size and not 0 <= ids.min() <= ids.max() < self._count:
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise IndexError(
                f"index out of range: row {bad} of `{self.packed.name}`, which has {self._count}"
            )

    def _on_host(self, ids: npt.NDArray[np.int64]) -> Bytes:
        """Decode runs of adjacent chunks that hold the rows, each once."""
        self._check(ids)
        header, size = self.packed.header, self._row_bytes
        out = np.empty((ids.size, size), np.uint8)
        if not out.size:
            return out.reshape(-1)
        rows, places = np.unique(ids, return_inverse=True)
        unique = np.empty((rows.size, size), np.uint8)
        step = header.chunk_words * header.word_bytes
        firsts, lasts = rows * size // step, ((rows + 1) * size - 1) // step
        # A run ends before a row whose first chunk does not touch the last one decoded.
        ends = np.append(np.flatnonzero(firsts[1:] > lasts[:-1] + 1) + 1, rows.size)
        begin = 0
        for end in ends.tolist():
            low, high = int(rows[begin]), int(rows[end - 1]) + 1
            part = np.empty((high - low, size), np.uint8)
            self.packed.decode_on_host(low * size, high * size, part.reshape(-1))
            unique[begin:end] = part[rows[begin:end] - low]
            begin = end
        np.take(unique, places.reshape(-1), axis=0, out=out)
        return out.reshape(-1)
