"""`tpde bench codec`: the codec's speed and ratio on synthetic weights, in memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpde.cli.common import few_threads, guard, plural, print_json, size, table
from tpde.errors import InvalidInput
from tpde.planning.sizes import parse_size

if TYPE_CHECKING:
    from tpde.codec.native import Bytes
    from tpde.codec.selection import TensorPlan
    from tpde.format.container import TensorSpec

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure speed on this machine.")

COLUMNS = 4096  # of the synthetic matrices
ROUNDS = 5  # after one that warms up
_MIB = 1 << 20  # of which a tensor has a whole number: rows of all dtypes
MOST = 4 << 30  # bytes of a tensor


@app.callback()
def _bench() -> None:
    pass


@app.command("codec")
@guard
def codec(
    tensor: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Of each tensor: whole MiB, 1MiB to 4GiB.")
    ] = "64MiB",
    threads: Annotated[
        int | None,
        typer.Option(min=1, callback=few_threads, help="How many threads.", show_default="all processors"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    r"""Measure the codec on synthetic weights.

    Each tensor is normal with a scale of its own for each row, 0.02 * exp(0.3 * normal). Rates count bytes
    of the original and are medians of alternating runs after a warm-up, in memory, without files or hashes;
    a copy of the same size by as many threads is the limit of any decoder.

    Example:

    \b
      tpde bench codec --size 256MiB --threads 4
    """
    from tpde.codec import native
    from tpde.files.thread_count import check_threads

    count, nbytes = check_threads(threads), _tensor_bytes(tensor)
    cases = [Case(name, spec, words, count) for name, spec, words in tensors(nbytes)]
    copy = MemoryCopy(cases[0].words, count)
    for _ in range(1 + ROUNDS):
        for case in cases:
            case.run()
        copy.run()
    rows = [case.result() for case in cases]
    copied = _rate(copy.words.size, copy.times)
    if as_json:
        print_json(
            {
                "simd": native.simd(),
                "threads": count,
                "tensor_bytes": nbytes,
                "rounds": ROUNDS,
                "copy_gb_per_s": copied,
                "results": rows,
            }
        )
        return
    print(f"{size(nbytes)} a tensor, {plural(count, 'thread')}, {native.simd()}, median of {ROUNDS} runs\n")
    cells = [(r["name"], r["codec"], *(f"{r[k]:.{d}f}" for k, d in _COLUMNS[2:])) for r in rows]
    print(table(("tensor", "codec", "ratio", "bits/weight", "encode GB/s", "decode GB/s"), cells, left=2))
    print(f"\nmemory copy: {copied:.2f} GB/s")


def _tensor_bytes(text: str) -> int:
    """The size of a tensor, in whole MiB."""
    nbytes = parse_size(text)
    if nbytes % _MIB or not _MIB <= nbytes <= MOST:
        raise InvalidInput(
            f"`--size {text}` is {nbytes} bytes, a tensor may have {size(_MIB)} to {size(MOST)}, whole MiB",
            hint="write one such as `64MiB`",
            where="--size",
            found=nbytes,
        )
    return nbytes


_COLUMNS = (
    ("name", 0),
    ("codec", 0),
    ("ratio", 4),
    ("bits_per_weight", 3),
    ("encode_gb_per_s", 2),
    ("decode_gb_per_s", 2),
)


def _rate(nbytes: int, times: Sequence[float]) -> float:
    """GB/s by the median of all runs but the first, which warms up."""
    return nbytes / statistics.median(times[1:]) / 1e9


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Case:
    """One tensor and the times of its runs."""

    def __init__(self, name: str, spec: TensorSpec, words: Bytes, threads: int) -> None:
        import numpy as np

        from tpde.io.sinks import BytesSink

        self.name, self.spec, self.words, self.threads = name, spec, words, threads
        self.buffer = np.zeros(words.size + words.size // 16 + (1 << 16), np.uint8)
        self.sink = BytesSink(buffer=self.buffer)
        self.out = np.zeros(words.size, np.uint8)
        self.plan: TensorPlan | None = None
        self.stored = words.size
        self.encode_times: list[float] = []
        self.decode_times: list[float] = []

    def run(self) -> None:
        """Encode and decode once; a wrong byte ends the measurement."""
        import numpy as np

        self.encode_times.append(_timed(self._encode))
        self.decode_times.append(_timed(self._decode))
        if not np.array_equal(self.out, self.words):
            raise AssertionError(f"{self.name} did not survive the round trip; report this")

    def _encode(self) -> None:
        import numpy as np

        from tpde.codec.blob import BlobWriter
        from tpde.codec.selection import plan_tensor, sample_ranges
        from tpde.io.sinks import BytesSink

        self.sink = BytesSink(buffer=self.buffer)
        sample = np.concatenate([self.words[a:b] for a, b in sample_ranges(self.spec)])
        self.plan = plan_tensor(self.spec, sample)
        if self.plan is None:
            self.sink.write(0, [self.words])
            return
        writer = BlobWriter(self.plan, self.sink, 0, self.threads)
        writer.write(self.words)
        self.stored = writer.finish(bytes(16))

    def _decode(self) -> None:
        from tpde.codec.blob import BlobReader
        from tpde.io.sources import BytesSource

        if self.plan is None:
            self.out[:] = self.buffer[: self.out.size]
            return
        reader = BlobReader(BytesSource(self.sink.data), 0, self.stored)
        reader.read(0, self.out.size, self.out, self.threads)

    def result(self) -> dict[str, Any]:
        """What the runs came to."""
        from tpde.codec.registry import codec_of
        from tpde.format.constants import DTYPES

        nbytes = self.words.size
        return {
            "name": self.name,
            "dtype": self.spec.dtype,
            "codec": codec_of(self.plan.header).name if self.plan is not None else "plain",
            "ratio": nbytes / self.stored,
            "bits_per_weight": DTYPES[self.spec.dtype].bits * self.stored / nbytes,
            "encode_gb_per_s": _rate(nbytes, self.encode_times),
            "decode_gb_per_s": _rate(nbytes, self.decode_times),
        }


class MemoryCopy:
    """The machine's limit: the same bytes copied by as many threads."""

    def __init__(self, words: Bytes, threads: int) -> None:
        import numpy as np

        self.words, self.threads = words, threads
        self.out = np.zeros_like(words)
        self.times: list[float] = []

    def run(self) -> None:
        """Copy once."""
        from concurrent.futures import ThreadPoolExecutor

        import numpy as np

        step = -(-self.words.size // self.threads)
        cuts = [slice(i * step, (i + 1) * step) for i in range(self.threads)]
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda _: os.getpid(), cuts))  # start the threads outside the measurement
            self.times.append(
                _timed(lambda: list(pool.map(lambda c: np.copyto(self.out[c], self.words[c]), cuts)))
            )


