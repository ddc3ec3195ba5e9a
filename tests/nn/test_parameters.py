"""Packed weights as parameters: what the rest of PyTorch sees, computes with, and may not do."""

from __future__ import annotations

import copy
import gc
import io
import logging
import multiprocessing
import operator
import pickle
from typing import Any

import numpy as np
import pytest
from support.models import assert_same_bits
from support.small import IDS, Model, torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import tpde
from tpde.errors import Corrupt, InvalidInput, PackedWeight
from tpde.nn import PackedParameter, PackedTensor, Resident, pack_module, pack_tensor, unpack_module
from tpde.weights.parameter import rebuild_parameter
from tpde.weights.source import Source
from tpde.weights.tensor import rebuild_tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def draw(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def packed(weight: Any, requires_grad: bool = True) -> PackedParameter:
    made = pack_tensor(weight, "w")
    assert made is not None
    return PackedParameter(made, requires_grad)


@pytest.fixture
def weight() -> Any:
    return draw(96, 64)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Source, "decode_on_host", refuse)


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


def test_frozen_in_a_forward_pass(pair: tuple[Model, Model]) -> None:
    plain, ours = pair

    def freeze(module: Any, *_: Any) -> None:
        module.weight.requires_grad_(False) if module in plain.modules() else module.requires_grad_(False)

    for model in pair:
        model.blocks[1].down.register_forward_pre_hook(freeze)
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
        assert_same_bits(ours(IDS), plain(IDS))


# ---- what is refused ----


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


def test_what_reads_memory_is_refused(weight: Any) -> None:
    ours, other = packed(weight), packed(weight)
    address = ours.data_ptr()
    assert address == ours.detach().data_ptr()
    assert address != other.data_ptr()
    assert {address: 1}[ours.data_ptr()] == 1
    for read in (lambda: address == 0, lambda: address + 1, lambda: int(address), lambda: bool(address)):
        with pytest.raises(PackedWeight, match="`w` is packed, and has no plain bytes"):
            read()
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    with pytest.raises(PackedWeight, match=r"tpde\.torch\.save_file"):
        safetensors.save({"w": ours})
    storage = ours.untyped_storage()
    assert storage.nbytes() < weight.nbytes
    assert (
        storage.data_ptr() == ours.detach().untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    )
    for look in (bytes, list, lambda it: it[0], lambda it: it.tolist(), lambda it: it.clone()):
        with pytest.raises(PackedWeight, match="`w` is packed, and has no plain bytes"):
            look(storage)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize(
    "share",
    [
        torch.from_dlpack,
        np.from_dlpack,
        lambda w: w.storage(),
        lambda w: w._typed_storage(),
        lambda w: torch.empty(0).set_(w),
    ],
)
def test_memory_of_a_copy_is_given_to_nobody(share: Any) -> None:
    ours = packed(draw(96, 64, dtype=torch.float32), requires_grad=False)
    with pytest.raises(PackedWeight, match=r"`w` is packed, and `.*` would give .*detach\(\)\.clone"):
        share(ours)
    share(ours.detach().clone())


