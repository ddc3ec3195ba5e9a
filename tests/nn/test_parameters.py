"""Packed weights as parameters: what the rest of PyTorch sees, and computes with."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
from support.models import assert_same_bits
from support.parameters import DTYPES, draw, packed
from support.small import IDS, Model, torch
from torch import nn
from torch.nn import functional

import tpde
from tpde.errors import PackedWeight
from tpde.nn import PackedParameter, pack_module, unpack_module

# ---- what is seen ----


@pytest.mark.usefixtures("no_decoding")
def test_properties_decode_nothing(weight: Any) -> None:
    plain, ours = nn.Parameter(weight), packed(weight)
    assert isinstance(ours, nn.Parameter)
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_leaf",
        "grad",
        "grad_fn",
        "is_cuda",
        "is_meta",
    ):
        assert getattr(ours, name) == getattr(plain, name), name
    for name in (
        "size",
        "stride",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
    ):
        assert getattr(ours, name)() == getattr(plain, name)(), name
    assert len(ours) == len(plain)
    assert ours.nbytes == plain.nbytes
    assert torch.is_floating_point(ours)
    assert ours.type() == plain.type()
    assert torch.empty_like(ours).shape == plain.shape
    assert ours.new_zeros(3).dtype == plain.dtype
    assert "packed=0." in repr(ours)
    assert ours.detach().packed is ours.packed
    assert ours.data.packed is ours.packed
    assert ours.contiguous() is ours
    assert ours.to(torch.bfloat16) is ours.to("cpu") is ours.cpu() is ours.bfloat16() is ours


@pytest.mark.usefixtures("no_decoding")
def test_a_model_says_of_itself_what_the_plain_one_says(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert sum(it.numel() for it in ours.parameters()) == sum(it.numel() for it in plain.parameters())
    assert {it.dtype for it in ours.parameters()} == {torch.bfloat16}
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert ours.embed.weight.dtype is torch.bfloat16
    assert ours.blocks[0].up.weight.shape == (192, 64)
    torch.optim.AdamW(ours.parameters()).zero_grad()


def test_one_fixed_parameter_does_not_keep_all_others_plain() -> None:
    """As the positions of some encoders, which are no parameters to be trained."""
    model = Model().to(torch.bfloat16)
    model.blocks[0].norm.requires_grad_(False)
    kinds = [type(it) for it in pack_module(model, min_bytes=0).parameters()]
    assert kinds.count(PackedParameter) == 7


# ---- what is computed ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_compute_from_a_decoded_copy(dtype: Any) -> None:
    weight = draw(96, 64, dtype=dtype)
    ours, x = packed(weight), draw(3, 64, dtype=dtype, seed=1)
    with torch.no_grad():
        for work in (
            lambda w: functional.linear(x, w),
            lambda w: x @ w.t(),
            lambda w: w[3:5] * 2,
            lambda w: torch.cat([w, w]),
            lambda w: torch.stack((w[0], w[1])),
            lambda w: w.float().sum(),
            lambda w: functional.embedding(torch.tensor([[1, 95]]), w),
            lambda w: w.clone(),
            lambda w: torch.einsum("ij,kj->ik", x, w),
        ):
            assert_same_bits(work(ours), work(weight))
    assert type(ours.clone()) is torch.Tensor
    assert ours.tolist() == weight.tolist()
    plain = torch.empty_like(weight)
    assert_same_bits(plain.copy_(ours), weight)


@torch.no_grad()
def test_weights_are_given_by_name_and_in_operators(weight: Any) -> None:
    ours, x = packed(weight), draw(3, 64, seed=1)
    for found, expected in (
        (functional.linear(input=x, weight=ours), functional.linear(x, weight)),
        (torch.mul(input=ours, other=ours), weight * weight),
        (torch.ops.aten.mul.Tensor(ours, ours), weight * weight),
        (torch.ops.aten.cat([ours, ours]), torch.cat([weight, weight])),
        (ours.to_sparse().to_dense(), weight),
    ):
        assert_same_bits(found, expected)
    with pytest.raises(PackedWeight, match="`w` is packed"):
        functional.embedding(torch.tensor([[1, 5]]), ours, max_norm=0.1)
    assert_same_bits(ours.plain(), weight)


def test_what_is_no_lookup_is_refused_as_of_the_plain_weight(weight: Any) -> None:
    layer = torch.nn.Embedding.from_pretrained(weight, freeze=False)
    ours = pack_module(copy.deepcopy(layer), min_bytes=0)
    with pytest.raises(PackedWeight, match="`weight` is packed, and `embedding"):
        functional.embedding(torch.tensor([[1, 5]]), ours.weight, max_norm=0.1)
    with pytest.raises(PackedWeight, match="`weight` is packed, and `embedding_bag"):
        functional.embedding_bag(torch.tensor([[1, 5]]), ours.weight, max_norm=0.1)
    ids = torch.tensor([1, 5])
    assert_same_bits(
        functional.embedding_bag(ids, ours.weight, ids[:1] - 1, mode="sum"),
        functional.embedding_bag(ids, layer.weight, ids[:1] - 1, mode="sum"),
    )
    for work in (
        lambda it: functional.embedding(ids, it.weight, padding_idx=len(weight)),
        lambda it: functional.embedding(ids, it.weight, padding_idx=-len(weight) - 1),
        lambda it: it([1, 5]),
        lambda it: it(None),
        lambda it: functional.embedding(None, it.weight),
    ):
        with pytest.raises((AssertionError, TypeError)) as expected:
            work(layer)
        with pytest.raises(expected.type) as found:
            work(ours)
        assert str(found.value) == str(expected.value)
    assert_same_bits(
        functional.embedding(ids, ours.weight, padding_idx=-1), functional.embedding(ids, layer.weight)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_are_chosen_as_for_the_plain_weight(dtype: Any, requires_grad: bool, bias: bool) -> None:
    """`at::matmul` asks whether the weight requires a gradient, and folds a strided input then."""
    torch.manual_seed(3)
    plain = nn.Linear(512, 384, bias=bias).to(dtype).requires_grad_(requires_grad)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    assert isinstance(ours.weight, PackedParameter)
    whole = draw(5, 7, 512, dtype=dtype, seed=4)
    inputs = [
        whole,
        whole[:, -1:, :],
        whole[:2, -1:, :],
        whole[:, ::2, :],
        whole.transpose(0, 1),
        whole[:, :, :].mT.mT,
    ]
    for x in inputs:
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found, expected = ours(x), plain(x)
                assert_same_bits(found, expected)
                assert found.requires_grad == expected.requires_grad
        with torch.inference_mode():
            assert_same_bits(ours(x), plain(x))


def test_weights_packed_in_inference_mode_are_ordinary() -> None:
    layer = torch.nn.Linear(64, 64).bfloat16()
    with torch.inference_mode():
        pack_module(layer, min_bytes=0)
    assert isinstance(layer.weight, PackedParameter)
    assert not layer.weight.is_inference()
    x = torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()


def test_the_default_model_is_one_whose_weights_say_that_they_are_trained(pair: tuple[Model, Model]) -> None:
    """No gradient of a packed weight is computed, all others are those of the plain model."""
    plain, ours = pair
    assert plain(IDS).requires_grad
    for model in pair:
        model(IDS).float().square().sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        if isinstance(parameter, PackedParameter):
            assert parameter.grad is None
            assert not parameter.requires_grad
            assert parameter.plain_requires_grad
        else:
            assert_same_bits(parameter.grad, expected[name].grad, name)


def test_freezing_is_noted(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    ours(IDS)
    for model in pair:
        model.requires_grad_(False)
    assert not ours(IDS).requires_grad
    assert_same_bits(ours(IDS), plain(IDS))
    unpack_module(ours)
    assert not any(it.requires_grad for it in ours.parameters())


# ---- in a forward pass ----


def test_frozen_in_a_forward_pass(pair: tuple[Model, Model]) -> None:
    plain, ours = pair

    def freeze(module: Any, *_: Any) -> None:
        module.weight.requires_grad_(False) if module in plain.modules() else module.requires_grad_(False)

    for model in pair:
        model.blocks[1].down.register_forward_pre_hook(freeze)
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
        assert_same_bits(ours(IDS), plain(IDS))


def test_other_values_for_a_moment(pair: tuple[Model, Model]) -> None:
    """`torch.func.functional_call` puts plain tensors into `_parameters`."""
    plain, ours = pair
    state = {name: it.detach() * 2 for name, it in plain.named_parameters()}
    del state["embed.weight"]  # tied to the head
    with torch.no_grad():
        expected = torch.func.functional_call(plain, state, (IDS,))
        assert_same_bits(torch.func.functional_call(ours, state, (IDS,)), expected)
        assert_same_bits(ours(IDS), plain(IDS))


def test_what_an_error_holds_is_not_told(pair: tuple[Model, Model], caplog: pytest.LogCaptureFixture) -> None:
    """Its traceback has the frames of the forward pass, which have weights."""
    _, ours = pair

    def fail(module: Any, *_: Any) -> None:
        held = module.weight
        raise LookupError(held.shape)

    ours.blocks[0].up.register_forward_hook(fail)
    with caplog.at_level(logging.WARNING, "tpde"), torch.no_grad(), pytest.raises(LookupError):
        ours(IDS)
    assert not caplog.records


@pytest.mark.parametrize("kind", ["itself", "a view of it"])
def test_hooks_may_keep_weights(
    kind: str, pair: tuple[Model, Model], caplog: pytest.LogCaptureFixture
) -> None:
    plain, ours = pair
    kept: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, *_: Any) -> None:
            kept[name] = module.weight if kind == "itself" else module.weight.detach().t()

        return hook

    hooks = []
    for i, block in enumerate(ours.blocks):
        for name in ("up", "down"):
            hooks.append(getattr(block, name).register_forward_hook(keep(f"blocks.{i}.{name}")))
    with caplog.at_level(logging.WARNING, "tpde"), torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
        assert_same_bits(ours(IDS), plain(IDS))
    assert sum("was kept after its forward pass" in it.message for it in caplog.records) == 1
    weights = dict(plain.named_parameters())
    assert len(kept) == 6
    for name, found in kept.items():
        expected = weights[f"{name}.weight"]
        assert_same_bits(found, expected.detach() if kind == "itself" else expected.detach().t())
    for hook in hooks:
        hook.remove()
    kept.clear()
    gc.collect()
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
        before = ours.head.tpde_group().workspace.made
        ours(IDS)
        assert ours.head.tpde_group().workspace.made == before


def test_a_weight_read_outside_makes_no_workspace(weight: Any) -> None:
    layer = nn.Linear(64, 96)
    tpde.pack_module(layer, min_bytes=0)
    del layer.__dict__["tpde_own_group"]
    assert layer.weight.shape == (96, 64)
    assert "tpde_own_group" not in layer.__dict__
