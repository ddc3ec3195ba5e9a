"""Packing, verifying and unpacking need at most 512 MiB, whatever the size of file and tensors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.contents import fill, spec_of
from support.files import container

MEMORY = 512  # MiB, as `pack` promises
# One tensor is larger than that. `large` has a file of 1.5 GiB.
SIZES = {"layers.0.big": 544 << 20, "layers.1.zero": 32 << 20, "layers.2.noise": 32 << 20}
LARGE = {"layers.0.big": 768 << 20, "layers.1.zero": 512 << 20, "layers.2.noise": 256 << 20}

PROGRAM = """
import resource, sys
from tpde import pack, unpack, verify
from tpde.codec import native
native.simd()
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
action, *arguments = sys.argv[1:]
before = peak()
found = {"pack": pack, "unpack": unpack, "verify": verify}[action](*arguments, threads=2)
assert action != "verify" or found == []
print(peak() - before)
"""


CUT = """
import resource, sys, torch
from tpde.loading.checkpoint_files import Checkpoint
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
with Checkpoint([sys.argv[1]]) as checkpoint:
    run = checkpoint.packed["fused"].run
    before = peak()
    found = checkpoint.decode(torch.chunk(run, 3, dim=int(sys.argv[2])), torch.device("cpu"))
    print(peak() - before)
"""


def _growth(*arguments: str | Path, program: str = PROGRAM) -> int:
    """Run an action in a process of its own; returns by how many MiB its memory grew."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(params=[SIZES, pytest.param(LARGE, marks=pytest.mark.large)], ids=["small", "large"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Give a file of three tensors; most of it is holes that take no room on the disk."""
    sizes = request.param
    header, at = {}, 0
    for name, size in sizes.items():
        dtype, width = ("U8", 1) if "noise" in name else ("BF16", 2)
        header[name] = {"dtype": dtype, "shape": [size // width], "data_offsets": [at, at + size]}
        at += size
    path = tmp_path / "source.safetensors"
    weights = fill("normal", spec_of("BF16", 1 << 20))
    noise = np.random.default_rng(0).bytes(4 << 20)
    with path.open("wb") as file:
        file.write(container(header, b""))
        for _ in range(sizes["layers.0.big"] // len(weights) // 8):
            file.write(weights)
            file.seek(7 * len(weights), os.SEEK_CUR)  # holes among the weights
        file.seek(sizes["layers.1.zero"], os.SEEK_CUR)
        for _ in range(sizes["layers.2.noise"] // len(noise)):
            file.write(noise)
    assert path.stat().st_size == 8 + len(json.dumps(header)) + -len(json.dumps(header)) % 8 + at
    return path


def test_memory_stays_below_what_is_promised(source: Path, tmp_path: Path) -> None:
    packed, restored = tmp_path / "packed.safetensors", tmp_path / "restored.safetensors"
    assert _growth("pack", source, packed) < MEMORY
    assert packed.stat().st_size < source.stat().st_size // 2
    assert _growth("verify", packed) < MEMORY
    assert _growth("unpack", packed, restored) < MEMORY
    with source.open("rb") as one, restored.open("rb") as two:
        while piece := one.read(16 << 20):
            assert piece == two.read(16 << 20)
        assert not two.read(1)
    for path in (source, packed, restored):  # pytest keeps folders for a while
        path.unlink()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_fused_weight_is_cut_in_three(dim: int, tmp_path: Path) -> None:
    """Of the packed form and of what it is cut from, less than 64 MiB are there beside the three."""
    pytest.importorskip("torch", reason="needs torch")
    shape = 6, 3072, 5461  # 192 MiB; no cut is where a chunk ends
    size = 2 * math.prod(shape)
    header = {"fused": {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, size]}}
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    weights = fill("normal", spec_of("BF16", 1 << 20))
    plain.write_bytes(container(header, (weights * (size // len(weights) + 1))[:size]))
    assert _growth("pack", plain, packed) < MEMORY
    assert _growth(packed, str(dim), program=CUT) < (size >> 20) + 64
    plain.unlink()
    packed.unlink()
