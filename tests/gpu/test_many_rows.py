"""Products of many rows of x in one launch, on Hopper GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.gpu import needs_cuda, torch
from support.tiles import KINDS, share_out

from tpde.cuda.backend import current
from tpde.cuda.many_rows import MOST, beats_decoding, many_way, room_of
from tpde.cuda.window_products import DeviceWindow
from tpde.nn import pack_module, set_kernels
from tpde.weights import windowing

pytestmark = needs_cuda

SHAPES = [(4000, 2240), (513, 14336), (2049, 4161), (128, 2048)]


@pytest.fixture(autouse=True)
def of_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs decode matrices for so many rows")


def bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().view(torch.int16)


class Held:
    """A matrix, its blob and a bias on the device."""

    def __init__(self, rows: int, columns: int, content: str) -> None:
        torch.manual_seed(rows + columns)
        made = torch.randn(rows, columns, device="cuda") * 0.02
        if content == "halved":
            made *= torch.rand_like(made) < 0.5
        elif content == "escapes":
            made = torch.exp(10 * torch.randn_like(made)).clamp(1e-20, 1e20)
        self.plain, self.bias = made.bfloat16(), torch.randn(rows, device="cuda").bfloat16()
        encoded = windowing.encode(self.plain)
        assert encoded is not None
        self._blob, self._window = encoded
        self.device = DeviceWindow(self._window, self._blob.data_ptr(), 0)

    def product(
        self, x: Any, stride: int = 0, offset: int = 0, bias: Any = None, checked: bool = True
    ) -> Any:
        """In one launch, whatever is faster. Nothing else of y is written, in rows so far apart."""
        rows, columns = self.plain.shape
        taken = torch.nn.functional.pad(x, (0, -columns % 8))
        stride = stride or rows
        room = torch.empty(
            room_of(current().facts(0), self._window, len(x)), dtype=torch.uint8, device="cuda"
        )
        y = torch.full((offset + (len(x) + 1) * stride,), 7, dtype=torch.bfloat16, device="cuda")
        self.device.choose(len(x), many_way(current().facts(0), self._window, len(x)))
        self.device.product(
            taken.data_ptr(),
            taken.stride(0),
            len(x),
            y.data_ptr() + 2 * offset,
            stride,
            0 if bias is None else bias.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
            room.data_ptr(),
        )
        found = y[offset:].view(-1, stride)
        if not checked:
            return found[:-1, :rows]
        assert (y[:offset] == 7).all()
        assert (found[-1] == 7).all()
        assert (found[:, rows:] == 7).all()
        return found[:-1, :rows]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("runs", [1, 2, 3, 8])
@pytest.mark.parametrize("content", ["weights", "halved", "escapes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rows_bits_depend_on_no_other_row(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], content: str, runs: int, kind: tuple[int, int]
) -> None:
    """Nor on whether all blocks have room at a time: with three runs of many tiles they have not."""
    share_out(monkeypatch, runs, kind)
    held = Held(*shape, content)
    x = torch.randn(1000, shape[1], device="cuda").bfloat16()
    for bias in (None, held.bias):
        whole = held.product(x, bias=bias)
        for count in (1, 129, 256, 257, 520):
            assert torch.equal(bits(held.product(x[:count], bias=bias)), bits(whole[:count])), count
            assert torch.equal(bits(held.product(x[-count:], bias=bias)), bits(whole[-count:])), count
        wide = -(-shape[0] // 8) * 8 + 8
        for stride, offset in ((wide, 0), (wide, 8), (wide, 1), (wide + 3, 0)):
            assert torch.equal(bits(held.product(x[:300], stride, offset, bias)), bits(whole[:300])), stride
        share_out(monkeypatch, runs)  # the same sums
        assert torch.equal(bits(held.product(x[:128], bias=bias)), bits(whole[:128]))


def test_runs_on_two_streams_at_a_time() -> None:
    """Blocks that wait for others of their product let those of another one go on."""
    held = [Held(4096, 8192, "weights") for _ in range(2)]
    x = torch.randn(256, 8192, device="cuda").bfloat16()
    needed = [bits(it.product(x)) for it in held]
    streams = [torch.cuda.Stream() for _ in held]
    others = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in held]
    torch.cuda.synchronize()
    for _ in range(100):
        for it, stream, one, mine in zip(held, streams, needed, others, strict=True):
            with torch.cuda.stream(stream):
                mine.add_((bits(it.product(x, checked=False)) != one).any())
    torch.cuda.synchronize()
    assert [int(it) for it in others] == [0, 0]


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("count", [65, 128, 400])
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 4096), (4096, 14336), (28672, 4096)], ids=str)
def test_the_error_is_the_matrix_librarys(shape: tuple[int, int], count: int, tails: str) -> None:
    held, x = Held(*shape, "weights"), torch.randn(count, shape[1], device="cuda")
    x = (x**5 if tails == "heavy" else x).bfloat16()
    needed = x.double() @ held.plain.double().T
    ours, theirs = (
        float((it.double() - needed).norm())
        for it in (held.product(x), torch.nn.functional.linear(x, held.plain))
    )
    assert ours <= 1.01 * theirs


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("runs", [1, 2, 5])
@pytest.mark.parametrize("shape", [(4000, 2240), (513, 14336)], ids=str)
def test_products_have_the_same_bits_every_time(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], runs: int, kind: tuple[int, int]
) -> None:
    share_out(monkeypatch, runs, kind)
    held = Held(*shape, "halved")
    x = torch.randn(300, shape[1], device="cuda").bfloat16()
    needed, others = bits(held.product(x)), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        others += (bits(held.product(x)) != needed).any()
    assert not int(others)


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 4096), (3072, 2048)], ids=str)
def test_layers_take_what_is_faster(shape: tuple[int, int]) -> None:
    """Any number of rows: the same in a graph, and as those of a product of its own in float64."""
    layer = torch.nn.Linear(shape[1], shape[0], device="cuda")
    with torch.no_grad():
        layer.weight.normal_(0, 0.02)
    layer = layer.bfloat16()
    made = set_kernels(pack_module(copy.deepcopy(layer), min_bytes=0), "fused")
    window, have = made.weight.packed.sources[0].window, current().facts(0)
    hows = set()
    for count in (65, 100, 128, 129, 200, 256, 300, 1000, MOST, MOST + 1):
        x = torch.randn(2, count, shape[1], device="cuda").bfloat16()[1:]
        with torch.no_grad():
            found, plain = made(x), layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = made(x)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(found), bits(again))
        decoded = not beats_decoding(have, window, count)
        hows.add(decoded)
        if decoded:
            assert torch.equal(bits(found), bits(plain))
        needed = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()).detach()
        ours, theirs = (float((it.double() - needed).norm()) for it in (found, plain))
        assert ours <= 1.01 * theirs, count
        x.requires_grad_()
        made(x).sum().backward()
        mine, x.grad = x.grad, None
        layer(x).sum().backward()
        assert torch.equal(bits(mine), bits(x.grad))
    assert hows == {True, False}
