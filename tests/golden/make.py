"""Make the golden files: `python tests/golden/make.py`. Not rerun once version 1 is frozen.

Every source comes from a multiplicative generator in plain integers, so that no library's random numbers
matter. `golden.json` keeps the SHA-256 of sources and packed files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUFFIX = ".tpde.safetensors"
# name: (codec asked for, bytes compared, {tensor: (dtype, shape, content)})
Spec = tuple[str, tuple[int, ...], str]
FILES: dict[str, tuple[str, bool, dict[str, Spec]]] = {
    "prefix_16": ("prefix", True, {"h.0.bf16": ("BF16", (40, 61), "bell"),
                                   "h.1.f16": ("F16", (1500,), "bell")}),
    "prefix_32_64": ("prefix", True, {"a.f32": ("F32", (31, 33), "bell"), "b.f64": ("F64", (300,), "bell"),
                                      "c.c64": ("C64", (257,), "bell")}),
    "prefix_8": ("prefix", True, {f"x.{d}": (d, (1400,), "bell") for d in (
        "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")}),
    "prefix_chunks": ("prefix", True, {"w": ("F8_E4M3", (8192 + 517,), "sorted"),
                                       "v": ("I8", (5000,), "bell")}),
    "prefix_integers": ("prefix", True, {f"x.{d}": (d, (1100,), "count") for d in (
        "BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")}),
    "zstd": ("zstd", False, {"ids": ("I64", (3000,), "count"), "mask": ("BOOL", (5000,), "mask"),
                             "w": ("BF16", (900,), "bell")}),
    "constant": ("auto", True, {f"x.{d}": (d, (4, 2056), "constant") for d in (
        "BF16", "F32", "F64", "C64", "U8", "F4")}),
    "plain": ("auto", True, {"noise": ("F32", (40,), "noise"), "scalar": ("F64", (), "noise"),
                             "empty": ("BF16", (0, 3), "noise"), "name_tpde": ("BF16", (700,), "bell")}),
}  # fmt: skip


def split_mix(seed: int) -> Iterator[int]:
    """64-bit SplitMix numbers."""
    mask, state = (1 << 64) - 1, seed
    while True:
        state = state + 0x9E3779B97F4A7C15 & mask
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        yield z ^ z >> 31


def words_of(content: str, bits: int, words: int, seed: int) -> Iterator[int]:
    """Words of so many bits that are like weights, masks, or whatever `content` says."""
    draw = split_mix(seed)
    for i in range(words):
        z = next(draw)
        low = z >> 8 & (1 << bits) - 1
        if content == "bell":  # an exponent that falls off like a weight's, random sign and mantissa
            fall = (z & -z).bit_length() & 15
            top = max(0, 0x3D - fall) << max(bits - 8, 0)
            yield low & ~(0x7F << max(bits - 8, 0)) | top
        elif content == "sorted":
            yield i * 256 // words
        elif content == "count":
            yield i // 3 & (1 << bits) - 1
        elif content == "mask":
            yield int(z % 11 == 0)
        elif content == "constant":
            yield 0xC1B2A394857687 & (1 << bits) - 1
        else:
            yield low


def source_of(name: str) -> bytes:
    """Give a golden file's source."""
    from tpde.format.constants import DTYPES
    from tpde.format.container import TensorSpec
    from tpde.format.container_writer import canonical_header

    tensors = FILES[name][2]
    specs = {n: TensorSpec(dtype, shape) for n, (dtype, shape, _) in tensors.items()}
    header = canonical_header(specs, {"format": "pt"})
    places = {n: v["data_offsets"] for n, v in json.loads(header).items() if n != "__metadata__"}
    data = bytearray(sum(spec.nbytes for spec in specs.values()))
    for seed, (n, (dtype, shape, content)) in enumerate(tensors.items()):
        b = DTYPES[dtype].word_bytes
        words = math.prod(shape) * DTYPES[dtype].bits // (8 * b)
        begin, end = places[n]
        data[begin:end] = b"".join(w.to_bytes(b, "little") for w in words_of(content, 8 * b, words, seed))
    return len(header).to_bytes(8, "little") + header + bytes(data)


def pack(name: str, folder: Path) -> bytes:
    """Pack a golden file's source."""
    import tpde

    (folder / "source.safetensors").write_bytes(source_of(name))
    tpde.pack(folder / "source.safetensors", folder / "packed", codec=FILES[name][0], force=True)
    return (folder / "packed").read_bytes()


def main() -> None:
    """Write all files and their list."""
    import tempfile

    listed = {}
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            packed = pack(name, Path(folder))
        (HERE / (name + SUFFIX)).write_bytes(packed)
        listed[name] = {
            "source": hashlib.sha256(source_of(name)).hexdigest(),
            "packed": hashlib.sha256(packed).hexdigest(),
        }
    (HERE / "golden.json").write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main()
