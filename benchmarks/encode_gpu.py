"""Tensors packed on a GPU: what each step takes, and whether the bytes are right.

Weights are `0.02 * normal`, rows scaled by `exp(0.3 * normal)`. Steps are timed on the device from a cold
cache: "sample" collects what the plan is made of, "measure" makes tables and finds what chunks take, "encode"
writes them; "kernels" is the sum of the three. "sums" and "chain" are XXH3-128 of the tensors, which headers
have. "Whole" is the host's clock from the call to the end of all work, with choosing tables on all
processors, copies, and allocating; the chain goes on beside the others there. Rates are in 10^9 bytes of
weights a second, medians after two runs to warm up. Bytes are compared with those that the
CPU packs, hashes with xxhash's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import xxhash

from benchmarks.data import blobs
from benchmarks.data.weights import on_device
from benchmarks.harness.gpu import Flush, stream
from benchmarks.harness.machine import cores
from benchmarks.harness.report import Page, note
from benchmarks.harness.timing import alternate, each, itself, medians
from tpde.cuda.digest import Bytestring, Digests
from tpde.cuda.encode import EncodePlan, Found, PackEncoder
from tpde.format.container import TensorSpec

TITLE, NEEDS_GPU = "Packing on a GPU", True
BF16, F16, F32 = "BF16", "F16", "F32"
LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
GROUPS: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...] = (
    *((f"{r} x {c}", BF16, ((r, c),)) for r, c in ((1024, 4096), (4096, 4096), (14336, 4096))),
    ("128256 x 4096", BF16, ((128256, 4096),)),
    ("a layer of 8 B", BF16, LAYER),
    ("eight layers of 8 B", BF16, LAYER * 8),
    ("14336 x 4096", F16, ((14336, 4096),)),
    ("14336 x 4096", F32, ((14336, 4096),)),
)
BAR = 400  # GB/s of the kernels, of the largest tensor
LARGEST = "128256 x 4096"


def weights(dtype: str, rows: int, columns: int) -> Any:
    """A matrix on the device."""
    import torch

    return on_device(rows, columns, {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}[dtype])


class Packing:
    """A tensor on its way into a blob.

    Parameters
    ----------
    matrix : Tensor
        On the device, contiguous.
    dtype : str
        Its dtype's name in safetensors.
    """

    def __init__(self, matrix: Any, dtype: str) -> None:
        import torch

        self.matrix, self.spec = matrix, TensorSpec(dtype, tuple(matrix.shape))
        self._encoder = PackEncoder(matrix.data_ptr(), self.spec, matrix.device.index)
        self.sample = torch.empty(self._encoder.sample_bytes, dtype=torch.uint8, device=matrix.device)
        self.scratch: Any = None
        self.blob: Any = None
        self._chosen: EncodePlan | None = None
        self._found: Found | None = None

    @property
    def chosen(self) -> EncodePlan:
        """What was chosen."""
        assert self._chosen is not None
        return self._chosen

    def gather(self) -> None:
        """Launch the first step."""
        self._encoder.gather(self.sample.data_ptr(), stream())

    def choose(self, sample: Any) -> None:
        """Choose tables."""
        self._chosen = self._encoder.choose(sample.numpy())

    def place(self) -> None:
        """Allocate scratch memory, and bring the tables there."""
        import torch

        chosen = self.chosen
        self.scratch = torch.empty(chosen.scratch_bytes, dtype=torch.uint8, device=self.matrix.device)
        image = torch.from_numpy(chosen.image)
        self.scratch[chosen.image_at : chosen.image_at + image.numel()].copy_(image)

    def measure(self) -> None:
        """Launch the second step."""
        self._encoder.measure(self.chosen, self.scratch.data_ptr(), stream())

    def find(self, data: Any) -> None:
        """Take what was measured, and allocate the blob."""
        import torch

        self._found = self._encoder.found(self.chosen, data.numpy())
        self.blob = torch.empty(self._found.nbytes, dtype=torch.uint8, device=self.matrix.device)

    def encode(self) -> None:
        """Launch the third step."""
        self._encoder.encode(self.chosen, self.scratch.data_ptr(), self.blob.data_ptr(), stream())

    def finish(self, digest: bytes) -> None:
        """Write the head."""
        import torch

        assert self._found is not None
        head = torch.from_numpy(self._found.head(digest).copy())
        self.blob[: head.numel()].copy_(head)


class Hashing:
    """Hashes of some tensors, on a stream of their own."""

    def __init__(self, matrices: Sequence[Any]) -> None:
        import torch

        tensors = [Bytestring(it.data_ptr(), it.nbytes) for it in matrices]
        self._digests = Digests(tensors, matrices[0].device.index)
        self._items = torch.from_numpy(self._digests.items).cuda()
        self._scratch = torch.empty(self._digests.scratch_bytes, dtype=torch.uint8, device="cuda")
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def sums(self) -> None:
        """Launch the first step."""
        self._digests.sums(self._scratch.data_ptr(), stream())

    def chain(self) -> None:
        """Launch the second one."""
        self._digests.chain(self._items.data_ptr(), self._scratch.data_ptr(), stream())

    def begin(self) -> None:
        """Launch both: the second beside what follows."""
        import torch

        self.sums()
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self.chain()

    def results(self) -> list[bytes]:
        """Wait for them."""
        import torch

        torch.cuda.current_stream().wait_stream(self._beside)
        return self._digests.results(self._scratch[: self._digests.found_bytes].cpu().numpy())


def pack(matrices: Sequence[Any], dtype: str, pool: ThreadPoolExecutor) -> list[Packing]:
    """Pack some tensors; the host waits for samples, for sizes, and for hashes."""
    packings, hashing = [Packing(it, dtype) for it in matrices], Hashing(matrices)
    for it in packings:
        it.gather()
    samples = [it.sample.cpu() for it in packings]
    hashing.begin()
    list(pool.map(Packing.choose, packings, samples))
    for it in packings:
        it.place()
        it.measure()
    measured = [it.scratch[: it.chosen.found_bytes].cpu() for it in packings]
    for it, data in zip(packings, measured, strict=True):
        it.find(data)
        it.encode()
    for it, digest in zip(packings, hashing.results(), strict=True):
        it.finish(digest)
    return packings


def is_right(packing: Packing) -> bool:
    """Whether the blob is the CPU's, with the tensor's hash."""
    import torch

    data = packing.matrix.contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
    expected, found = blobs.pack(packing.spec, data).data, packing.blob.cpu().numpy()
    if found.size != expected.size or found[64:80].tobytes() != xxhash.xxh3_128_digest(data):
        return False
    same = found == expected
    same[64:80] = same[120:128] = True  # that one has no hash, and so another one of its head
    return bool(same.all())


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--runs", type=int, default=9)


def run(options: argparse.Namespace, page: Page) -> None:
    """Measure, and compare with the bar."""
    flush, pool = Flush(), ThreadPoolExecutor(cores())
    rows, right = [], True
    for name, dtype, shapes in GROUPS:
        note(f"{name}, {dtype}")
        matrices = [weights(dtype, *shape) for shape in shapes]
        packings, hashing = pack(matrices, dtype, pool), Hashing(matrices)
        right &= all(map(is_right, packings[: len(LAYER)]))
        steps: dict[str, Callable[[], Any]] = {
            "sample": partial(each, Packing.gather, packings),
            "measure": partial(each, Packing.measure, packings),
            "encode": partial(each, Packing.encode, packings),
            "sums": hashing.sums,
            "chain": hashing.chain,
        }
        clocks: dict[str, Callable[[], Any]] = {step: partial(flush.cold, it) for step, it in steps.items()}
        clocks["whole"] = partial(flush.whole, partial(pack, matrices, dtype, pool))
        taken = medians(alternate(clocks, options.runs, warm=2, clock=itself))
        kernels = sum(taken[step] for step in ("sample", "measure", "encode"))
        nbytes = sum(it.nbytes for it in matrices)
        rates = [nbytes / it / 1e9 for it in (*taken.values(), kernels)]
        ratio = nbytes / sum(it.blob.numel() for it in packings)
        words = sum(math.prod(shape) for shape in shapes)
        facts = [name, dtype, f"{words * 1e-6:.0f}", f"{ratio:.4f}"]
        rows.append([*facts, *(f"{it:.0f}" for it in rates)])
        if name == LARGEST:
            rows[-1][-1] += f" (bar {BAR}: {page.judge(rates[-1] >= BAR, 'kernels')})"
    page.judge(right, "bytes")
    page.say(f"Medians of {options.runs} runs. Bytes: {'the same' if right else 'OTHERS'}.")
    columns = ["tensors", "dtype", "10^6 words", "ratio", *(f"{step}, GB/s" for step in taken)]
    page.table([*columns, "kernels, GB/s"], rows)
