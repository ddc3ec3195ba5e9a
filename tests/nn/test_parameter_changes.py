"""Nothing changes a packed weight: not in place, by assignment, by a cast, nor in a piece of it."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.models import assert_same_bits
from support.parameters import draw, packed
from support.small import IDS, Model, torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils import parametrize

from tpde.errors import PackedWeight
from tpde.nn import PackedParameter, unpack_module
from tpde.weights.readonly import ReadOnly, guarded


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(1),
        lambda w: w.data.add_(1),
        lambda w: w.data.__iadd__(1),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.data.__setitem__(0, 1.0),
        lambda w: w[0].fill_(0),
        lambda w: w.t().zero_(),
        lambda w: w.as_subclass(torch.Tensor).add_(1),
        lambda w: w.view(-1)[3:5].mul_(2),
        nn.init.normal_,
        lambda w: setattr(w, "data", torch.zeros_like(w.detach().clone())),
        lambda w: torch.add(w.detach().clone(), 1, out=w),
        lambda w: torch.add(w.detach().clone(), 1, out=w[:]),
        lambda w: w.copy_(torch.zeros(96, 64)),
        lambda w: torch._foreach_add_([w], 1),
        lambda w: torch._foreach_copy_([w], [torch.zeros(96, 64)]),
        lambda w: torch.ops.aten.add_.Scalar(w, 1),
        torch.ops.aten.zero_,
        lambda w: functional.dropout(w, inplace=True),
        lambda w: torch.nn.utils.vector_to_parameters(torch.zeros(96 * 64), [w]),
        lambda w: w.requires_grad_(True),
        lambda w: setattr(w, "requires_grad", True),
        lambda w: PackedParameter(torch.zeros(3)),
    ],
)
@torch.no_grad()
def test_changes_are_refused_by_name(change: Any, weight: Any) -> None:
    ours = packed(weight)
    with pytest.raises(PackedWeight, match=r"packed.*unpack_module") as caught:
        change(ours)
    assert "`w`" in str(caught.value) or "not a Tensor" in str(caught.value)
    assert_same_bits(ours.clone(), weight)


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.add_(1),
        lambda w: nn.init.normal_(tensor=w),
        *(
            lambda w, change=change: change(w, 2)
            for change in (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv)
        ),
        *(lambda w, change=change: change(w, 2) for change in (operator.ipow, operator.imod, operator.iand)),
        lambda w: operator.setitem(w, 0, 1.0),
        lambda w: torch.add(torch.ones(96, 64), 1, out=w),
        lambda w: torch.mm(torch.ones(96, 8), torch.ones(8, 64), out=w),
    ],
)
def test_what_says_that_it_changes_a_weight_is_refused_before_it_is_decoded(
    change: Any, trained: bool, gradients: bool, weight: Any
) -> None:
    """PyTorch would refuse some of it later, in words of its own."""
    ours = packed(weight, trained)
    with torch.set_grad_enabled(gradients), pytest.raises(PackedWeight, match=r"`w` is packed.*`\w+` would"):
        change(ours)


@torch.no_grad()
def test_code_that_asks_no_functions_gets_values_and_changes_none(weight: Any) -> None:
    """As PyTorch's own in C++."""
    ours, plain = packed(weight), torch.zeros_like(weight)
    aten = torch.ops.aten
    with torch._C.DisableTorchFunctionSubclass():
        assert_same_bits(aten.mul.Tensor(ours, ours), weight * weight)
        assert_same_bits(aten.cat.default([ours, ours]), torch.cat([weight, weight]))
        assert_same_bits(aten.copy_.default(plain, ours), weight)
        aten.copy_.default(ours, weight)
        for change in (
            lambda: aten.copy_.default(ours, weight * 2),
            lambda: aten.mul_.Tensor(ours, 2),
            lambda: aten.mm.out(draw(96, 8), draw(8, 64), out=ours),
            lambda: aten._foreach_add_.Scalar([plain, ours], 1),
        ):
            with pytest.raises(PackedWeight, match="`w` is packed"):
                change()
        with pytest.raises(PackedWeight, match="would give others the memory"):
            aten.set_.source_Tensor(plain, ours)
    assert_same_bits(ours.plain(), weight)


