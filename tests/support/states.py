"""Two states of a small model, as files and as directories, with something of every kind between them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.contents import fill, rng, spec_of
from support.deltas import pair
from support.files import Tensors, safetensors_bytes
from tpde.codec.native import Bytes
from tpde.format.container import TensorSpec


def tensors() -> tuple[Tensors, Tensors]:
    """Give the tensors of a base and its target: changed, the same, moved, new, gone, of other shapes."""
    base: Tensors = {}
    target: Tensors = {}

    def both(name: str, spec: TensorSpec, old: bytes | Bytes, new: bytes | Bytes) -> None:
        base[name], target[name] = (spec, bytes(old)), (spec, bytes(new))

    for name, dtype, content, change, words in (
        ("layers.0.weight", "BF16", "normal", "few", 70_000),
        ("layers.0.norm", "BF16", "normal", "none", 384),
        ("layers.1.weight", "F32", "normal", "most", 9_000),
        ("layers.1.half", "F16", "specials", "some", 3_000),
        ("layers.1.scale", "F8_E4M3", "normal", "some", 3_001),
        ("layers.2.wide", "F64", "specials", "signs", 700),
        ("layers.2.ids", "I64", "ascending", "few", 2_000),
        ("layers.2.noise", "U16", "random", "all", 3_000),
    ):
        both(name, spec_of(dtype, words), *pair(dtype, content, change, words))
    empty = TensorSpec("BF16", (0, 4))
    both("empty", empty, b"", b"")
    both("zeros", spec_of("F32", 3000), fill("normal", spec_of("F32", 3000)), bytes(12_000))
    ids = np.arange(3000, dtype=np.int64) * 1_000_003
    both("steps", spec_of("I64", 3000), ids.tobytes(), (ids + np.arange(3000) % 5).tobytes())
    base["gone"] = target["new"] = spec_of("BF16", 900), fill("normal", spec_of("BF16", 900))
    base["retyped"] = spec_of("F16", 600), fill("normal", spec_of("F16", 600))
    target["retyped"] = spec_of("BF16", 600), fill("normal", spec_of("BF16", 600))
    return base, target


def files(folder: Path) -> tuple[Path, Path]:
    """Write both states as a file each."""
    paths = folder / "base.safetensors", folder / "target.safetensors"
    for path, state, step in zip(paths, tensors(), "12", strict=True):
        path.write_bytes(safetensors_bytes(state, {"format": "pt", "step": step}))
    return paths


def folders(folder: Path) -> tuple[Path, Path]:
    """Write both states as a directory each, in shards; a tensor is in another shard afterwards."""
    paths = folder / "base", folder / "target"
    for number, (path, state) in enumerate(zip(paths, tensors(), strict=True)):
        (path / "deep").mkdir(parents=True)
        names = sorted(state)
        first = [name for name in names if (name < "m") != (number and name == "empty")]
        parts = {
            "model-1.safetensors": first,
            "deep/model-2.safetensors": [n for n in names if n not in first],
        }
        for file, inside in parts.items():
            (path / file).write_bytes(safetensors_bytes({name: state[name] for name in inside}, {}))
        (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (path / "notes.txt").write_text(f"step {number}\n" * 100)
        if number:
            (path / "deep" / "added.bin").write_bytes(rng("added").bytes(1000))
    return paths


def content(path: Path) -> dict[str, bytes]:
    """Give every file below a folder, or a file alone."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
