"""Ratios with every byte of overhead counted: whole files packed, their sizes compared, and restored.

ZipNN's figure is each tensor given to `zipnn.ZipNN`, plus the plain file's header; tensors of dtypes that
it does not take are counted as they are.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tpde
from benchmarks.data.files import minilm, sha256
from benchmarks.data.weights import normal, tensor_bytes, to_e4m3
from benchmarks.harness.processes import reason
from benchmarks.harness.report import Page, note
from benchmarks.peers import zipnn

TITLE = "Ratio, all overhead counted"
# Names of dtypes in files, bits of the exponent, and of the mantissa, below it.
FIELDS = {
    "torch.bfloat16": ("BF16", 8, 7),
    "torch.float16": ("F16", 5, 10),
    "torch.float32": ("F32", 8, 23),
    "torch.float8_e4m3fn": ("F8_E4M3", 4, 3),
}
MIB = 1 << 20


@dataclass
class Row:
    """One line of the table."""

    name: str
    source_bytes: int
    packed_bytes: int
    bar: float | None
    zipnn: float | None = None
    ideal: float | None = None
    entropy: float | None = None
    exact: bool = True

    @property
    def ratio(self) -> float:
        """Source bytes over packed bytes."""
        return self.source_bytes / self.packed_bytes

    @property
    def passed(self) -> bool:
        """Restored exactly, and no lower than the bar."""
        return self.exact and (self.bar is None or self.ratio >= self.bar)

    def cells(self, page: Page) -> list[str]:
        """As the table shows it."""
        judged = page.judge(self.passed, self.name) if self.bar is not None or not self.exact else ""
        first, last = [self.ratio, self.bar], [self.zipnn, self.ideal, self.entropy]
        shown = [["" if it is None else f"{it:.4f}" for it in some] for some in (first, last)]
        sizes = [f"{self.source_bytes:,}", f"{self.packed_bytes:,}"]
        return [self.name, *sizes, *shown[0], judged, *shown[1], "same" if self.exact else "DIFFERS"]


def _entropy(counts: np.ndarray[Any, Any]) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def ideal(tensors: dict[str, Any]) -> tuple[float | None, float | None]:
    """Ratio and exponent entropy of a code that gives each tensor's exponents their entropy.

    Other bits count as they are, but for the low halves of fp32 words that are all zero.
    """
    plain = coded = weighted = words = 0.0
    for tensor in tensors.values():
        data, fields = tensor_bytes(tensor), FIELDS.get(str(tensor.dtype))
        plain += 8 * data.size
        if fields is None or not data.size:
            coded += 8 * data.size
            continue
        _, exponent_bits, mantissa_bits = fields
        word = data.view(f"u{tensor.element_size()}")
        exponents = (word >> mantissa_bits) & ((1 << exponent_bits) - 1)
        bits = _entropy(np.bincount(exponents.astype(np.int64)))
        rest = mantissa_bits + 1
        if tensor.element_size() == 4 and not (word & 0xFFFF).any():
            rest -= 16
        coded += word.size * (bits + rest)
        weighted += word.size * bits
        words += word.size
    return (plain / coded, weighted / words) if words else (None, None)


def zipnn_bytes(tensors: dict[str, Any]) -> int | None:
    """Size of all tensors as ZipNN stores them; None if it takes none of them, is missing, or fails."""
    total, taken = 0, False
    for tensor in tensors.values():
        data, fields = tensor_bytes(tensor), FIELDS.get(str(tensor.dtype))
        try:
            size = zipnn.stored_bytes(fields[0], data, tensor) if fields is not None and data.size else None
        except (ImportError, ValueError) as error:
            note(f"ZipNN: {reason(error)}")
            return None
        total, taken = total + (data.size if size is None else size), taken or size is not None
    return total if taken else None


def pack_file(name: str, path: Path, bar: float | None) -> Row:
    """Pack a file, restore it, compare."""
    note(name)
    packed, back = path.with_suffix(".packed.safetensors"), path.with_suffix(".back.safetensors")
    tpde.pack(path, packed)
    tpde.unpack(packed, back)
    row = Row(name, path.stat().st_size, packed.stat().st_size, bar, exact=sha256(path) == sha256(back))
    packed.unlink()
    back.unlink()
    return row


def pack_tensors(name: str, tensors: dict[str, Any], folder: Path, bar: float | None) -> Row:
    """Pack a file of these tensors, and compare with ZipNN and with the ideal."""
    from safetensors.torch import save_file

    path = folder / "plain.safetensors"
    save_file(tensors, path)
    row = pack_file(name, path, bar)
    size = zipnn_bytes(tensors)
    if size is not None:
        overhead = row.source_bytes - sum(tensor_bytes(t).size for t in tensors.values())
        row.zipnn = row.source_bytes / (size + overhead)
    row.ideal, row.entropy = ideal(tensors)
    path.unlink()
    return row


def pack_model(argument: str, folder: Path) -> Row:
    """Pack a model directory; what packing adds to files other than weights counts too."""
    place, bar = argument, None
    head, _, tail = argument.rpartition(":")
    if head and tail.replace(".", "", 1).isdigit():
        place, bar = head, float(tail)
    source, packed, back = Path(place).resolve(), folder / "packed", folder / "back"
    note(source.name)
    tpde.pack(source, packed)
    tpde.unpack(packed, back)

    def files(root: Path) -> dict[str, Path]:
        return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}

    plain, small = files(source), files(packed)
    hashes = {name: sha256(p) for name, p in plain.items() if not name.startswith(".cache/")}
    exact = hashes == {name: sha256(p) for name, p in files(back).items()}
    weights = sum(p.stat().st_size for name, p in plain.items() if name.endswith(".safetensors"))
    total = sum(plain[name].stat().st_size for name in hashes)
    # Everything in the packed folder, without what is there untouched in both.
    shrunk = sum(p.stat().st_size for p in small.values()) - (total - weights)
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for name, path in plain.items():
        if name.endswith(".safetensors"):
            tensors |= {f"{name}/{key}": value for key, value in load_file(path).items()}
    size, payload = zipnn_bytes(tensors), sum(tensor_bytes(t).size for t in tensors.values())
    row = Row(f"{source.name}, directory", weights, shrunk, bar, exact=exact)
    row.zipnn = None if size is None else weights / (size + weights - payload)
    row.ideal, row.entropy = ideal(tensors)
    return row


def weights(seed: int, rows: int, folder: Path) -> list[Row]:
    """Synthetic weights."""
    import torch

    values = normal(seed, rows)
    bf16 = values.to(torch.bfloat16)
    return [
        pack_tensors("synthetic bf16", {"weight": bf16}, folder, 1.492),
        pack_tensors("synthetic E4M3", {"weight": to_e4m3(values)}, folder, 1.195),
        pack_tensors("synthetic bf16 as fp32", {"weight": bf16.float()}, folder, 2.95),
    ]


def embeddings(folder: Path) -> list[Row]:
    """All-MiniLM-L6-v2."""
    import torch
    from safetensors.torch import load_file

    model = load_file(minilm() / "model.safetensors")

    def cast(dtype: Any, back: Any = None) -> dict[str, Any]:
        return {
            name: (t.to(dtype).to(back or dtype) if t.is_floating_point() else t) for name, t in model.items()
        }

    return [
        pack_tensors("all-MiniLM-L6-v2 bf16", cast(torch.bfloat16), folder, 1.490),
        pack_tensors("all-MiniLM-L6-v2 fp16", cast(torch.float16), folder, 1.17),
        pack_tensors("all-MiniLM-L6-v2 fp32", model, folder, 1.203),
        pack_tensors("all-MiniLM-L6-v2 bf16 as fp32", cast(torch.bfloat16, torch.float32), folder, None),
    ]


def growth(seed: int, folder: Path, page: Page) -> None:
    """Files that cannot shrink: how much they grow."""
    import torch
    from safetensors.torch import save_file

    rng = np.random.default_rng(seed)

    def noise(size: int) -> Any:
        return torch.from_numpy(rng.integers(0, 256, size, np.uint8))

    cases = {
        "random bytes, one U8 tensor of 16 MiB": {"noise": noise(16 * MIB)},
        "random bits, one bf16 tensor of 16 MiB": {"noise": noise(16 * MIB).view(torch.bfloat16)},
        "random bytes, 200 U8 tensors of 0 to 300 bytes": {
            f"layers.{i}.noise": noise(int(rng.integers(0, 301))) for i in range(200)
        },
    }
    rows = []
    for name, tensors in cases.items():
        path = folder / "noise.safetensors"
        save_file(tensors, path)
        row = pack_file(name, path, None)
        allowed = row.source_bytes * 0.001 + 400 * len(tensors)
        grown = row.packed_bytes - row.source_bytes
        judged = page.judge(row.exact and grown <= allowed, name)
        sizes = [f"{row.source_bytes:,}", f"{row.packed_bytes:,}", f"{grown:,}", f"{allowed:,.0f}"]
        rows.append([name, *sizes, judged, "same" if row.exact else "DIFFERS"])
        path.unlink()
    page.say("Data that cannot shrink, bar 0.1 % and 400 bytes a tensor:")
    columns = ["data", "file, bytes", "packed, bytes", "growth, bytes", "at most", "", "unpacked SHA-256"]
    page.table(columns, rows)


def options(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=8192, help="of 4096 weights, a multiple of 128")
    parser.add_argument("--model", action="append", default=[], metavar="DIR[:BAR]", help="a model directory")


def run(options: argparse.Namespace, page: Page) -> None:
    """Pack synthetic weights, a small model, directories, and what cannot shrink."""
    page.say(
        f"Synthetic: normal, per-row scale 0.02 * exp(0.3 * normal), {options.rows}x4096, torch generator "
        f"seed {options.seed}; E4M3: the same, each 128x128 block's absolute maximum scaled to 448. Sizes "
        "are those of whole files; of a directory, its weights and all that packing adds to its other files. "
        "Exponent ideal: each tensor's exponents at their entropy, other bits as they are (low halves of "
        "fp32 words that are all zero: nothing)."
    )
    with tempfile.TemporaryDirectory() as place:
        rows, missing = weights(options.seed, options.rows, Path(place)), ""
        try:
            rows += embeddings(Path(place))
        except ImportError as error:
            missing = f"Not measured: {error}."
        for i, argument in enumerate(options.model):
            (Path(place) / f"model{i}").mkdir()
            rows.append(pack_model(argument, Path(place) / f"model{i}"))
        columns = ["weights", "file, bytes", "packed, bytes", "ratio", "bar", "", "ZipNN", "exponent ideal"]
        columns += ["exponent entropy, bits", "unpacked SHA-256"]
        page.table(columns, [row.cells(page) for row in rows])
        if missing:
            page.judge(False, missing)
            page.say(missing)
        growth(options.seed, Path(place), page)
