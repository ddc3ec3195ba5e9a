"""Decoding on the GPU: ours beside nvCOMP ANS, nvCOMP zstd and EntroPack, a device copy as the limit.

Ours decodes what `tpde pack` writes by default. GB/s count bytes of output, 10^9 each, from a cold cache.
Peers are optional: pip install 'tpde[nvcomp]' 'entropack[cuda13]==0.1.5'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data.blobs import Blob, Decoder, pack
from benchmarks.data.weights import to_e4m3
from benchmarks.gpu_decode.grid import CHECKED, COPY, OURS, Grid, dtype_table, plot, shown, speed, wrong_bits
from benchmarks.harness.gpu import Contestant, Flush, Result, race
from benchmarks.harness.report import Page, note, verdict
from benchmarks.peers.gpu_codecs import Copy, EntroPack, Nvcomp
from tpde.cuda.backend import CudaBackend, launching_on
from tpde.cuda.capability import CudaDriver, DeviceFacts
from tpde.format.container import TensorSpec

TITLE, NEEDS_GPU = "Decoding on the GPU", True
MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 512, 1024, 4096)  # MiB
QUICK_SIZES = (1, 16, 512)
SIDE = 4096  # of the matrices that larger sizes are made of
DISTINCT = 512 * MIB  # beyond, matrices come again, in memory of their own
MANY = 200  # tensors of 1 MiB in one launch
ANS, ZSTD, ENTROPACK = "nvCOMP ANS", "nvCOMP zstd", "EntroPack"

# name: code in files, data types under which nvCOMP ANS may take the bytes (the first that works)
DTYPES = {
    "bf16": ("BF16", ("<f2", "|u1")),
    "fp16": ("F16", ("<f2", "|u1")),
    "fp32": ("F32", ("<f4", "|u1")),
    "bf16 in fp32": ("F32", ("<f4", "|u1")),
    "E4M3": ("F8_E4M3", ("|f1", "|u1")),
    "bf16 pruned": ("BF16", ("<f2", "|u1")),
    "fp16 pruned": ("F16", ("<f2", "|u1")),
    "fp32 pruned": ("F32", ("<f4", "|u1")),
}
# The linear layers of a TinyLlama-1.1B, each alone.
LAYERS = {
    "q_proj, o_proj": (2048, 2048),
    "k_proj, v_proj": (256, 2048),
    "gate_proj, up_proj": (5632, 2048),
    "down_proj": (2048, 5632),
    "lm_head": (32000, 2048),
}
LAYER_BAR = 0.1  # ms
# At 512 MiB, GB/s of output.
BARS = {"bf16": 2000.0, "fp32": 1900.0, "fp16": 1000.0, "E4M3": 500.0, "bf16 pruned": 1500.0}


def weights(name: str, rows: int, seed: int, columns: int = 0) -> Any:
    """Synthetic weights on the GPU: normal, per-row scale 0.02 * exp(0.3 * normal); pruned: half are 0."""
    import torch

    torch.manual_seed(seed)
    values = torch.randn(rows, columns or SIDE, device="cuda")
    values *= 0.02 * torch.exp(0.3 * torch.randn(rows, 1, device="cuda"))
    if name.endswith("pruned"):
        values[torch.rand_like(values) < 0.5] = 0
    if name.startswith("bf16 in"):
        return values.to(torch.bfloat16).to(torch.float32)
    if name.startswith("bf16"):
        return values.to(torch.bfloat16)
    if name.startswith("fp16"):
        return values.to(torch.float16)
    return to_e4m3(values) if name == "E4M3" else values


def host_bytes(tensor: Any) -> Any:
    """A device tensor's bytes on the host."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def join(tensors: list[Any]) -> Any:
    """Tensors of any dtype, fp8 too, behind one another."""
    import torch

    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


