"""zstd blobs decoded by nvCOMP on the GPU, to the bits that the CPU decodes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from support.codecs import pack_everything
from support.contents import CONTENTS, fill, shapes
from support.gpu import needs_cuda, torch
from support.packed import Packed, pack

from tpde.cuda.backend import CudaBackend
from tpde.cuda.nvcomp import Nvcomp
from tpde.cuda.zstd_blob import SCRATCH_BYTES, ZstdBlob
from tpde.format.container import TensorSpec

pytest.importorskip("nvidia.nvcomp", reason="needs nvCOMP: pip install 'tpde[nvcomp]'", exc_type=ImportError)
pytestmark = needs_cuda


def _decode(
    packed: Packed, blob: np.ndarray | None = None, scratch_bytes: int = SCRATCH_BYTES
) -> tuple[bytes, list[int]]:
    opened = ZstdBlob(packed.header, packed.blob, 0, number=3, scratch_bytes=scratch_bytes)
    device = torch.from_numpy(np.pad(packed.blob if blob is None else blob, (0, 16))).cuda()
    slots = torch.from_numpy(opened.descriptors).cuda()
    scratch = torch.empty(opened.scratch_bytes, dtype=torch.uint8, device="cuda")
    out = torch.full((len(packed.data) + 16,), 0xA5, dtype=torch.uint8, device="cuda")
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    addresses = (t.data_ptr() for t in (device, scratch, out))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened.launch(slots.data_ptr(), status.data_ptr(), stream, *addresses)
    found = out.cpu().numpy()
    assert (found[len(packed.data) :] == 0xA5).all()
    return found[: len(packed.data)].tobytes(), status.tolist()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "BF16", "U16", "F32", "I32", "F64", "I64"])
def test_contract(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    few = 9 * 4096  # several runs a blob
    for name in CONTENTS:
        for spec in shapes(dtype, 4096):
            packed = pack(spec, fill(name, spec), "zstd") if spec.nbytes else None
            if packed is not None:
                assert _decode(packed, scratch_bytes=few) == (packed.data, [0, 0, 0, 0]), (name, spec)


def test_chunks_of_the_size_that_the_planner_gives() -> None:
    spec = TensorSpec("BF16", (3_000_001,))
    packed = pack(spec, fill("normal", spec), "zstd")
    assert packed is not None
    assert _decode(packed) == (packed.data, [0, 0, 0, 0])


def test_another_stream() -> None:
    spec = TensorSpec("I32", (500_000,))
    packed = pack(spec, fill("normal", spec), "zstd")
    assert packed is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        assert _decode(packed) == (packed.data, [0, 0, 0, 0])


class Counted(Nvcomp):
    """Counts what is decoded, or is not there."""

    def __init__(self, usable: bool) -> None:
        super().__init__()
        self.usable, self.calls = usable, 0

    def available(self) -> bool:
        return self.usable and super().available()

    def decode(self, *given: Any) -> None:
        self.calls += 1
        super().decode(*given)


@pytest.mark.parametrize("usable", [True, False])
def test_zstd_blobs_among_others(usable: bool, launch_on: Any) -> None:
    from tpde.weights.decoder import Materializer
    from tpde.weights.resident import Resident

    nvcomp = Counted(usable)
    launch_on(CudaBackend(nvcomp=nvcomp))
    specs = [TensorSpec("BF16", (300, 1000)), TensorSpec("I32", (70_000,)), TensorSpec("F32", (200, 200))]
    packed = [pack(spec, fill("normal", spec), codec) for spec in specs for codec in ("zstd", "prefix")]
    blobs = [Resident(torch.from_numpy(p.blob.copy()).cuda(), str(i)) for i, p in enumerate(packed)]
    offsets, at = [], 0
    for p in packed:
        offsets.append(at)
        at += -(-len(p.data) // 512) * 512
    out = torch.zeros(at, dtype=torch.uint8, device="cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    materializer = Materializer(list(zip(blobs, offsets, strict=True)), device)
    for _ in range(2):
        out.zero_()
        materializer(out)
        found = out.cpu().numpy()
        for p, offset in zip(packed, offsets, strict=True):
            assert found[offset : offset + len(p.data)].tobytes() == p.data, p.header.spec
    assert bool(nvcomp.calls) == usable


def test_damage_is_reported() -> None:
    spec = TensorSpec("I32", (500_000,))
    packed = pack(spec, fill("normal", spec), "zstd")
    assert packed is not None
    header = packed.header
    for what in (4, 8):  # checksum and modes of the last chunk's record
        damaged = packed.blob.copy()
        damaged[header.index_at + 12 * (header.chunks - 1) + what] ^= 1
        _, status = _decode(packed, damaged)
        assert status == [1, 3, header.chunks - 1, 0], what
