"""What another process sends to a packed weight is refused, but for the bits that it has already."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.parameters import draw, packed
from support.small import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.optim import SGD

from tpde.errors import PackedWeight

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo"
)


def member(rank: int, folder: str) -> None:
    """One of two processes. Each checks that it is refused what would give its weight other bits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    same, own = packed(draw(96, 64)), packed(draw(96, 64) * (1 + rank))
    before, zeros = own.detach().clone(), torch.zeros(96, 64, dtype=own.dtype)

    def refused(name: str, *given: object, **more: object) -> None:
        with pytest.raises(PackedWeight, match=f"{name}.* would change a copy of it"):
            getattr(dist, name)(*given, **more)

    for it in (own, own.data, own.detach()):
        for more in ({}, {"async_op": True}):
            if rank:
                refused("broadcast", it, 0, **more)
            else:
                dist.broadcast(it, 0, **more)
            dist.broadcast(same, 0, **more)
    refused("all_reduce", own)
    refused("all_reduce", same)
    dist.all_reduce(same, dist.ReduceOp.MAX)
    refused("scatter", own, None if rank else [zeros, zeros], 0)
    with pytest.raises(PackedWeight, match=r"c10d::\w+` would change"):
        dist.all_to_all_single(own, zeros)
    for name in ("recv", "irecv"):
        if rank:
            refused(name, own, 0)
        else:
            dist.send(zeros, 1)

    # What reads it works as with a plain weight.
    gathered = [torch.empty_like(zeros) for _ in range(2)]
    dist.all_gather(gathered, own)
    sent, got = dist.isend(own, 1 - rank), torch.empty_like(zeros)  # both first send, and then receive
    dist.recv(got, 1 - rank)
    sent.wait()
    for plain, there in ((gathered[rank], before), (got, gathered[1 - rank]), (own.detach().clone(), before)):
        assert torch.equal(plain.view(torch.int16), there.view(torch.int16))
    dist.barrier()
    dist.destroy_process_group()


def test_what_is_received(tmp_path: Path) -> None:
    multiprocessing.spawn(member, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_optimizers_of_many_weights(kind: str) -> None:
    weight = packed(draw(96, 64))
    weight.grad = torch.ones(96, 64, dtype=weight.dtype)
    with pytest.raises(PackedWeight):
        SGD([weight], 0.1, **{kind: True}).step()
