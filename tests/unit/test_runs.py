"""Runs answer torch's functions as tensors would, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.integrations.runs import NotARun, Run  # noqa: E402


class Leaf:
    """A part with real words, to compare with what torch makes of them."""

    def __init__(self, *shape: int) -> None:
        self.words = torch.randint(0, 1 << 30, shape, dtype=torch.int32)
        self.nbytes = self.words.numel() * 4


def _both(*shapes: tuple[int, ...]) -> tuple[list[Any], list[Run[Leaf]]]:
    leaves = [Leaf(*shape) for shape in shapes]
    return [leaf.words for leaf in leaves], [Run(leaf.words.shape, torch.int32, [leaf]) for leaf in leaves]


def _same(run: Run[Leaf], tensor: Any) -> None:
    assert tuple(run.shape) == tuple(tensor.shape)
    assert torch.equal(torch.cat([part.words.reshape(-1) for part in run.parts]), tensor.reshape(-1))


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b, c, d: torch.stack([a, b, c, d], dim=0),
        lambda a, b, c, d: torch.stack([a, b]),
        lambda a, b, c, d: torch.cat([a, b], dim=0),
        lambda a, b, c, d: torch.cat(
            [torch.stack([a, b]), torch.stack([c, d])], dim=1
        ),  # gate and up of experts
        lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=-2),
        lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=0),
        lambda a, b, c, d: torch.chunk(torch.stack([a, b, c, d]), 4, dim=0)[2].squeeze(0),
        lambda a, b, c, d: torch.chunk(torch.stack([a, b, c, d]), 3, dim=0)[1].contiguous(),
        lambda a, b, c, d: torch.chunk(
            torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1), 2, dim=1
        )[1],
        lambda a, b, c, d: torch.split(torch.cat([a, b, c, d]), [4, 12])[1],
        lambda a, b, c, d: torch.split(torch.cat([a, b, c, d]), 8)[1],
        lambda a, b, c, d: torch.stack([a, b]).unsqueeze(1).squeeze(),
    ],
)
def test_the_same_as_torch(make: Callable[..., Any]) -> None:
    tensors, runs = _both(*[(4, 3)] * 4)
    _same(make(*runs), make(*tensors))


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: torch.cat([a, b], dim=1),  # rows of two blobs in turn
        lambda a, b: torch.stack([a, b], dim=1),
        lambda a, b: torch.chunk(a, 2, dim=0),
        lambda a, b: torch.split(a, [1, 3], dim=0),
        lambda a, b: torch.split(torch.stack([a, b]), [1, 2]),
        lambda a, b: torch.transpose(a, 0, 1),
        lambda a, b: torch.cat([a, torch.zeros(4, 3, dtype=torch.int32)]),
        lambda a, b: torch.stack([a, b.squeeze().unsqueeze(0)]),
        lambda a, b: torch.cat([a, Run(b.shape, torch.int64, b.parts)]),
    ],
)
def test_what_is_no_sequence_of_blobs(make: Callable[..., Any]) -> None:
    _, runs = _both((4, 3), (4, 3))
    with pytest.raises(NotARun):
        make(*runs)