def test_only_its_own_data_is_given_to_it(weight: Any) -> None:
    ours, other = packed(weight), packed(weight)
    ours.data = ours
    ours.data = ours.detach()
    for value in (other, other.data, weight):
        with pytest.raises(PackedWeight, match="`data =` would"):
            ours.data = value
    piece = ours.detach()[0]
    with pytest.raises(PackedWeight, match="`data =` would"):
        piece.data = torch.zeros(64)


@pytest.mark.parametrize("turned", [False, True])
def test_swapping_is_refused(turned: bool, pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    one, other = ours.blocks[0].up.weight, ours.blocks[1].up.weight
    for it in (nn.Parameter(torch.zeros(192, 64)), other):
        with pytest.raises(PackedWeight, match=r"`blocks\..*swapped"):
            torch.utils.swap_tensors(*((it, one) if turned else (one, it)))
    assert type(one) is type(other) is PackedParameter
    assert_same_bits(ours(IDS), plain(IDS))


def test_assigning_and_removing(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.up\.weight`.*cannot be replaced"):
        layer.weight = nn.Parameter(torch.zeros(192, 64))
    for value in (nn.Parameter(torch.zeros(192, 64)), None, ours.blocks[1].up.weight):
        with pytest.raises(PackedWeight, match=r"`blocks\.0\.up\.weight`.*cannot be replaced"):
            layer.register_parameter("weight", value)
    layer.register_parameter("weight", layer.weight)
    with pytest.raises(PackedWeight, match="cannot be removed"):
        del layer.weight
    with pytest.raises(PackedWeight):
        parametrize.register_parametrization(layer, "weight", nn.Identity())
    ours.head.weight = ours.embed.weight  # tying what is tied
    assert_same_bits(ours(IDS), plain(IDS))


def test_a_cast_is_done_to_all_or_nothing(pair: tuple[Model, Model]) -> None:
    _, ours = pair
    outer = nn.ModuleDict({"model": ours})
    for model in (ours, outer):
        for cast in (model.half, model.float, lambda model=model: model.to(torch.float64)):
            with pytest.raises(PackedWeight, match="cannot be cast"):
                cast()
            assert {it.dtype for it in ours.parameters()} == {torch.bfloat16}
    with pytest.raises(PackedWeight, match="would lose its bytes"):
        ours.to_empty(device="cpu")
    for model in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with pytest.raises(PackedWeight, match="cannot be cast"):
            model.half()
        assert {it.dtype for it in model.parameters()} == {torch.bfloat16}
    unpack_module(ours).half()
    assert {it.dtype for it in ours.parameters()} == {torch.float16}


def test_programs_without_weights_are_refused(pair: tuple[Model, Model]) -> None:
    _, ours = pair
    with pytest.raises(PackedWeight, match=r"torch\.export"):
        torch.export.export(ours, (IDS,), strict=False)
    with pytest.raises(PackedWeight, match=r"torch\.jit\.trace"):
        torch.jit.trace(ours.blocks[0], (draw(2, 64),))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(PackedWeight, match=r"torch\.jit\.trace"):
            torch.jit.trace(ours.embed, (IDS,))


def test_memory_that_no_function_of_python_asks_for(weight: Any) -> None:
    """It was at address 0, and the first element a crash."""
    for it in (packed(weight), packed(weight).detach(), packed(weight).data):
        for capsule in (torch.utils.dlpack.to_dlpack, torch._C._to_dlpack):
            with pytest.raises(RuntimeError, match="data pointer"):
                capsule(it)


def test_what_fx_traces_is_refused(pair: tuple[Model, Model]) -> None:
    """It would hold views of the memory that each layer decodes to."""
    _, ours = pair
    for module, given in ((ours.blocks[0].up, draw(2, 64)), (ours.embed, IDS)):
        for trace in (
            lambda module=module: torch.fx.symbolic_trace(nn.Sequential(module)),
            lambda module=module, given=given: make_fx(module)(given),
            lambda module=module, given=given: make_fx(module, tracing_mode="symbolic")(given),
        ):
            with pytest.raises(PackedWeight, match=r"constants of what a tracer makes"):
                trace()
    with pytest.raises(PackedWeight, match=r"torch\.func\.linearize"):
        torch.func.linearize(ours.blocks[0], draw(2, 64))


# ---- pieces ----


@torch.no_grad()
def test_what_is_done_to_pieces_by_name_is_refused(weight: Any) -> None:
    piece = packed(weight)[3:5]
    for change in (
        lambda: torch.narrow(input=piece, dim=0, start=0, length=1).zero_(),
        lambda: torch.relu_(input=piece),
        lambda: torch.add(torch.ones(2, 64), 1, out=piece),
        torch.unbind(piece)[1].zero_,
        torch.split(piece, 1)[0].zero_,
        lambda: operator.ixor(piece.view(torch.int16), 1),
        lambda: operator.ilshift(piece.view(torch.int16), 1),
        lambda: operator.irshift(piece.view(torch.int16), 1),
        lambda: operator.ior(piece.view(torch.int16), 1),
        lambda: operator.ipow(piece, 2),
        lambda: setattr(piece, "data", torch.zeros(2, 64)),
    ):
        with pytest.raises(PackedWeight, match="`w` is packed"):
            change()
    assert_same_bits(piece.clone(), weight[3:5])


def test_what_changes_no_values_of_a_piece_is_allowed(weight: Any) -> None:
    piece = packed(weight, requires_grad=False).detach()[3:5]
    assert piece.requires_grad_(False) is not None
    with pytest.raises(RuntimeError, match="Can't detach views"):  # as of a plain one
        piece.detach_()
    piece.grad = None
    piece.requires_grad = False
    assert_same_bits(piece.clone(), weight[3:5])
    assert type(piece[:0]) is torch.Tensor
    assert type(piece * 1) is torch.Tensor
    assert type(piece.clone()) is torch.Tensor
    assert piece.to_sparse().layout is torch.sparse_coo
    assert piece.to("meta").is_meta


def test_pieces_are_copied_and_saved_as_ordinary_tensors(weight: Any) -> None:
    ours = packed(weight)
    with torch.no_grad():
        piece = ours[3:5]
    for made in (copy.deepcopy(piece), pickle.loads(pickle.dumps(piece))):
        assert type(made) is torch.Tensor
        assert_same_bits(made, weight[3:5])
        made.zero_()
    assert_same_bits(ours.clone(), weight)


@torch.no_grad()
def test_pieces_are_printed_as_ordinary_tensors(weight: Any) -> None:
    for ours in (packed(weight), packed(weight).detach(), packed(weight).data):
        assert f"{ours[0, 0]:.3f} {ours[0, 0]}" == f"{weight[0, 0]:.3f} {weight[0, 0]}"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{ours[1]:.3f}"


def test_results_keep_their_kinds(weight: Any) -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    view, other = weight[0], draw(3)
    memory = {weight.untyped_storage().data_ptr(): "w"}
    made = guarded(Pair(view, [other, (view,)]), memory)
    assert isinstance(made, Pair)
    assert type(made.first) is ReadOnly
    assert type(made.second) is list
    assert type(made.second[0]) is torch.Tensor
    assert type(made.second[1]) is tuple
    assert type(made.second[1][0]) is ReadOnly
    best = guarded(torch.max(weight, 0), memory)
    assert type(best) is torch.return_types.max
    assert type(best.values) is torch.Tensor
    assert guarded({"a": 1}, memory) == {"a": 1}
    own = np.zeros(3)
    assert guarded(own, memory).flags.writeable
    assert not guarded(own[:2], memory).flags.writeable
