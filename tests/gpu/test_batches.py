"""10,000 random batches: each row of a product has the bits that it has alone, however it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.batches import Matrix, Trial, draw_matrix, failures
from support.gpu import needs_cuda, torch

from tpde.codec.windows import FLAG_ZERO
from tpde.cuda.product_ways import MOST_ROWS, Product
from tpde.cuda.window_products import DeviceWindow
from tpde.weights import windowing

pytestmark = needs_cuda

CASES, EACH = 10_000, 50  # so many with each matrix


class OnDevice:
    """A matrix in the window layout."""

    def __init__(self, matrix: Matrix) -> None:
        encoded = windowing.encode(matrix.plain)
        assert encoded is not None
        self._blob, self.window = encoded
        self._device = DeviceWindow(self.window, self._blob.data_ptr(), torch.cuda.current_device())

    def ways(self, count: int) -> list[Product]:
        return self._device.ways(count)

    def product(self, x: Any, y: Any, bias: Any, how: Product | None) -> None:
        if how is not None:
            self._device.choose(len(x), how)
        places = x.data_ptr(), x.stride(0), len(x), y.data_ptr(), y.stride(0)
        added = 0 if bias is None else bias.data_ptr()
        room = torch.empty(self._device.room(len(x)), dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        self._device.product(*places, added, stream, room.data_ptr())


@pytest.mark.parametrize("every", [False, True], ids=["by default", "every way"])
def test_a_row_has_the_same_bits_in_any_batch_at_any_place(every: bool) -> None:
    seen = set()

    def trials() -> Iterator[Trial]:
        for seed in range(CASES // EACH):
            matrix = draw_matrix(seed, "cuda")
            made = OnDevice(matrix)
            seen.add((made.window.flags & FLAG_ZERO, matrix.plain.shape[1] % 256 == 0))
            yield Trial(matrix, made, EACH, MOST_ROWS)

    count, wrong = failures(trials(), every)
    assert count == CASES
    assert len(seen) == 4, "both values of the flag, whole and cut chunks"
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:10])
