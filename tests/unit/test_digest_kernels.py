"""The kernels that hash tensors, run on the CPU: XXH3-128, as the library computes it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from support.emulated import on_cpu  # noqa: F401
from support.window_encoding import guards, room

from tpde.cuda.digest import Bytestring, Digests

# Around the ends of stripes and blocks, of what is staged at a time (128 blocks), and of a grid's round.
SIZES = (241, 256, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 5000, 128 << 10, (128 << 10) + 1, 300_001)

pytestmark = pytest.mark.usefixtures("on_cpu")


def digests(tensors: list[np.ndarray]) -> list[bytes]:
    made = Digests([Bytestring(it.ctypes.data, it.size) for it in tensors], 0)
    items = room(made.items.size, 16, 0)
    items[:] = made.items
    scratch = room(made.scratch_bytes, 16, 0xA5)
    made.sums(scratch.ctypes.data, 0)
    made.chain(items.ctypes.data, scratch.ctypes.data, 0)
    assert (guards(scratch) == 0xA5).all()
    return made.results(scratch[: made.found_bytes])


@pytest.mark.parametrize("first", [0, 1, 8, 14])
def test_all_sizes_at_any_address(first: int) -> None:
    data = np.frombuffer(np.random.default_rng(1).bytes(sum(SIZES) + 64 * len(SIZES)), np.uint8).copy()
    tensors, at = [], -data.ctypes.data % 16 + first
    for size in SIZES:
        tensors.append(data[at : at + size])
        at += -(-size // 16) * 16
    assert digests(tensors) == [xxhash.xxh3_128_digest(it) for it in tensors]


def test_a_grid_with_more_than_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.cuda import digest

    monkeypatch.setattr(digest, "_MOST_BLOCKS", 2)
    data = np.frombuffer(np.random.default_rng(2).bytes(400_003), np.uint8).copy()
    assert digests([data]) == [xxhash.xxh3_128_digest(data)]


@pytest.mark.parametrize("value", [0, 0xFF])
def test_the_same_bytes_again_and_again(value: int) -> None:
    data = np.full(70_000, value, np.uint8)
    assert digests([data]) == [xxhash.xxh3_128_digest(data)]


def test_what_is_not_hashed_here() -> None:
    assert digests([]) == []
    with pytest.raises(ValueError, match="240 bytes"):
        Digests([Bytestring(16, 240)], 0)
    made = Digests([Bytestring(16, 241)], 0)
    for call in (lambda: made.sums(8, 0), lambda: made.chain(8, 16, 0), lambda: made.chain(16, 8, 0)):
        with pytest.raises(ValueError, match="at 0x8"):
            call()
