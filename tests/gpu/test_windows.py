"""Matrices in the window layout on the GPU: exact rows; products whose rows are the same in every batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.contents import rng
from support.gpu import needs_cuda, torch

from tpde.codec import window_plan, windows
from tpde.cuda.product_ways import MOST_ROWS
from tpde.cuda.window_products import DeviceWindow

pytestmark = needs_cuda

SHAPES = [
    (1, 1),
    (17, 5),
    (33, 70),
    (100, 384),
    (48, 1100),
    (64, 2048),
    (77, 2600),
    (130, 4160),
    (4000, 2240),
    (513, 14336),
]
CONTENTS = ["weights", "halved", "zeros", "words", "tiny", "escapes", "constant", "infinite"]


def matrix(rows: int, columns: int, content: str) -> Any:
    """bf16 words as uint16."""
    draw = rng("window", rows, columns, content)
    values = draw.standard_normal((rows, columns)) * 0.02 * np.exp(0.3 * draw.standard_normal((rows, 1)))
    if content == "halved":
        values *= draw.random((rows, columns)) < 0.5
    elif content == "zeros":
        values[:] = 0
    elif content == "tiny":
        values *= 1e-37
    elif content == "escapes":
        values = np.exp(40 * draw.standard_normal((rows, columns)))
    elif content == "constant":
        values[:] = -0.7
    elif content == "infinite":
        values[:, ::3], values[::2, :] = np.inf, np.nan
    if content == "words":
        return draw.integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
    with np.errstate(over="ignore"):
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Held:
    """A matrix, and its blob on the device."""

    def __init__(self, words: Any) -> None:
        self.words, (self.rows, self.columns) = words, words.shape
        blob = window_plan.encode(words)
        self.blob = torch.from_numpy(blob).cuda()
        self.device = DeviceWindow(windows.validate(blob), self.blob.data_ptr(), torch.cuda.current_device())
        self.plain = torch.from_numpy(words.view(np.int16)).cuda().view(torch.bfloat16)

    def decoded(self, stride: int = 0, offset: int = 0) -> Any:
        """The words as the kernel gives them, in rows so far apart; what lies between stays as it was."""
        stride = stride or self.columns
        room = torch.full((offset + self.rows * stride + 8,), 0x55, dtype=torch.int16, device="cuda")
        out = room[offset:]
        self.device.rows(out.data_ptr(), stride, torch.cuda.current_stream().cuda_stream)
        found = room.cpu().numpy().view(np.uint16)
        within = np.zeros(found.size, bool)
        within[offset : offset + self.rows * stride].reshape(self.rows, stride)[:, : self.columns] = True
        assert (found[~within] == 0x55).all()
        return found[within].reshape(self.rows, self.columns)

    def product(self, x: Any, bias: Any = None) -> Any:
        """The kernel's, with rows of x padded to a multiple of 8."""
        taken = torch.nn.functional.pad(x, (0, -self.columns % 8))
        y = torch.full((len(x) + 1, self.rows), 7, dtype=torch.bfloat16, device="cuda")
        room = torch.empty(self.device.room(len(x)), dtype=torch.uint8, device="cuda")
        self.device.product(
            taken.data_ptr(),
            taken.stride(0),
            len(x),
            y.data_ptr(),
            self.rows,
            0 if bias is None else bias.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
            room.data_ptr(),
        )
        assert (y[len(x) :] == 7).all()
        return y[: len(x)]


