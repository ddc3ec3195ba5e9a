"""What is made of a packed weight says what is made of the plain one: copies, casts, tensors like it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from support.models import assert_same_bits
from support.parameters import DTYPES, draw, packed
from support.row_tunes import Tunes
from support.small import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedParameter, PackedTensor, pack_tensor
from tpde.weights.windowed import Windowed


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


def test_accelerate_makes_parameters_anew(weight: Any) -> None:
    ours = packed(weight)
    again = type(ours)(ours.to("cpu"), requires_grad=ours.requires_grad)
    assert again.packed is ours.packed
    assert again.plain_requires_grad


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
        def to(self, device: Any, copy: bool) -> None:
            assert copy
            seen.append(torch.device(device))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(PackedTensor, "check", lambda self, fn: fn(Blob()))
    monkeypatch.setattr(PackedTensor, "clone", lambda self, fn: self)
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


@pytest.mark.parametrize("kind", ["codes", "windows", "changed"])
def test_a_weight_is_moved_by_one_copy(kind: str, weight: Any, tunes: Tunes) -> None:
    """It stays as it is, and takes no more memory where it is."""
    ours = packed(weight)
    if kind == "windows":
        source = Windowed.of(ours.packed.sources[0], 9)
        assert source is not None
        ours = PackedParameter(PackedTensor(source))
    elif kind == "changed":
        tunes.packed.use("math")
        ours = tunes.packed.blocks[0].up.weight
    plain, before = ours.packed.decoded(), ours.packed.sources[0].memory
    made: list[tuple[Any, int]] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) and len(found) > 16:
                made.append((func, found.data_ptr()))
            return found

    with Noted():
        there = ours.to(torch.device("cpu", 0))  # another device than `cpu`, for PyTorch
    assert {func for func, _ in made} == {torch.ops.aten._to_copy.default}
    assert len({at for _, at in made}) == len(made) == 1 + (kind == "changed")
    assert ours.packed.sources[0].memory is before
    assert there.packed.sources[0].memory.data_ptr() == made[0][1]
    assert_same_bits(there.packed.decoded(), plain)
    assert_same_bits(ours.packed.decoded(), plain)


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


# ---- to it ----


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
