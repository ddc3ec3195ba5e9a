"""One linear layer of any size: made tile by tile on the GPU, and packed into a model directory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.synthetic import weight
from benchmarks.harness.report import note
from tpde.files.file_writer import FileWriter

NAME = "linear.weight"
TILE_BYTES = 1 << 30  # of the weight that is made at a time
PACKED_SHARE = 0.68  # of these weights' bytes, with a margin of 1 %
SPARE_BYTES = 8 << 30  # of host memory for everything else
# By one thread: writing to a file in memory goes on one after the other, copying does not.
COPY_BYTES = 1 << 20
THREADS = 12


def tile_rows(columns: int) -> int:
    """Rows that are made at a time."""
    return max(TILE_BYTES // (2 * columns), 1)


def tile(number: int, rows: int, columns: int, seed: int) -> Any:
    """A tile of the weight, as any process makes it again."""
    step = tile_rows(columns)
    begin = number * step
    return weight(NAME, (rows, columns), seed, (begin, min(begin + step, rows)))


def tiles(rows: int, columns: int) -> int:
    """How many tiles there are."""
    return -(-rows // tile_rows(columns))


class MemorySink:
    """A `tpde` sink: a file in memory that several threads write to.

    Parameters
    ----------
    path : Path
        Of the file.
    capacity : int
        Bytes that it will not exceed; what is not used takes no memory.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self.name, self._path, self._size = str(path), path, 0
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(self._handle, capacity)
        self._map = mmap.mmap(self._handle, capacity)
        self._view = np.frombuffer(self._map, np.uint8)
        self._base = int(self._view.ctypes.data)
        self._pool = ThreadPoolExecutor(THREADS, "sink")

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Write buffers one after the other from `offset` on."""
        work = []
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
            if offset + data.size > self._view.size:
                raise OSError(f"`{self.name}` exceeds the {self._view.size} bytes that it was made for")
            for at in range(0, data.size, COPY_BYTES):
                size = min(COPY_BYTES, data.size - at)
                work.append((self._base + offset + at, int(data.ctypes.data) + at, size))
            offset += data.size
        self._size = max(self._size, offset)
        list(self._pool.map(lambda it: ctypes.memmove(*it), work))

    def room(self, offset: int, size: int) -> None:
        """None: nothing is written in place."""

    def commit(self) -> None:
        """Cut off what was not used."""
        self._close()
        os.truncate(self._path, self._size)

    def abort(self) -> None:
        """Remove the file."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        self._pool.shutdown()
        del self._view
        self._map.close()
        os.close(self._handle)


def room(folder: Path) -> int:
    """Bytes that a file in a folder that is in memory may have."""
    found = os.statvfs(folder)
    said = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    there = found.f_bavail * found.f_frsize - (64 << 20)
    return min(there, 1024 * int(said.group(1)) - SPARE_BYTES) if said else there


def fitting(folder: Path, rows: int, columns: int, seed: int, seconds: float | None) -> int:
    """As many rows, up to `rows`, as there is memory for, and as are packed in so many seconds."""
    step = tile_rows(columns)
    fit = int(room(folder) / PACKED_SHARE) // (2 * columns)
    if seconds is not None:
        probe = min(2 * step, rows)
        for _ in range(2):  # the first one compiles and allocates
            start = time.perf_counter()
            pack(folder / "probe", probe, columns, seed)
            took = time.perf_counter() - start
            (folder / "probe").unlink()
        fit = min(fit, int(seconds / took * probe))
        note(f"packing takes {took / (2e-9 * probe * columns):.3f} s/GB")
    return rows if rows <= fit else max(fit // step * step, min(fit, step), 1)


def pack(file: Path, rows: int, columns: int, seed: int) -> None:
    """Make the weight tile by tile, and pack it into a file in memory."""
    import torch

    import tpde

    size = 2 * columns * tile_rows(columns)
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    spec = tpde.TensorSpec("BF16", (rows, columns))
    sink = MemorySink(file, 2 * rows * columns + (64 << 20))
    with FileWriter(sink, {NAME: spec}, metadata={"format": "pt"}) as writer:
        for number in range(tiles(rows, columns)):
            made = tile(number, rows, columns, seed).reshape(-1).view(torch.uint8)
            piece = staging[: made.numel()]
            piece.copy_(made)
            del made
            writer.write(NAME, piece.numpy())
            if number % 16 == 15:
                note(f"packed {number + 1} of {tiles(rows, columns)} tiles")


def write(folder: Path, rows: int, columns: int, seed: int) -> dict[str, Any]:
    """Pack the layer piece by piece; returns sizes."""
    from tpde.files.reader import PackedFile
    from tpde.format.constants import SUFFIX, VERSION

    file = folder / "model.safetensors"
    pack(file, rows, columns, seed)
    about = {"architectures": ["Matrix"], "dtype": "bfloat16", "rows": rows, "columns": columns}
    about |= {"model_type": "matrix", "quantization_config": {"quant_method": "tpde", "version": VERSION}}
    (folder / "config.json").write_text(json.dumps(about))
    with PackedFile(file) as packed:
        entry = packed.container.entries[NAME + SUFFIX]
    return {"plain": 2 * rows * columns, "packed": entry.end - entry.begin, "rows": rows}


def matrix_class() -> Any:
    """A model of transformers that is the layer, so that `tpde.from_pretrained` loads it."""
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    class MatrixConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
        model_type = "matrix"

        def __init__(self, rows: int = 1, columns: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.rows, self.columns = rows, columns

    class Matrix(PreTrainedModel):  # type: ignore[no-untyped-call]
        config_class = MatrixConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = nn.Linear(config.columns, config.rows, bias=False)
            self.post_init()  # type: ignore[no-untyped-call]

        def forward(self, inputs_embeds: Any) -> Any:
            return self.linear(inputs_embeds)

    return Matrix
