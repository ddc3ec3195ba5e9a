"""Windows of several experts in one stack: its parts, damage, and which weights can be experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.experts import experts_of, fused_model, plain_model  # noqa: F401
from support.models import assert_same_bits, torch

from tpde.codec import window_plan, window_stacks
from tpde.errors import Corrupt, InvalidInput, Truncated, UnsupportedVersion
from tpde.nn import PackedTensor
from tpde.weights.expert_products import can_be_experts
from tpde.weights.packed_tensor import rebuild_tensor
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts


def words(experts: int, rows: int, columns: int) -> Any:
    draw = np.random.default_rng(experts * rows * columns)
    return torch.from_numpy(draw.standard_normal((experts, rows, columns)).astype(np.float32)).bfloat16()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (5, 33, 70), (2, 100, 384)], ids=str)
def test_parts(shape: tuple[int, int, int], turned: bool) -> None:
    """Spans of any place, experts, and all."""
    plain = words(*shape)
    made = WindowedExperts.of_plain(plain, "it", 1e9, turned)
    assert made is not None
    assert made.shape == shape
    weight, flat = PackedTensor(made), plain.view(-1).view(torch.uint8)
    assert_same_bits(weight.decoded(), plain)
    for number in range(shape[0]):
        assert_same_bits(weight.expert(number).decoded().view(torch.bfloat16).view(shape[1:]), plain[number])
    draw = np.random.default_rng(0)
    for _ in range(20):
        begin, end = np.sort(draw.integers(0, flat.numel() + 1, 2)).tolist()
        assert torch.equal(weight.span(begin, end).decoded(), flat[begin:end])
    again = WindowedExperts(made.pickled(), "it")
    assert again.stack == made.stack
    for number, blob in enumerate(made.stack.windows):
        alone = window_plan.encode(
            np.ascontiguousarray(
                (plain[number].t() if turned else plain[number]).contiguous().view(torch.int16).numpy()
            )
        )
        assert np.array_equal(made.stack.blob(made.memory.numpy(), number), alone)
        assert blob.nbytes % 128 == 0


def test_damaged_stacks_are_refused(fused: Any) -> None:
    weight = experts_of(fused)[0]
    _, (blobs, *rest, _) = weight.__reduce__()  # without hashes, as of anybody
    whole, stack = blobs[0].numpy(), weight.sources[0].stack
    assert rebuild_tensor(blobs, *rest).multiplies
    messages = []
    inside = [at + it for at in stack.starts for it in (*range(64), 200)]
    for at in (*range(8, 128), *inside):
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        try:
            made = rebuild_tensor([torch.from_numpy(damaged)], *rest)
            assert made.shape == weight.shape
        except (Corrupt, Truncated, UnsupportedVersion, InvalidInput) as error:
            messages.append(str(error))
    assert len(messages) >= 115 + 40 * len(stack.starts)
    for start, window in zip(stack.starts, stack.windows, strict=True):
        for at in (window.offsets_at, window.offsets_at + 4, window.entries_at - 1):
            damaged = whole.copy()
            damaged[start + at] ^= 0xFF
            with pytest.raises(Corrupt):
                rebuild_tensor([torch.from_numpy(damaged)], *rest)
    for size in (8, 127, 128, 600, stack.starts[1], stack.starts[1] + 50, whole.size - 1):
        with pytest.raises((Corrupt, Truncated, InvalidInput)):
            rebuild_tensor([torch.from_numpy(whole[:size].copy())], *rest)
    with pytest.raises(Corrupt, match="follow the last blob"):
        window_stacks.validate(np.concatenate([whole, np.zeros(128, np.uint8)]))
    fewer = whole.copy()
    fewer[16] -= 1
    with pytest.raises(Corrupt):
        window_stacks.validate(fewer)
    more = whole.copy()
    more[16:24] = 0x7F
    with pytest.raises(Corrupt, match="holds no"):
        window_stacks.validate(more)


def test_experts_of_other_shapes_are_no_stack() -> None:
    one, other = (window_plan.encode(np.zeros((16, it), np.uint16)) for it in (64, 128))
    with pytest.raises(Corrupt, match="another shape"):
        window_stacks.validate(np.concatenate([window_stacks.head(2, False), one, other]))


def test_what_can_be_experts() -> None:
    assert can_be_experts((4, 6, 8), [(4, 6, 8)], True)
    assert can_be_experts((4, 6, 8), [(3, 8)] * 8, False)
    assert can_be_experts((4, 6, 8), [(6, 8)] * 4, False)
    for shape, parts, turned in (
        ((4, 6, 8), [(3, 8)] * 8, True),
        ((4, 6, 8), [(2, 6, 8)] * 2, False),
        ((4, 6, 8), [(4, 8), (2, 8)] * 4, False),
        ((4, 6, 8), [(6, 8)] * 3, False),
        ((24, 8), [(24, 8)], False),
        ((0, 6, 8), [(0, 6, 8)], False),
    ):
        assert not can_be_experts(shape, parts, turned)


@pytest.mark.parametrize(
    "part",
    [
        lambda it: WindowedExperts.of_plain(it, "it", 1e9, False),  # a stack of half of them
        lambda it: Windowed.of_plain(it.view(32, 8), "it", 1e9),
        lambda it: Windowed.of_plain(it.view(8, 32), "it", 1e9),
    ],
    ids=["stacks", "rows", "columns"],
)
def test_windows_of_other_matrices_are_not_multiplied_as_experts(part: Any) -> None:
    """As somebody's pickle may have them: kernels would write beyond what they are given."""
    plain = words(4, 8, 16)
    sources = [part(it.contiguous()) for it in plain.split(2)]
    blobs, names = [it.memory for it in sources], ["a", "b"]
    made = rebuild_tensor(blobs, names, (4, 8, 16), "it", 0)
    assert not made.multiplies
    assert_same_bits(made.decoded(), plain)