def of_batch(held: Held, count: int, scale: float = 1.0) -> Any:
    torch.manual_seed(held.rows + count)
    return (torch.randn(count, held.columns, device="cuda") * scale).to(torch.bfloat16)


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_exact(shape: tuple[int, int], content: str) -> None:
    held = Held(matrix(*shape, content))
    for stride, offset in ((0, 0), (0, 1), (shape[1] + 3, 2), (-(-shape[1] // 8) * 8 + 8, 8)):
        assert np.array_equal(held.decoded(stride, offset), held.words), (stride, offset)


@pytest.mark.parametrize("content", ["weights", "halved", "escapes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], content: str) -> None:
    held = Held(matrix(*shape, content))
    x, bias = of_batch(held, MOST_ROWS, 1e-3), of_batch(Held(matrix(1, shape[0], "weights")), 1)[0]
    for added in (None, bias):
        alone = torch.cat([held.product(row[None], added) for row in x])
        for count in (1, 2, 7, 8, 9, 15, 16, 17, 32, 33, MOST_ROWS):
            for how in held.device.ways(count):
                held.device.choose(count, how)
                for first in (0, MOST_ROWS - count):
                    found = held.product(x[first : first + count], added)
                    assert torch.equal(bits(found), bits(alone[first : first + count])), how
        assert torch.equal(bits(held.product(x, added)), bits(alone))  # again


@pytest.mark.parametrize("content", ["weights", "halved"])
@pytest.mark.parametrize("shape", [(4000, 2240), (513, 14336)], ids=str)
def test_products_have_the_same_bits_every_time(shape: tuple[int, int], content: str) -> None:
    """Copies to shared memory that overtook reads of it spoilt one product of 100 to 2,300."""
    held = Held(matrix(*shape, content))
    x = of_batch(held, MOST_ROWS, 1e-3)
    alone = bits(torch.cat([held.product(row[None]) for row in x]))
    for count in (8, 16, 32, MOST_ROWS):
        for how in held.device.ways(count):
            held.device.choose(count, how)
            others = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(1000):
                others += (bits(held.product(x[:count])) != alone[:count]).any()
            assert not int(others), how.label


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("shape", [(100, 384), (300, 768), (64, 2048), (4096, 4096), (513, 14336)], ids=str)
def test_the_error_is_the_matrix_librarys(shape: tuple[int, int], tails: str) -> None:
    held = Held(matrix(*shape, "weights"))
    x = of_batch(held, 8)
    if tails == "heavy":
        x = (x.double() ** 5).to(torch.bfloat16)
    needed = x.double() @ held.plain.double().T

    def error(found: Any) -> float:
        return float((found.double() - needed).norm() / needed.norm())

    assert error(held.product(x)) <= 1.01 * error(torch.nn.functional.linear(x, held.plain))


def test_what_is_no_number_reaches_the_rows_that_have_it_alone() -> None:
    words = matrix(64, 512, "weights")
    words[3, 100], words[20, 511], words[40, 0] = 0x7FC1, 0x7F80, 0xFF80
    found = Held(words).product(torch.ones(3, 512, dtype=torch.bfloat16, device="cuda")).float()
    assert found[:, 3].isnan().all()
    assert (found[:, 20] == np.inf).all()
    assert (found[:, 40] == -np.inf).all()
    assert int(found.isfinite().sum()) == 3 * 61


def test_results_that_no_bf16_holds_are_infinite() -> None:
    words = np.full((16, 256), 0x7F00, np.uint16)
    x = torch.full((1, 256), 1e9, dtype=torch.bfloat16, device="cuda")
    assert (Held(words).product(x) == np.inf).all()


@pytest.mark.parametrize(
    ("size", "count"), [(256, 4), (4096, 16), (4096, 64), (4096, 128), (6400, 64), (6400, 128)]
)
def test_products_wait_for_each_other(size: int, count: int) -> None:
    """Each takes what the one before gave, and all start early."""
    held = [Held(matrix(size, size, "weights")) for _ in range(2)]
    x, scale = of_batch(held[0], count), 48 / size**0.5
    start = x
    found = []
    for turn in range(50):
        x = held[turn % 2].product(x) * scale
        found.append(x)
    y = start
    for turn, it in enumerate(found):
        y = held[turn % 2].product(y) * scale
        torch.cuda.synchronize()
        assert torch.equal(bits(y), bits(it))


def test_graphs_replay_products() -> None:
    held = Held(matrix(512, 1024, "weights"))
    x = of_batch(held, 2)
    y = torch.zeros(2, 512, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        held.device.product(x.data_ptr(), 1024, 2, y.data_ptr(), 512, 0, stream)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    x.copy_(of_batch(held, 3)[:2])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(y), bits(held.product(x)))


def test_what_cannot_be_launched_is_refused() -> None:
    held = Held(matrix(64, 256, "weights"))
    room = held.plain.data_ptr()
    for x, stride, count in ((room + 2, 256, 1), (room, 252, 1), (room, 256, 0), (room, 256, -1)):
        with pytest.raises(ValueError):
            held.device.product(x, stride, count, room, 256, 0, 0)
    with pytest.raises(ValueError, match="multiple of 128"):
        DeviceWindow(held.device.window, held.blob.data_ptr() + 16, 0)
