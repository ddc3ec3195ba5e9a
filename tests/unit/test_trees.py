"""States of training, taken apart and made again."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpde.errors import Corrupt, InvalidInput, UnsupportedDtype
from tpde.format.json_values import values_in
from tpde.store import tree_text
from tpde.store.rebuild_state import rebuild
from tpde.store.state_tree import StateTree, leaf_bytes
from tpde.store.tree_text import MAX_DEPTH, map_tensors, one_of, parse_tree

torch = pytest.importorskip("torch", reason="states hold PyTorch's tensors")


def again(state: Any) -> Any:
    """A state, taken apart and made again."""
    tree = StateTree(state)
    return rebuild(
        parse_tree(tree.text, "here"),
        "here",
        lambda name: (leaf_bytes(tree.leaves[name]).copy(), tree.specs[name]),
    )


def bits(value: Any) -> Any:
    """A state as what can be compared: kinds, and bits of numbers and tensors."""
    if isinstance(value, dict):
        return type(value).__name__, [(bits(key), bits(it)) for key, it in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(it) for it in value]
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("<2d", value.real, value.imag)
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, leaf_bytes(value).tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype.name, value.shape, value.tobytes()
    return type(value).__name__, value


_KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.binary(max_size=4).map(bytearray)
    | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    | st.lists(st.integers(-9, 9), max_size=3).map(lambda it: torch.tensor(it, dtype=torch.int16))
    | st.lists(st.floats(width=32), max_size=3).map(lambda it: np.array(it, np.float32))
    | st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), np.float32(0.1)])
)
_STATES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(_STATES)
def test_a_state_comes_back_with_its_kinds_and_bits(state: Any) -> None:
    assert bits(again(state)) == bits(state)


@pytest.mark.parametrize("name", ["bool", "int8", "float16", "bfloat16", "float64", "complex64", "uint8"])
def test_every_dtype_comes_back(name: str) -> None:
    words = torch.arange(48, dtype=torch.uint8).view(3, 16)
    tensor = (words > 7) if name == "bool" else words.view(getattr(torch, name))
    assert bits(again(tensor)) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::5],
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(1).expand(5, 7),
        torch.ones(3, dtype=torch.complex64).conj(),
    ],
)
def test_views_and_parameters_come_back_as_tensors(tensor: Any) -> None:
    found = again([tensor])[0]
    assert type(found) is torch.Tensor
    assert torch.equal(found, tensor.detach())
    assert not found.requires_grad


def test_arrays_of_the_other_byte_order_come_back_as_equal_numbers() -> None:
    array = np.arange(5, dtype=">f4")
    assert np.array_equal(again(array), array)


def test_a_counter_stays_one() -> None:
    found = again({"milestones": Counter({3: 1, 5: 2})})["milestones"]
    assert type(found) is Counter
    assert found == Counter({3: 1, 5: 2})


def test_one_tensor_twice_is_stored_once_and_is_one_again() -> None:
    weight = torch.ones(4)
    tree = StateTree({"embed": weight, "head": weight.view(4), "other": torch.ones(4), "part": weight[:2]})
    assert sorted(tree.leaves) == ["embed", "other", "part"]
    found = again({"embed": weight, "head": weight})
    assert found["embed"] is found["head"]


def test_views_of_one_memory_that_differ_are_stored_apart() -> None:
    one = torch.tensor([[1 + 2j, 3 + 4j]], dtype=torch.complex64)
    found = again(
        {"plain": one, "conjugated": one.conj(), "turned": one.t(), "real": one.view(torch.float32)}
    )
    assert found["plain"].tolist() == [[1 + 2j, 3 + 4j]]
    assert found["conjugated"].tolist() == [[1 - 2j, 3 - 4j]]
    assert found["turned"].shape == (2, 1)
    assert found["real"].tolist() == [[1, 2, 3, 4]]


def test_negative_views_are_stored_apart() -> None:
    one = torch.tensor([1 + 2j, 3 + 4j])
    found = again({"plain": one.imag, "negative": one.conj().imag})
    assert found["plain"].tolist() == [2, 4]
    assert found["negative"].tolist() == [-2, -4]


def test_names_are_paths_and_never_the_same() -> None:
    tree = StateTree({"a": {"b": torch.ones(1)}, "a/b": torch.ones(2), "__metadata__": torch.ones(3)})
    assert len(tree.leaves) == 3
    assert "a/b" in tree.leaves
    assert "__metadata__" not in tree.leaves


class _Dict(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (_Dict(a=1), "_Dict"),
        (torch.nn.Linear(1, 1), "Linear"),
        (lambda: None, "function"),
        ("\ud800", "surrogates"),
        ({"\ud800": 1}, "surrogates"),
        ({frozenset(): 1}, "key"),
        (1 << 5000, "5001 bits"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("a", "f4")]), "array"),
        (np.ma.MaskedArray([1, 2], [0, 1]), "masked array"),
        (np.ma.masked, "masked array"),
        (np.ones((2, 2)).view(np.matrix), "matrix, and would come back as an array"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).to_sparse(), "dense"),
        (torch.ones(1).expand(1 << 40), "repeats"),
        (np.broadcast_to(np.ones(1, np.float32), (1 << 40,)), "repeats"),
        (torch.nn.parameter.UninitializedParameter(), "Uninitialized"),
    ],
)
def test_what_is_no_state_is_refused_naming_where_it_is(inner: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        StateTree({"model": [0, inner]})
    assert "state['model'][1]" in str(caught.value)


def test_a_dtype_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(UnsupportedDtype):
        StateTree([torch.ones(1, dtype=torch.complex128)])


def test_depth_is_bounded_both_ways() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert again(deep) == deep
    with pytest.raises(InvalidInput, match="levels"):
        StateTree([deep])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput, match="levels"):
        StateTree(loop)
    text = StateTree(deep).text
    for _ in range(2):
        text = f'["list",{text}]'
    with pytest.raises(Corrupt, match="levels"):
        rebuild(parse_tree(text, "here"), "here", pytest.fail)
    with pytest.raises(Corrupt, match="levels"):
        map_tensors(json.loads(text), lambda path, name: name, one_of(()), "here")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "[1]",
        '["list",[]]',
        '["nothing","a"]',
        '["tensor"]',
        '["tensor","absent"]',
        '["tensor",1]',
        '["tensor","a","a"]',
        '["float","00"]',
        '["float","zz"]',
        '["complex","00"]',
        '["bytes","?"]',
        '["dict",["a"]]',
        '["dict","ab"]',
        '["dict",[["list"],1]]',
        '["counter",[["list"],1]]',
        '["size",-1]',
        '["size",true]',
        '["size","1"]',
        '["dtype","nn"]',
        '["dtype","float33"]',
        '["device","nowhere"]',
        '["ordered",1]',
    ],
)
def test_a_damaged_tree_is_corrupt(text: str) -> None:
    def read(name: str) -> Any:
        raise KeyError(name)

    with pytest.raises(Corrupt, match="here"):
        rebuild(parse_tree(text, "here"), "here", read)


def test_trees_are_bounded() -> None:
    most, longest = (1 << 22) - 2, (64 << 20) - len('["list",""]')
    assert len(parse_tree(f'["list"{",1" * most}]', "here")) == 1 + most
    with pytest.raises(Corrupt, match="large"):
        parse_tree(f'["list"{",1" * (most + 1)}]', "here")
    assert parse_tree(f'["list","{"a" * longest}"]', "here") == ["list", "a" * longest]
    with pytest.raises(Corrupt, match="large"):
        parse_tree(f'["list","{"a" * (longest + 1)}"]', "here")


@pytest.mark.parametrize(
    ("large", "values", "characters"),
    [
        ([0.5] * 100, 120, 1 << 20),
        ("a" * 500, 1 << 20, 600),
        (b"a" * 400, 1 << 20, 600),
        (",;" * 100, 120, 1 << 20),
        ({(1, 2): [3] * 100}, 120, 1 << 20),
    ],
)
def test_what_could_not_be_read_back_is_refused_naming_the_entry(
    large: Any, values: int, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tree_text", "state_tree"):
        monkeypatch.setattr(f"tpde.store.{module}.MAX_TREE_VALUES", values)
        monkeypatch.setattr(f"tpde.store.{module}.MAX_TREE_BYTES", characters)
    assert again({"loss": 0.5, "some": large}) == {"loss": 0.5, "some": large}
    with pytest.raises(InvalidInput, match=r"`state\['more'\]\[1\].*store it as a tensor") as caught:
        StateTree({"loss": [1] * 20, "more": [0, large], "name": "b" * 100})
    assert str(caught.value.where).startswith("state['more'][1]")
    with pytest.raises(InvalidInput, match="`state` makes the state too large"):
        StateTree({"one": large, "two": large})


def test_the_largest_tree_is_written_and_read() -> None:
    """Of one character less than is too large, and of one value."""
    for kind, inside in (("str", "a" * 100), ("list", [1] * 100)):
        text = StateTree({kind: inside}).text
        for limit, least in (("MAX_TREE_BYTES", len(text)), ("MAX_TREE_VALUES", values_in(text) + 1)):
            for most in (least, least - 1):
                with mock.patch.object(tree_text, limit, most):
                    if most == least:
                        assert again({kind: inside}) == {kind: inside}
                    else:
                        with pytest.raises(InvalidInput, match="too large"):
                            StateTree({kind: inside})


def test_tensors_are_mapped_with_their_paths() -> None:
    weight = torch.ones(2)
    tree = StateTree({"a": [weight], 3: OrderedDict(b=weight), "c": np.ones(1)})
    seen = []
    map_tensors(
        json.loads(tree.text), lambda path, name: seen.append((path, name)), one_of(tree.leaves), "here"
    )
    assert seen == [(("a", "0"), "a/0"), (("3", "b"), "a/0"), (("c",), "c")]


@pytest.mark.parametrize("text", ['["tensor",["x"]]', '["array",{}]', '["scalar",3]', '["tensor","y"]'])
def test_names_that_no_tensor_has_are_damage(text: str) -> None:
    with pytest.raises(Corrupt, match="there is no tensor"):
        map_tensors(json.loads(text), lambda path, name: name, one_of({"x"}), "here")


def test_nan_has_its_payload() -> None:
    value = struct.unpack("<d", bytes.fromhex("010000000000f47f"))[0]
    assert math.isnan(value)
    assert struct.pack("<d", again(value)) == struct.pack("<d", value)
