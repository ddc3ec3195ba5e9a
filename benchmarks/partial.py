"""Bytes read for one row of a large packed tensor: its chunks and the index, no more."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tpde
from benchmarks.data.files import write_bf16_file
from benchmarks.harness.report import Page, note
from tpde.files.reader import PackedFile
from tpde.files.tensor_reader import BlobTensor
from tpde.format.blob_header import MAX_FIXED_BYTES
from tpde.io.sources import FileSource

TITLE = "One row of a large tensor"
COLUMNS = 5120  # not a divisor of a chunk's words, so that some rows lie in two chunks
NAME = "layers.0.weight"


@dataclass
class Count:
    """What was read."""

    bytes: int = 0
    reads: int = 0


@contextmanager
def counting() -> Iterator[Count]:
    """Count what every `FileSource` reads."""
    count, original = Count(), FileSource.read_into

    def read_into(self: FileSource, offset: int, out: memoryview) -> None:
        count.bytes += out.nbytes
        count.reads += 1
        original(self, offset, out)

    FileSource.read_into = read_into  # type: ignore[method-assign]
    try:
        yield count
    finally:
        FileSource.read_into = original  # type: ignore[method-assign]


@dataclass
class Allowed:
    """What a row may cost: the blob's header, tables and index, and the row's own chunks."""

    meta: int
    chunks: int
    number: int


def allowed(packed: Path, row: int) -> Allowed:
    """Work out from the index what a row needs."""
    with PackedFile(packed) as file:
        tensor = file.tensor(NAME)
        assert isinstance(tensor, BlobTensor)
        blob = tensor.blob
        first, last = (blob.header.chunk_of(row * COLUMNS), blob.header.chunk_of((row + 1) * COLUMNS - 1))
        # The fixed part is read first, to learn how long the index is.
        meta = blob.header.chunks_at + min(MAX_FIXED_BYTES, tensor.stored_bytes)
        return Allowed(meta, blob.stored(first, last), last - first + 1)


def plain_row(plain: Path, row: int) -> bytes:
    """A row's bytes in the source."""
    with plain.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + 2 * COLUMNS * row)
        return file.read(2 * COLUMNS)


def measure(plain: Path, packed: Path, row: int, page: Page) -> list[str]:
    """Read one row from a file that was just opened."""
    limit = allowed(packed, row)
    with counting() as opening, tpde.safe_open(packed, framework="numpy") as file:
        begun = Count(opening.bytes, opening.reads)
        start = time.perf_counter()
        value = file.get_slice(NAME)[row]
        seconds = time.perf_counter() - start
        read, reads = opening.bytes - begun.bytes, opening.reads - begun.reads
    same = np.ascontiguousarray(value).tobytes() == plain_row(plain, row)
    judged = page.judge(same and read <= limit.meta + limit.chunks, f"row {row}")
    cells = [f"{row:,}", f"{begun.bytes:,}", f"{read:,}", str(reads)]
    cells += [f"{limit.meta:,}", f"{limit.chunks:,}", str(limit.number)]
    return [*cells, judged, f"{1e3 * seconds:.1f}", "same" if same else "DIFFER"]


def again(packed: Path, rows: list[int]) -> tuple[float, float]:
    """Median bytes and milliseconds of a row when the slice is kept and rows are asked for one by one."""
    sizes, times = [], []
    with counting() as count, tpde.safe_open(packed, framework="numpy") as file:
        weight = file.get_slice(NAME)
        weight[0]
        for row in rows:
            before, start = count.bytes, time.perf_counter()
            weight[row]
            times.append(1e3 * (time.perf_counter() - start))
            sizes.append(count.bytes - before)
    return statistics.median(sizes), statistics.median(times)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--gib", type=float, default=1, help="size of the tensor (default 1)")
    parser.add_argument("--dir", type=Path, help="folder for the files, which are removed afterwards")


def run(options: argparse.Namespace, page: Page) -> None:
    """Pack one tensor, and read rows of it."""
    count = int(options.gib * 2**30) // (2 * COLUMNS)
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        plain, packed = Path(place) / "plain.safetensors", Path(place) / "packed.safetensors"
        note("writing and packing")
        nbytes = write_bf16_file(plain, (count, COLUMNS), 1)
        tpde.pack(plain, packed)
        size = packed.stat().st_size
        rows = [measure(plain, packed, row, page) for row in (0, 1, count // 3, count // 2, count - 1)]
        random_rows = np.random.default_rng(0).integers(0, count, 50).tolist()
        kept_bytes, kept_time = again(packed, random_rows)
    page.say(
        f"bf16, {count}x{COLUMNS}: {nbytes:,} bytes, packed {size:,}. A row has {2 * COLUMNS:,} bytes. Bar: "
        "no more than the blob's header and index and the chunks that hold the row. Bytes are those asked of "
        "`FileSource.read_into`; the file is in the page cache."
    )
    columns = [
        "row",
        "bytes to open",
        "bytes of the row",
        "reads",
        "header and index",
        "its chunks",
        "chunks",
    ]
    page.table([*columns, "", "ms", "bits"], rows)
    page.say(
        f"With the slice kept, one of 50 random rows takes {kept_bytes:,.0f} bytes and {kept_time:.2f} ms "
        "(medians)."
    )
