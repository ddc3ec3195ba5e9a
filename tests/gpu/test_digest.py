"""Hashes that a GPU computes: those of the library."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from support.gpu import needs_cuda, torch

from tpde.cuda.digest import Bytestring, Digests

pytestmark = needs_cuda

SIZES = (241, 1023, 1024, 1025, 5000, 128 << 10, (128 << 10) + 1, 300_001, 20_000_003, 64 << 20)


@pytest.mark.parametrize("first", [0, 2, 5])
def test_all_sizes_at_any_address(first: int) -> None:
    data = np.frombuffer(np.random.default_rng(1).bytes(sum(SIZES) + 64 * len(SIZES)), np.uint8)
    there, at, parts, tensors = torch.from_numpy(data.copy()).cuda(), first, [], []
    for size in SIZES:
        parts.append(data[at : at + size])
        tensors.append(Bytestring(there.data_ptr() + at, size))
        at += -(-size // 16) * 16
    made, stream = Digests(tensors, 0), torch.cuda.current_stream().cuda_stream
    items = torch.from_numpy(made.items).cuda()
    scratch = torch.full((made.scratch_bytes + 256,), 0xA5, dtype=torch.uint8, device="cuda")
    made.sums(scratch.data_ptr(), stream)
    made.chain(items.data_ptr(), scratch.data_ptr(), stream)
    found = made.results(scratch[: made.found_bytes].cpu().numpy())
    assert found == [xxhash.xxh3_128_digest(it) for it in parts]
    assert (scratch[made.scratch_bytes :] == 0xA5).all()
