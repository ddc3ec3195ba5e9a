"""Packed weights as parameters: what the rest of PyTorch sees, computes with, and may not do."""

from __future__ import annotations

import copy
import gc
import io
import logging
import multiprocessing
import operator
import pickle
from typing import Any, NamedTuple

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
from tpde.weights.packed_tensor import rebuild_tensor
from tpde.weights.parameter import rebuild_parameter
from tpde.weights.readonly import ReadOnly, guarded
from tpde.weights.source import Source

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


# ---- whatever is made of one says what the plain one says ----


def conv(dimensions: int, memory_format: Any, trained: bool) -> tuple[Any, PackedParameter]:
    """A plain weight in a memory format, and the packed one."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn((32, 16, *(3,) * dimensions), generator=generator).to(torch.bfloat16)
    plain = nn.Parameter(values.to(memory_format=memory_format), requires_grad=trained)
    made = pack_tensor(values, "w")
    assert made is not None
    return plain, PackedParameter(made, trained, memory_format)


FORMATS = [(1, torch.contiguous_format), (2, torch.channels_last), (3, torch.channels_last_3d)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("dimensions", "memory_format"), FORMATS)
def test_copies_say_what_the_plain_one_says(dimensions: int, memory_format: Any, trained: bool) -> None:
    plain, ours = conv(dimensions, memory_format, trained)
    copies = [ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours.to(copy=True)]
    copies += [PackedParameter(ours), PackedParameter(ours, True), PackedParameter(ours, memory_format=None)]
    for number, made in enumerate(copies):
        assert made.memory_format is memory_format
        assert made.plain_requires_grad is (trained or number == 5)
        assert made.stride() == plain.stride()
        assert made.plain().stride() == plain.stride()
        assert made.plain().requires_grad is made.plain_requires_grad
        assert_same_bits(made.plain(), plain)
    with torch._C.DisableTorchFunctionSubclass():  # as code in C++ calls it
        inner = torch.ops.aten.detach(ours)
    for made in (ours.detach(), torch.detach(ours), ours.data, inner):
        assert isinstance(made, PackedParameter)
        assert made is not ours
        assert made.packed is ours.packed
        assert made.memory_format is memory_format
        assert not made.plain_requires_grad
        assert made.stride() == plain.stride()


def test_copies_of_weights_that_are_one_are_one(weight: Any) -> None:
    ours = packed(weight)
    one, other = copy.deepcopy([ours, ours.detach()])
    assert one is not other
    assert one.packed is other.packed is not ours.packed
    ours.packed.tile_bytes = 64 << 10
    for made in (copy.deepcopy(ours.packed), pickle.loads(pickle.dumps(ours.packed))):
        assert (made.name, made.tile_bytes) == ("w", 64 << 10)


def test_a_weight_of_several_has_a_name_of_its_own(weight: Any) -> None:
    parts = [packed(weight).packed.sources[0], packed(weight).packed.sources[0]]
    assert PackedTensor(parts, (2, 96, 64)).name == "w"
    made = PackedTensor(parts, (2, 96, 64), "fused")
    assert made.name == made.clone().name == pickle.loads(pickle.dumps(made)).name == "fused"
    assert made.packed_bytes == 2 * parts[0].packed_bytes
    with pytest.raises(InvalidInput, match=r"`w` has shape \[96, 64\], \[64, 96\] is needed"):
        PackedTensor(parts[0], (64, 96))


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.zero_(),
        torch.zeros_like,
        lambda it: it.flip(0),
        lambda it: it.to(torch.int32),
        lambda it: it.view(torch.int8),
        lambda it: it.to("meta"),
    ],
)
def test_what_gives_other_bytes_than_a_blobs_is_refused(change: Any, weight: Any) -> None:
    ours = packed(weight).packed
    (source,) = ours.sources
    for apply in (ours.apply, ours.check, source.apply, source.check):
        with pytest.raises(PackedWeight, match="`w` is packed, and would lose its bytes"):
            apply(change)
    assert_same_bits(ours.decoded(), weight)


def test_what_one_blob_refuses_is_done_to_none(weight: Any) -> None:
    made = PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (2, 96, 64))
    first, second = made.sources
    told: list[str] = []

    class User:
        def changed(self) -> None:
            told.append("changed")

        def frozen(self) -> None:
            told.append("frozen")

    user = User()
    made.watch(user)
    start = second.blob[:16].clone()
    second.blob[5] ^= 1  # its first bytes, by which functions are tried, differ
    odd = second.blob[:16].clone()

    def move(it: Any) -> Any:
        return torch.zeros_like(it) if torch.equal(it[:16], odd) else it.clone()

    for work in (made.apply, made.check):
        before = first.version
        with pytest.raises(PackedWeight, match="lose its bytes"):
            work(move)
        assert first.version == before
    second.blob[:16] = start
    assert not told
    made.apply(lambda it: it.clone())
    assert told == ["changed"]
    made.tell_frozen()
    assert told == ["changed", "frozen"]
    assert_same_bits(made.decoded(), torch.stack([weight, weight]))


def test_what_one_blob_does_not_take_is_loaded_to_none(weight: Any) -> None:
    class Elsewhere(Resident):
        @property
        def blob(self) -> Any:
            raise PackedWeight("it stays in its file")

    new = draw(96, 64, seed=9)
    ours, other = (
        PackedTensor([packed(it).packed.sources[0] for _ in range(2)], (2, 96, 64)) for it in (weight, new)
    )
    other.parts[1] = Elsewhere(other.sources[1].blob, "there"), other.parts[1][1]
    with pytest.raises(PackedWeight, match="stays in its file"):
        ours.load(other)
    assert_same_bits(ours.decoded(), torch.stack([weight, weight]))


@pytest.mark.parametrize("which", [0, 1])
def test_a_weight_is_where_all_of_it_is(which: int, weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (2, 96, 64))
    assert made.together
    assert made.settled
    source = made.sources[which]
    source.settled = False
    assert not made.settled
    there = torch.device("meta")
    monkeypatch.setattr(Resident, "device", property(lambda it: there if it is source else it.blob.device))
    assert not made.together


# ---- more of what is computed, and refused ----


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


@torch.no_grad()
def test_rows_of_a_weight_of_several_tensors(weight: Any) -> None:
    made = PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (192, 64))
    ids = torch.tensor([[1, 95, 96, 191]])
    assert_same_bits(functional.embedding(ids, PackedParameter(made)), torch.cat([weight, weight])[ids])


OTHERS = {
    "plain": lambda weight: weight,
    "another dtype": lambda weight: weight.float(),
    "strided": lambda weight: weight.t().contiguous().t(),
    "a row": lambda weight: weight[0],
    "turned": lambda weight: weight.t(),
    "no data": lambda weight: weight.to("meta"),
    "a list": lambda weight: weight.tolist(),
    "none": lambda weight: None,
    "rounded": lambda weight: weight.float() * (1 + 2**-12),
    "other": lambda weight: weight + 1,
}


@pytest.mark.parametrize("name", OTHERS)
def test_which_values_a_weight_takes(name: str, weight: Any) -> None:
    """Those that it has."""
    ours = packed(weight)
    takes = name in ("plain", "another dtype", "strided", "rounded")
    assert ours.takes(OTHERS[name](weight)) is takes
    assert packed(weight.float()).takes(weight.float() * (1 + 2**-12)) is False


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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_casts_give_ordinary_tensors(dtype: Any) -> None:
    weight = draw(96, 64, dtype=dtype)
    ours = packed(weight)
    casts = {
        "float": torch.float32,
        "double": torch.float64,
        "half": torch.float16,
        "bfloat16": torch.bfloat16,
    }
    assert ours.type() == weight.type()
    for name, other in casts.items():
        for found in (getattr(ours, name)(), ours.to(other), ours.type(other), ours.to("cpu", other)):
            assert found.dtype is other
            assert isinstance(found, PackedParameter) == (found is ours)
            assert_same_bits(found.clone(), weight.to(other))
        assert (ours.to(other) is ours) == (getattr(ours, name)() is ours) == (other is dtype)
    there = ours.to("meta", torch.float16 if dtype is torch.float32 else torch.float32)
    assert there.is_meta
    with pytest.raises(PackedWeight, match="lose its bytes"):
        ours.to("meta")


def test_in_another_memory_format_it_is_an_ordinary_tensor() -> None:
    plain, ours = conv(2, torch.contiguous_format, True)
    assert ours.to(memory_format=torch.preserve_format) is ours
    assert ours.to(memory_format=torch.contiguous_format) is ours
    found = ours.to(memory_format=torch.channels_last)
    assert not isinstance(found, PackedParameter)
    assert found.stride() == plain.to(memory_format=torch.channels_last).stride()
    assert_same_bits(found, plain)
    _, ours = conv(2, torch.channels_last, True)
    assert ours.to(memory_format=torch.channels_last) is ours
    assert ours.to(memory_format=torch.contiguous_format).is_contiguous()


def test_devices_are_told_apart(weight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, seen = packed(weight), list[Any]()

    class Blob:
        def to(self, device: Any) -> None:
            seen.append(torch.device(device))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(PackedTensor, "apply", lambda self, fn: fn(Blob()))
    for work in (
        lambda: ours.to("cuda"),
        lambda: ours.to("cuda:1"),
        ours.cuda,
        lambda: ours.cuda("cuda:2"),
        lambda: ours.cuda(torch.device("cuda", 1)),
        lambda: ours.to("cpu"),
        ours.cpu,
    ):
        work()
    assert seen == [torch.device(it) for it in ("cuda", "cuda:1", "cuda:3", "cuda:2", "cuda:1")]


def test_tensors_are_made_like_it(weight: Any) -> None:
    weight = weight.half()
    ours = packed(weight)
    for make in (
        lambda w: w.new_empty(3, 4),
        lambda w: w.new_zeros((2, 3)),
        lambda w: w.new_ones(5),
        lambda w: w.new_full((2,), 7),
        lambda w: w.new_tensor([1, 2]),
        lambda w: w.new_zeros(2, dtype=torch.int32),
        torch.empty_like,
        lambda w: torch.empty_like(w, memory_format=torch.preserve_format),
        lambda w: torch.empty_like(w, dtype=torch.float64, device="meta"),
        torch.zeros_like,
    ):
        found, expected = make(ours), make(weight)
        assert type(found) is torch.Tensor
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert ours.detach_() is ours
    assert ours.is_pinned() is False
    assert not ours.is_shared()


def test_an_address_is_no_number(weight: Any) -> None:
    address: Any = packed(weight).data_ptr()
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mod", "and_"):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            getattr(operator, name)(address, 16)
    for name in ("add", "sub"):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            getattr(operator, name)(16, address)
    for look in (bool, int, operator.not_):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            look(address)
    assert not address != address  # noqa: SIM202
    assert hash(address) == hash(address)


def test_what_a_storage_says(weight: Any) -> None:
    ours = packed(weight)
    storage, blob = ours.untyped_storage(), ours.packed.sources[0].blob.untyped_storage()
    assert (len(storage), storage.nbytes(), storage.device) == (len(blob), blob.nbytes(), blob.device)
    for name in ("nothing", "_share_filename_cpu_", "__array_interface__"):
        assert not hasattr(storage, name)
    for look in (lambda: storage[0], lambda: list(storage), lambda: storage.copy_(blob)):
        with pytest.raises(PackedWeight, match="no plain bytes"):
            look()


def test_a_weight_is_shared_if_all_of_it_is(weight: Any) -> None:
    ours = PackedParameter(PackedTensor([packed(weight).packed.sources[0] for _ in range(2)], (2, 96, 64)))
    assert not ours.is_shared()
    ours.packed.sources[0].blob.share_memory_()
    assert not ours.is_shared()
    assert ours.share_memory_() is ours
    assert ours.is_shared()
    assert_same_bits(ours.plain(), torch.stack([weight, weight]))


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