class Work:
    """The matrices of one dtype: on the device as they are, on the host as `tpde pack` stores them."""

    def __init__(self, name: str, seed: int, most: int) -> None:
        import torch

        self.name = name
        self.code, self.types = DTYPES[name]
        item = weights(name, 128, seed).element_size()
        self._matrix = SIDE * SIDE * item
        count = max(1, min(most, DISTINCT) // self._matrix)
        note(f"{name}: making {count} matrices of {self._matrix // MIB} MiB")
        self._plain = [weights(name, SIDE, seed + i) for i in range(count)]
        self.dtype = self._plain[0].dtype
        start = time.perf_counter()
        self._packed = [self._pack(host_bytes(matrix), SIDE) for matrix in self._plain]
        note(f"{name}: packed in {time.perf_counter() - start:.1f} s")
        torch.cuda.synchronize()

    def _pack(self, data: Any, rows: int) -> Blob:
        return pack(TensorSpec(self.code, (rows, SIDE)), data)

    def single(self, nbytes: int) -> tuple[Any, list[Blob]]:
        """So many bytes: rows of one matrix, or whole matrices."""
        if nbytes < self._matrix:
            rows = nbytes * SIDE // self._matrix
            part = self._plain[0][:rows]
            return part, [self._pack(host_bytes(part), rows)]
        numbers = [i % len(self._plain) for i in range(nbytes // self._matrix)]
        if len(numbers) == 1:
            return self._plain[0], self._packed[:1]
        return join([self._plain[i] for i in numbers]), [self._packed[i] for i in numbers]

    def many(self, count: int, nbytes: int) -> tuple[Any, list[Blob]]:
        """Different tensors of so many bytes each."""
        rows = nbytes * SIDE // self._matrix
        per = SIDE // rows
        parts = [self._plain[i // per % len(self._plain)][i % per * rows :][:rows] for i in range(count)]
        return join(parts), [self._pack(host_bytes(part), rows) for part in parts]


def contest(
    work: Work, source: Any, blobs: list[Blob], parts: int, runs: int, flush: Flush, peers: bool
) -> dict[str, Result]:
    """Everyone on the same bytes."""
    import torch

    flat = source.reshape(-1).view(torch.uint8)
    out = torch.empty_like(flat)
    makers: dict[str, Callable[[], Contestant]] = {
        COPY: lambda: Copy(flat, out),
        OURS: lambda: Decoder(blobs, out),
        CHECKED: lambda: Decoder(blobs, out, check=True),
    }
    if peers:
        cuts = [source] if parts == 1 else list(source.chunk(parts))
        makers |= {
            ANS: lambda: Nvcomp("ANS", work.types, flat, out, parts),
            ZSTD: lambda: Nvcomp("Zstd", ("",), flat, out, parts),
            ENTROPACK: lambda: EntroPack(cuts),
        }
    return race(makers, flat, out, runs, flush)


def bars(grids: dict[str, Grid]) -> list[tuple[str, float | None, float]]:
    """Ours and the bars that this run can tell."""
    checks: list[tuple[str, float | None, float]] = []

    def at(name: str, key: int | str, who: str = OURS) -> float | None:
        found = grids.get(name, {}).get(key)
        return speed(found[0], found[1].get(who)) if found else None

    for name, bar in BARS.items():
        checks.append((f"{name}, 512 MiB, GB/s", at(name, 512), bar))
    ours, ans, checked = at("bf16", 512), at("bf16", 512, ANS), at("bf16", 512, CHECKED)
    checks.append(("bf16, 512 MiB, x nvCOMP ANS", ours / ans if ours and ans else None, 1.3))
    checks.append(
        ("bf16, 512 MiB, checksums: speed kept", checked / ours if ours and checked else None, 1 / 1.15)
    )
    checks.append((f"bf16, {MANY} x 1 MiB in one launch, GB/s", at("bf16", f"{MANY} x 1 MiB"), 1200.0))
    checks.append(("bf16, 16 MiB alone, GB/s", at("bf16", 16), 1000.0))
    return checks


def layers(runs: int, flush: Flush) -> list[tuple[list[str], bool]]:
    """Every linear layer of a small model, bf16, one launch each."""
    import torch

    rows = []
    for name, (height, width) in LAYERS.items():
        source = weights("bf16", height, 0, width)
        flat = source.reshape(-1).view(torch.uint8)
        out = torch.empty_like(flat)
        blob = pack(TensorSpec("BF16", (height, width)), host_bytes(source))
        makers: dict[str, Callable[[], Contestant]] = {
            OURS: partial(Decoder, [blob], out),
            CHECKED: partial(Decoder, [blob], out, check=True),
        }
        results = race(makers, flat, out, runs, flush)
        cells = [f"{r.median * 1e3:.4f}" if r.times else r.problem for r in results.values()]
        good = all(bool(r.times) and r.median * 1e3 < LAYER_BAR for r in results.values())
        rows.append(([f"{name}, {height}x{width}", *cells], good))
    return rows


def draw(options: argparse.Namespace, runs: int, grids: dict[str, Grid], small: Any, page: Page) -> None:
    """All of it so far."""
    page.clear()
    page.say(
        "Weights: normal, per-row scale 0.02 * exp(0.3 * normal), pruned ones half zeros, made on the GPU, "
        f"seed {options.seed}; rows of, or whole matrices of {SIDE}x{SIDE}; beyond {DISTINCT // MIB} MiB "
        "they come again, in memory of their own. Packed as `tpde pack` does by default. CUDA events, "
        f"medians of {runs} alternating runs after two to warm up, 256 MiB written through the cache "
        "before each. "
        "Every contestant's output was compared with the source, bit by bit. nvCOMP has its own "
        "container, and its decompression configuration made beforehand."
        + (f" Blocks of ours have {options.shared} KiB of shared memory." if options.shared else "")
    )
    for name, grid in grids.items():
        if grid:
            page.section(name)
            dtype_table(grid, page)
    for who in wrong_bits(grids):
        page.judge(False, f"bits, {who}")
    page.section("The linear layers of a TinyLlama-1.1B")
    # Bars are those of the whole card.
    rows = [
        [*cells, verdict(good) if options.shared else page.judge(good, cells[0])] for cells, good in small
    ]
    page.table(["layer, ms", OURS, CHECKED, f"below {LAYER_BAR} ms"], rows)
    if not options.shared:
        page.section("Bars")
        page.limits(bars(grids), least=True)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), metavar="DTYPE")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="MIB", help="default: 1 to 4096")
    parser.add_argument("--runs", type=int, default=11, help="timed runs of each, after two to warm up")
    parser.add_argument("--quick", action="store_true", help="three sizes, five runs")
    parser.add_argument(
        "--budget", type=float, default=420, help="seconds after which no further case begins"
    )
    parser.add_argument(
        "--shared", type=int, metavar="KIB", help="as on a device whose blocks have so much shared memory"
    )
    parser.add_argument("--no-peers", action="store_true", help="ours and the copy only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="also write a plot to this file")


class LittleShared(CudaDriver):
    """The driver, but for how many bytes of shared memory a block may have.

    Parameters
    ----------
    most : int
        That many.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def facts(self, device: int) -> DeviceFacts:
        """The facts of a device, but for that."""
        have = super().facts(device)
        return have._replace(shared_bytes=min(self._most, have.shared_bytes))


def run(options: argparse.Namespace, page: Page) -> None:
    """Run one dtype and size after the other; the page grows with each."""
    little = (
        launching_on(CudaBackend(LittleShared(options.shared << 10))) if options.shared else nullcontext()
    )
    with little:
        run_cases(options, page)


def run_cases(options: argparse.Namespace, page: Page) -> None:
    """Run them on what runs kernels now."""
    import torch

    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    runs = 5 if options.quick else options.runs
    start, grids, flush = time.perf_counter(), dict[str, Grid](), Flush()
    small = layers(runs, flush)
    for name in options.dtypes:
        if time.perf_counter() - start > options.budget:
            note(f"{name}: left out, the budget of {options.budget:.0f} s is spent")
            continue
        work, grid = Work(name, options.seed, max(*sizes, MANY) * MIB), grids.setdefault(name, {})
        keys: list[int | str] = [*sizes, *([f"{MANY} x 1 MiB"] if name == "bf16" else [])]
        for key in keys:
            if time.perf_counter() - start > options.budget:
                note(f"{name}, {shown(key)}: left out, the budget is spent")
                break
            source, blobs = work.single(key * MIB) if isinstance(key, int) else work.many(MANY, MIB)
            parts = 1 if isinstance(key, int) else MANY
            nbytes = source.numel() * source.element_size()
            grid[key] = nbytes, contest(work, source, blobs, parts, runs, flush, not options.no_peers)
            found = {who: speed(nbytes, result) for who, result in grid[key][1].items()}
            note(f"{name}, {shown(key)}: " + ", ".join(f"{who} {v:.0f}" for who, v in found.items() if v))
            del source, blobs
            torch.cuda.empty_cache()
            draw(options, runs, grids, small, page)
            page.save()
        del work
        torch.cuda.empty_cache()
    draw(options, runs, grids, small, page)
    page.plot(options.plot, lambda pyplot: plot({name: grid for name, grid in grids.items() if grid}, pyplot))
