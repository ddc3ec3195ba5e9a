"""Models whose linear layers multiply straight from packed weights, on a CUDA device."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from support.gpu import needs_cuda, torch
from support.models import NAMES, make, outputs
from torch import nn
from torch.nn import functional

from tpde.cuda.product_ways import MOST_ROWS
from tpde.nn import PackedTensor, pack_module, packed_modules, set_kernels, unpack_module
from tpde.nn.kernels import MOST_SHARE
from tpde.weights.pack_tensor import pack_tensor
from tpde.weights.windowed import Windowed

pytestmark = [needs_cuda, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]

SHAPES = [(16, 8), (100, 384), (48, 1100), (513, 328), (2048, 2048)]


def layer(rows: int, columns: int, bias: bool = True) -> Any:
    torch.manual_seed(rows + columns)
    made = nn.Linear(columns, rows, bias=bias, device="cuda")
    with torch.no_grad():
        made.weight.normal_(0, 0.02)
    return made.bfloat16()


def fused(module: Any) -> Any:
    made = set_kernels(pack_module(copy.deepcopy(module), min_bytes=0), "fused")
    return made


def inputs(count: int, columns: int) -> Any:
    torch.manual_seed(count)
    return torch.randn(count, columns, device="cuda").bfloat16()


def bits(tensor: Any) -> Any:
    return tensor.detach().contiguous().view(torch.int16)


def of(source: Any) -> Any:
    return PackedTensor(source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_hold_the_weight(shape: tuple[int, int]) -> None:
    weight = layer(*shape).weight.detach()
    packed = pack_tensor(weight, "weight")
    if packed is None:
        pytest.skip("so small a weight does not shrink")
    made = Windowed.of(packed.sources[0], 2.0)
    assert made is not None
    assert torch.equal(bits(of(made).decoded()), bits(weight))
    ids = torch.randint(0, shape[0], (3, 7), device="cuda")
    for kind in (torch.int64, torch.int32):
        assert torch.equal(bits(of(made).rows(ids.to(kind))), bits(weight[ids]))
    for begin, end in ((0, 2), (shape[1] * 2, shape[0] * shape[1] * 2), (6, 2 * shape[1] + 4)):
        flat = weight.reshape(-1).view(torch.uint8)
        assert torch.equal(of(made).span(begin, end).decoded(), flat[begin:end])
    on_host = made.clone()
    on_host.apply(lambda blob: blob.cpu())
    assert torch.equal(bits(of(on_host).decoded()), bits(weight.cpu()))
    on_host.apply(lambda blob: blob.cuda())
    assert torch.equal(bits(of(on_host).decoded()), bits(weight))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], bias: bool) -> None:
    plain = layer(*shape, bias)
    made = fused(plain)
    assert made.weight.packed.multiplies
    x = inputs(MOST_ROWS, shape[1])
    with torch.no_grad():
        alone = torch.cat([made(row[None]) for row in x])
        needed = functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
        ours, theirs = ((it.double() - needed).norm() for it in (alone, plain(x)))
        assert ours <= 1.01 * theirs
        for count in (1, 3, 8, 15, 16, 17, 33, MOST_ROWS):
            assert torch.equal(bits(made(x[:count])), bits(alone[:count]))
            assert torch.equal(bits(made(x[-count:])), bits(alone[-count:]))
        assert torch.equal(bits(made(x.view(4, 16, -1))).view(MOST_ROWS, -1), bits(alone))
        wide = torch.stack([x, x], 2)[:, :, 1]  # strides of two
        assert torch.equal(bits(made(wide)), bits(alone))
        at_odd = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(x.shape)
        assert torch.equal(bits(made(at_odd)), bits(alone))
    assert torch.equal(bits(made(x.requires_grad_())), bits(alone))  # gradients change nothing


@pytest.mark.parametrize("count", [4, MOST_ROWS + 1, 300])
def test_gradients_are_the_plain_layers(count: int) -> None:
    plain = layer(513, 328)
    made = fused(plain)
    grads = []
    for it in (plain, made):
        x = inputs(count, 328).requires_grad_()
        it(x).float().sum().backward()
        grads.append(x.grad)
    assert torch.equal(bits(grads[0]), bits(grads[1]))


def test_many_rows_are_multiplied_as_plain_ones() -> None:
    plain = layer(2048, 2048)
    x = inputs(300, 2048)
    with torch.no_grad():
        assert torch.equal(bits(fused(plain)(x)), bits(plain(x)))


def test_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layer(513, 328)
    made = fused(plain)
    x = inputs(100, 328)
    monkeypatch.setattr(made.weight.packed.sources[0], "strip_bytes", 64 * 328 * 2)
    with torch.no_grad():
        found, needed = made(x), plain(x)
        assert (found.float() - needed.float()).abs().max() <= 2**-7 * needed.float().abs().max()


@pytest.mark.parametrize("name", [it for it in NAMES if it in ("llama", "qwen2", "mixtral", "gpt2")])
def test_models(name: str) -> None:
    """Weights are exact; logits are near; a sequence's are the same alone and in a batch."""
    plain = make(name, torch.bfloat16, "cuda")
    model = fused(plain)
    states = plain.state_dict()
    for key, it in model.state_dict().items():
        if hasattr(it, "packed"):
            assert torch.equal(bits(it.packed.decoded()), bits(states[key])), key
    with torch.no_grad():
        found, needed = outputs(name, model, 1, "cuda"), outputs(name, plain, 1, "cuda")
    for ours, theirs in zip(found, needed, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 0.05 * theirs.float().norm()
    unpack_module(model)
    for (key, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.detach().view(torch.uint8), theirs.detach().view(torch.uint8)), key


class Tied(nn.Module):
    """Layers between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.head = nn.Linear(512, 1000, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.05)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for it in self.layers:
            x = x + it(x)
        return self.head(x)


@pytest.fixture
def tied() -> Any:
    torch.manual_seed(0)
    return Tied().bfloat16().cuda()


def test_a_tied_head(tied: Any) -> None:
    model = fused(tied)
    assert model.head.weight.packed is model.embed.weight.packed
    assert model.head.weight.packed.multiplies
    ids = torch.randint(0, 1000, (2, 5), device="cuda")
    with torch.no_grad():
        assert torch.equal(bits(model.embed(ids)), bits(tied.embed(ids)))
        alone = model(ids[:1])
        assert torch.equal(bits(model(ids)[:1]), bits(alone))
    weights = {slot.packed for _, module in packed_modules(model) for slot in module.tpde_slots.values()}
    assert sum(it.packed_bytes for it in weights) < MOST_SHARE * sum(it.nbytes for it in tied.parameters())


def test_a_cuda_graph(tied: Any) -> None:
    model = fused(tied)
    ids, other = (torch.randint(0, 1000, (2, 5), device="cuda") for _ in range(2))
    with torch.no_grad():
        needed = model(other)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(ids)
        ids.copy_(other)
        for _ in range(3):
            graph.replay()
            assert torch.equal(bits(found), bits(needed))


def test_compiled(tied: Any) -> None:
    model = fused(tied)
    ids = torch.randint(0, 1000, (2, 5), device="cuda")
    with torch.no_grad():
        needed = model(ids)
        made = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            found = made(ids).clone()
        near = (found.float() - needed.float()).norm() <= 0.02 * needed.float().norm()
        assert near  # residual sums are fused otherwise


def test_pickled_windows_are_checked(tied: Any) -> None:
    model = fused(tied)
    ids = torch.randint(0, 1000, (2, 5), device="cuda")
    with torch.no_grad():
        needed = model(ids)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["head.weight"].packed.multiplies
    again = fused(tied)
    with torch.no_grad():
        for parameter in again.layers:
            assert parameter.weight.packed.multiplies
        again.load_state_dict(state)
        assert torch.equal(bits(again(ids)), bits(needed))


def test_autocast(tied: Any) -> None:
    made = fused(tied.layers[0])
    x = inputs(3, 512).float()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(bits(made(x)), bits(made(x.bfloat16())))
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        assert torch.equal(made(x), tied.layers[0](x))


def test_two_streams(tied: Any) -> None:
    model = fused(tied)
    ids = torch.randint(0, 1000, (2, 5), device="cuda")
    with torch.no_grad():
        needed = model(ids)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        found = []
        for stream in streams * 5:
            with torch.cuda.stream(stream):
                found.append(model(ids))
        torch.cuda.synchronize()
    assert all(torch.equal(bits(it), bits(needed)) for it in found)
