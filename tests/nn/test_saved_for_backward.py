"""What autograd keeps of decoded weights for the backward pass, in pieces, and of what others save."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, X, torch
from support.workspaces import made

from tpde.nn import pack_module, set_kernels


def test_sparse_tensors_are_kept_for_the_backward_pass() -> None:
    class Sparse(Block):
        def forward(self, x: Any) -> Any:
            return torch.sparse.mm(torch.eye(14).to_sparse(), super().forward(x).reshape(14, 64))

    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Sparse(64)])
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(14, 64)
    for model in (plain, ours):
        model[0](x).square().sum().backward()
    assert_same_bits(ours[0].up.bias.grad, plain[0].up.bias.grad)


class Reads(Block):
    """Does something with a piece of its weight for which autograd keeps it."""

    work: Any = None

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.work(x, self.down.weight)


@pytest.mark.parametrize(
    "work",
    [
        lambda x, w: x * w[:, 3],
        lambda x, w: x * w[-1:, -64:],
        lambda x, w: x @ w[:, ::3],
        lambda x, w: x @ w.t()[128:].contiguous(),
        lambda x, w: x * w.view(-1)[-64:],
        lambda x, w: x * w.view(torch.int32).view(torch.bfloat16)[:, 64:128].sum(0).view(64)[0],
        lambda x, w: x @ w.float()[:, :64].bfloat16(),
        lambda x, w: x * w[5:5].sum(),
    ],
)
def test_pieces_of_weights_are_kept_for_the_backward_pass(work: Any) -> None:
    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Reads(64)]).to(torch.bfloat16)
    plain[0].down.weight.requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    grads = []
    for model in (plain, ours):
        model[0].work = work
        x = X.clone().requires_grad_()
        model[0](x).float().square().sum().backward()
        grads += [x.grad, model[0].up.bias.grad]
    assert_same_bits(grads[2:], grads[:2])


def test_hooks_of_others_save_what_is_not_in_the_workspace() -> None:
    plain, ours = made()
    packed, unpacked = list[Any](), list[Any]()

    def pack(tensor: Any) -> Any:
        packed.append(tensor.shape)
        return tensor.clone()

    def unpack(tensor: Any) -> Any:
        unpacked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = ours(IDS)
    assert packed
    found.float().square().sum().backward()
    assert len(unpacked) == len(packed)
    plain(IDS).float().square().sum().backward()
    assert_same_bits(ours.blocks[0].norm.weight.grad, plain.blocks[0].norm.weight.grad)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None


class Positions(Block):
    """Learnt ones, whose embedding is multiplied as a whole."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.positions = torch.nn.Embedding(300, width)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + Multiply.apply(x, self.positions.weight)[..., :64]


@pytest.mark.parametrize("kernels", ["exact", "fused"])
def test_packed_weights_that_others_save(kernels: str) -> None:
    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Positions(64)]).to(torch.bfloat16)
    plain[0].positions.weight.requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    set_kernels(ours, kernels)
    grads = []
    for model in (plain, ours):
        x = X.clone().requires_grad_()
        model[0](x).float().square().sum().backward()
        grads.append(x.grad)
    if kernels == "exact":
        assert_same_bits(grads[1], grads[0])
    assert torch.allclose(*grads, rtol=0.05)


def test_packed_weights_that_others_save_and_that_are_updated_since() -> None:
    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Positions(64)]).to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    out = ours[0](X.clone().requires_grad_()).sum()
    ours[0].positions.weight.packed.updates += 1
    with pytest.raises(RuntimeError, match=r"`0\.positions\.weight`, a packed weight .* was updated since"):
        out.backward()