def tensors(nbytes: int) -> list[tuple[str, TensorSpec, Bytes]]:
    """Synthetic weights of about `nbytes` bytes each: name, spec and bytes. The same on every call."""
    import numpy as np

    from tpde.format.container import TensorSpec

    rows = nbytes // COLUMNS  # of one-byte words, the most
    random = np.random.default_rng(0)
    scale = 0.02 * np.exp(0.3 * random.standard_normal((rows, 1))).astype(np.float32)

    def weights(word_bytes: int) -> Any:
        n = rows // word_bytes
        return random.standard_normal((n, COLUMNS), np.float32) * scale[:n]

    made = [
        ("bf16", "BF16", bfloat16(weights(2))),
        ("fp16", "F16", weights(2).astype(np.float16)),
        ("fp32", "F32", weights(4)),
        ("E4M3", "F8_E4M3", e4m3(weights(1))),
        ("bf16 in fp32", "F32", bfloat16(weights(4)).astype(np.uint32) << np.uint32(16)),
    ]
    return [
        (name, TensorSpec(dtype, array.shape), array.reshape(-1).view(np.uint8))
        for name, dtype, array in made
    ]


def bfloat16(array: Any) -> Any:
    """Round float32 to bfloat16, to nearest, ties to even; as 16-bit words."""
    import numpy as np

    words = array.view(np.uint32)
    even = (words >> np.uint32(16)) & np.uint32(1)
    return ((words + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)


def e4m3(array: Any) -> Any:
    """Quantize float32 to E4M3 with a scale for each row that takes its largest number to 448."""
    import numpy as np

    code = np.arange(127)  # 0x7F is NaN
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    # All halves at once: looking a half up is quicker than searching for 64 million numbers.
    with np.errstate(invalid="ignore"):
        halves = np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float64)
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, halves).astype(np.uint8)
    lookup = np.concatenate([nearest, nearest | np.uint8(0x80)])
    largest = np.abs(array).max(axis=1, keepdims=True)
    return lookup[(array * (448 / largest)).astype(np.float16).view(np.uint16)]
