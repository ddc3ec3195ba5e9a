"""Packed and plain models compute the same bits."""

from __future__ import annotations

import copy

import pytest
from support.models import CAUSAL, NAMES, assert_same_bits, inputs, make, outputs, torch

from tpde.nn import PackedParameter, pack_module, packed_modules, plain_state_dict, unpack_module


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, batch: int) -> None:
    model = make(name)
    with torch.no_grad():
        expected = outputs(name, model, batch)
    recorded = outputs(name, model, batch)  # with autograd, plain models may use other kernels
    pack_module(model, min_bytes=1024)
    assert list(packed_modules(model))
    with torch.no_grad():
        assert_same_bits(outputs(name, model, batch), expected)
    assert_same_bits(outputs(name, model, batch), recorded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = make("llama", dtype)
    with torch.no_grad():
        expected = outputs("llama", model, 2)
        assert_same_bits(outputs("llama", pack_module(model, min_bytes=0), 2), expected)


@pytest.mark.parametrize("name", CAUSAL)
def test_generation(name: str) -> None:
    model = make(name)
    took = inputs(name, 2, 5)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(took, **options)
    assert torch.equal(pack_module(model, min_bytes=0).generate(took, **options), expected)


@pytest.mark.parametrize("name", NAMES)
def test_unpacking_is_the_inverse(name: str) -> None:
    model = make(name)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    plain = copy.deepcopy(model)
    unpack_module(pack_module(model, min_bytes=0))
    assert not list(packed_modules(model))
    names = dict(model.named_parameters(remove_duplicate=False))
    expected = dict(plain.named_parameters(remove_duplicate=False))
    assert list(names) == list(expected)
    assert list(model.state_dict()) == list(plain.state_dict())
    for key, parameter in expected.items():
        assert_same_bits(names[key], parameter, key)
        assert type(names[key]) is torch.nn.Parameter
        assert names[key].requires_grad == parameter.requires_grad
        twins = [other for other in expected if expected[other] is parameter]
        assert [other for other in names if names[other] is names[key]] == twins
    for (path, ours), (_, theirs) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert type(ours) is type(theirs), path
        assert vars(ours).keys() == vars(theirs).keys(), path
        assert not ours._forward_hooks, path
        assert not ours._forward_pre_hooks, path


@pytest.mark.parametrize("name", NAMES)
def test_plain_state_dict(name: str) -> None:
    model = make(name)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    found = plain_state_dict(pack_module(model, min_bytes=0))
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)
    assert any(isinstance(value, PackedParameter) for value in model.state_dict().values())


def test_what_is_unpacked_in_inference_mode_can_be_trained() -> None:
    model, other = (pack_module(make("llama"), min_bytes=0) for _ in range(2))
    with torch.inference_mode():
        unpack_module(model)
        state = plain_state_dict(other)
    assert not any(it.is_inference() for it in (*model.parameters(), *state.values()))
    model(**inputs("llama", 2, 5)).logits.float().sum().backward()
    assert all(it.grad is not None for it in model.parameters())