@pytest.mark.parametrize("turned", [False, True])
def test_swapping_is_refused(turned: bool, pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    one, other = ours.blocks[0].up.weight, ours.blocks[1].up.weight
    for it in (nn.Parameter(torch.zeros(192, 64)), other):
        with pytest.raises(PackedWeight, match=r"`blocks\..*swapped"):
            torch.utils.swap_tensors(*((it, one) if turned else (one, it)))
    assert type(one) is type(other) is PackedParameter
    assert_same_bits(ours(IDS), plain(IDS))


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_blobs_are_where_kernels_read_them(shift: int, weight: Any) -> None:
    blob = packed(weight).packed.sources[0].blob
    room = torch.empty(blob.numel() + 32, dtype=torch.uint8)
    at = -room.data_ptr() % 16 + shift
    given = room[at : at + blob.numel()].copy_(blob)
    source = Resident(given, "w")
    assert source.blob.data_ptr() % 16 == 0
    assert (source.blob.data_ptr() == given.data_ptr()) == (not shift)
    assert_same_bits(PackedTensor(source).decoded(), weight)
    moved = PackedTensor(Resident(blob, "w"))
    moved.apply(lambda it: given if it is blob else it)
    assert moved.sources[0].blob.data_ptr() % 16 == 0
    assert_same_bits(moved.decoded(), weight)


def test_assigning_and_removing(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    layer = ours.blocks[0].up
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.up\.weight`.*cannot be replaced"):
        layer.weight = nn.Parameter(torch.zeros(192, 64))
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


# ---- copying ----


@torch.no_grad()
def test_copying_to_a_packed_weight(weight: Any) -> None:
    ours, other = packed(weight), packed(draw(96, 64, seed=9))
    assert ours.copy_(weight) is ours  # what it is already
    ours.copy_(other)
    assert_same_bits(ours.clone(), other.clone())
    assert ours.packed.sources[0].blob is not other.packed.sources[0].blob
    with pytest.raises(InvalidInput, match=r"load a weight that is packed alike"):
        ours.copy_(packed(draw(64, 96)))
    nan = weight.clone()
    nan.view(torch.int16)[0, 0] = 0x7FC1
    held = packed(nan)
    held.copy_(nan)  # compared as bits


def test_state_dicts_are_saved_without_code(pair: tuple[Model, Model]) -> None:
    plain, ours = pair
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    assert file.tell() < 0.8 * sum(it.nbytes for it in plain.state_dict().values()) + 50_000
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert found["embed.weight"].packed is found["head.weight"].packed
    again = pack_module(Model().to(torch.bfloat16), min_bytes=0)
    again.load_state_dict(found)
    assert_same_bits(again(IDS), plain(IDS))


def test_a_damaged_pickle_is_refused(weight: Any) -> None:
    ours, file = packed(weight), io.BytesIO()
    ours.packed.sources[0].blob[40] ^= 0xFF
    torch.save({"w": ours}, file)
    file.seek(0)
    with pytest.raises((Corrupt, InvalidInput), match="w"):
        torch.load(file, weights_only=True)


def test_accelerate_makes_parameters_anew(weight: Any) -> None:
    ours = packed(weight)
    again = type(ours)(ours.to("cpu"), requires_grad=ours.requires_grad)
    assert again.packed is ours.packed
    assert again.plain_requires_grad


@pytest.mark.parametrize("shared", [False, True])
def test_another_process_gets_the_model(shared: bool, pair: tuple[Model, Model]) -> None:
    """Sending a model moves its blobs to shared memory, where they are: the sender must notice."""
    plain, ours = pair
    if shared:
        assert ours.share_memory() is ours
        assert all(it.is_shared() for it in ours.parameters())
        assert_same_bits(ours(IDS), plain(IDS))
    context = torch.multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(ours, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(120)
        found = receiver.recv()
    except (EOFError, multiprocessing.ProcessError) as error:
        raise AssertionError("the other process ended") from error
    finally:
        process.join(60)
        process.kill()  # if it hangs
    assert found == plain(IDS).view(torch.int16).tolist()
    assert_same_bits(ours(IDS), plain(IDS))
    assert_same_bits(copy.deepcopy(ours)(IDS), plain(IDS))


def _run(model: Any, sender: Any) -> None:
    with torch.no_grad():
        sender.send(model(IDS).view(torch.int16).tolist())


# ---- in a forward pass ----


def test_other_values_for_a_moment(pair: tuple[Model, Model]) -> None:
    """`torch.func.functional_call` puts plain tensors into `_parameters`."""
    plain, ours = pair
    state = {name: it.detach() * 2 for name, it in plain.named_parameters()}
    del state["embed.weight"]  # tied to the head
    with torch.no_grad():
        expected = torch.func.functional_call(plain, state, (IDS,))
        assert_same_bits(torch.func.functional_call(ours, state, (IDS,)), expected)
        assert_same_bits(ours(IDS), plain(IDS))


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


@pytest.mark.parametrize(
    "state",
    [
        {"blobs": [{}, {}]},
        {"blobs": [None, None]},
        {"blobs": None},
        {"blobs": []},
        {"blobs": [torch.zeros(3), torch.zeros(3)]},
        {"names": None},
        {"names": ["w"]},
        {"names": [7, "w"]},
        {"shape": [2, 96, 64]},
        {"shape": (10**30, 96, 64)},
        {"shape": (1 << 62, 1 << 62, 0)},
        {"shape": ("a", 96, 64)},
        {"shape": (2.0, 96, 64)},
        {"shape": (-2, -96, 64)},
        {"shape": (3, 96, 64)},
        {"name": None},
        {"tile_bytes": "x"},
        {"tile_bytes": -512},
        {"tile_bytes": 1 << 62},
    ],
    ids=repr,
)
def test_hostile_pickles_are_refused(state: Any, weight: Any) -> None:
    blob = packed(weight).packed.sources[0].blob
    valid = {"blobs": [blob, blob], "names": ["a", "b"], "shape": (2, 96, 64), "name": "w", "tile_bytes": 0}
    assert_same_bits(rebuild_tensor(**valid).decoded(), torch.stack([weight, weight]))
    with pytest.raises(InvalidInput):
        rebuild_tensor(**(valid | state))


@pytest.mark.parametrize(
    "memory_format",
    [
        *("torch.strided", "channels_last", "", 7, None, [], torch.channels_last),
        *("torch.channels_last", "torch.channels_last_3d"),  # of weights that are no matrices
    ],
)
def test_pickles_of_formats_that_a_weight_cannot_have_are_refused(memory_format: Any, weight: Any) -> None:
    made = packed(weight).packed
    assert rebuild_parameter(made, True, "torch.contiguous_format").packed is made
    with pytest.raises(InvalidInput, match=r"`w`.*memory format"):
        rebuild_parameter(made, True, memory_format)
    with pytest.raises(InvalidInput, match="no packed weight, but a Tensor"):
        rebuild_parameter(weight, True, "torch.contiguous_format")  # type: ignore[arg-type]


def test_pieces_are_copied_and_saved_as_ordinary_tensors(weight: Any) -> None:
    ours = packed(weight)
    with torch.no_grad():
        piece = ours[3:5]
    for made in (copy.deepcopy(piece), pickle.loads(pickle.dumps(piece))):
        assert type(made) is torch.Tensor
        assert_same_bits(made, weight[3:5])
        made.zero_()
    assert_same_bits(ours.clone(), weight)


def test_one_fixed_parameter_does_not_keep_all_others_plain() -> None:
    """As the positions of some encoders, which are no parameters to be trained."""
    model = Model().to(torch.bfloat16)
    model.blocks[0].norm.requires_grad_(False)
    kinds = [type(it) for it in pack_module(model, min_bytes=0).parameters()]
    assert kinds.count(PackedParameter) == 7
