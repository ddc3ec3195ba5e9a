"""Headers are those that the stock library writes, and are parsed as it parses them."""

from __future__ import annotations

import contextlib
import gc
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from support.files import container

from tpde.errors import Corrupt, InvalidArgument, NotSafetensors, Truncated, UnsupportedDtype
from tpde.format.constants import DTYPES
from tpde.format.container import Container, TensorSpec, check_texts
from tpde.format.container_reader import max_source_header, parse_header, read_container
from tpde.format.container_writer import canonical_header
from tpde.io.sources import BytesSource

# What the stock library's `serialize` calls the dtypes that it takes from Python.
STOCK = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(lambda name: name != "__metadata__")
specs = st.builds(
    TensorSpec, st.sampled_from(sorted(STOCK)), st.lists(st.integers(0, 5), max_size=4).map(tuple)
)
_ZEROS = np.zeros(1 << 16, np.uint8)  # outlives every call: the stock library takes its address


def _stock_header(tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> bytes:
    data = {
        name: safetensors.TensorSpec(
            dtype=STOCK[spec.dtype],
            shape=list(spec.shape),
            data_ptr=_ZEROS.ctypes.data,
            data_len=spec.nbytes,
        )
        for name, spec in tensors.items()
    }
    assert all(spec.nbytes <= _ZEROS.size for spec in tensors.values())
    file = safetensors.serialize(data, metadata or None)
    return bytes(file[8 : 8 + struct.unpack("<Q", file[:8])[0]])


# The stock library writes more than one key of the metadata in any order, so no more are compared.
@given(st.dictionaries(names, specs, max_size=8), st.dictionaries(texts, texts, max_size=1))
def test_canonical_headers_are_those_of_the_stock_library(
    tensors: dict[str, TensorSpec], metadata: dict[str, str]
) -> None:
    header = canonical_header(tensors, metadata)
    assert header == _stock_header(tensors, metadata)
    parsed = parse_header(header, "x")
    assert (parsed.specs, parsed.metadata) == (tensors, metadata)


def test_canonical_headers_sort_every_dtype_like_the_stock_library() -> None:
    tensors = {f"{i}": TensorSpec(dtype, (8,)) for i, dtype in enumerate(STOCK)}
    assert canonical_header(tensors, {}) == _stock_header(tensors, {})


@pytest.mark.parametrize("character", [chr(i) for i in range(32)] + list('\x7f"\\/<>&\u2028é😀\ufffe'))
def test_characters_are_escaped_like_the_stock_library(character: str) -> None:
    tensors = {f"a{character}b": TensorSpec("F32", (1,))}
    metadata = {character: character}
    assert canonical_header(tensors, metadata) == _stock_header(tensors, metadata)


def test_the_stock_library_reads_every_dtype_that_is_written() -> None:
    for dtype in DTYPES:
        spec = TensorSpec(dtype, (8,))
        file = container(canonical_header({"x": spec}, {}), bytes(spec.nbytes))
        ((name, found),) = safetensors.deserialize(file)
        assert (name, found["dtype"], found["shape"]) == ("x", dtype, [8])


def _read(data: bytes) -> Container:
    return read_container(BytesSource(data, "some.file"))


def test_entries_come_in_the_order_of_their_bytes() -> None:
    header = {
        n: {"dtype": "U8", "shape": [2], "data_offsets": [at, at + 2]} for n, at in (("b", 2), ("a", 0))
    }
    found = _read(container(header, b"1234"))
    assert list(found.entries) == ["a", "b"]
    assert found.data_start == 8 + len(found.header)
    assert found.data_bytes == 4


def test_a_file_without_tensors_is_one() -> None:
    assert _read(container({}, b"")).entries == {}
    assert _read(container({"__metadata__": None}, b"")).metadata == {}
    assert _read(container(b"{}   ", b"", pad=1)).header == b"{}   "
    with pytest.raises(Corrupt, match="1 bytes of data, its header describes only 0"):
        _read(container({}, b"x"))


@pytest.mark.parametrize(
    "header", [b"", b"x", b"[]", b"1", b"null", b'"x"', b'{"a":}', b"{}{}", b"\xef\xbb\xbf{}"]
)
def test_what_is_not_a_json_object_is_no_safetensors_file(header: bytes) -> None:
    with pytest.raises(NotSafetensors, match=r"some\.file"):
        _read(container(header, b"", pad=1))


@pytest.mark.parametrize(
    "entry", [{}, [], 1, {"dtype": "U8", "shape": [1]}, {"shape": [1], "data_offsets": [0, 1]}]
)
def test_entries_that_lack_something_are_refused(entry: object) -> None:
    with pytest.raises(Corrupt, match="`x`"):
        _read(container({"x": entry}, b"1"))


def test_a_header_entry_with_a_key_more_is_read_as_the_stock_library_does() -> None:
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "stride": [1]}
    assert _read(container({"x": entry}, b"1")).specs == {"x": TensorSpec("U8", (1,))}
    assert safetensors.deserialize(container({"x": entry}, b"1"))[0][0] == "x"


def test_sizes_by_offsets_and_by_shape_must_agree() -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}
    with pytest.raises(Corrupt, match="7 bytes by its offsets, 8 by its dtype"):
        _read(container({"x": entry}, bytes(7)))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 20])
def test_a_file_that_ends_early_says_so(size: int) -> None:
    whole = container({"x": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, bytes(9))
    with pytest.raises(Truncated, match=r"some\.file.*fetch the rest"):
        _read(whole[:size])


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F4", (3,)), ("F6_E2M3", (2,)), ("F6_E3M2", ()), ("U8", (1 << 60,))]
)
def test_specs_of_no_whole_bytes_or_too_many_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="whole bytes below"):
        TensorSpec(dtype, shape)
    with pytest.raises(ValueError, match="cannot have"):
        TensorSpec(dtype, (-1,))


@pytest.mark.parametrize("dtype", ["X8", "bf16", "", "F128"])
def test_specs_of_unknown_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedDtype, match="upgrade tpde") as caught:
        TensorSpec(dtype, (8,))
    assert caught.value.found == dtype


@pytest.mark.parametrize("shape", [(-1,), (3, -1, 0), (1,) * 65])
def test_specs_of_shapes_that_cannot_be_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot have the shape"):
        TensorSpec("U8", shape)


def test_json_of_other_writers_is_kept_as_it_is() -> None:
    text = json.dumps({"x": {"data_offsets": [0, 1], "shape": [1], "dtype": "U8"}}, indent=3).encode()
    assert _read(container(text, b"1", pad=1)).header == text


# ---- limits, and what is told


def test_a_header_of_no_bytes_is_no_json() -> None:
    with pytest.raises(NotSafetensors, match="not JSON"):
        _read(bytes(8))


@pytest.mark.parametrize("order", [("dtype", "shape", "data_offsets"), ("shape", "data_offsets", "dtype")])
def test_shapes_have_at_most_64_dimensions(order: tuple[str, ...]) -> None:
    for count in (64, 65):
        entry = {"dtype": "U8", "shape": [1] * count, "data_offsets": [0, 1]}
        data = container({"x": {key: entry[key] for key in order}}, b"1")
        if count == 64:
            assert _read(data).specs == {"x": TensorSpec("U8", (1,) * 64)}
        else:
            with pytest.raises(Corrupt, match="tensor `x` has the shape"):
                _read(data)


def test_specs_have_less_than_two_to_the_60_bytes() -> None:
    assert TensorSpec("U8", ((1 << 60) - 1,)).nbytes == (1 << 60) - 1
    assert TensorSpec("F4", ((1 << 61) - 2,)).nbytes == (1 << 60) - 1
    assert TensorSpec("U8", (0, (1 << 60) - 1)).nbytes == 0
    for dtype, shape in (
        ("U8", (1 << 60,)),
        ("F64", (1 << 57,)),
        ("U8", (0, 1 << 60)),
        ("U8", (1 << 30, 0, 1 << 30)),
    ):
        with pytest.raises(ValueError, match="any dimension of 0 taken as 1"):
            TensorSpec(dtype, shape)


@pytest.mark.parametrize(
    "shape", [(6 / 2,), (True,), [1, 2.0], ("3",), (None,), "34", 3, {3}, (np.float32(1),)]
)
def test_shapes_without_integers_are_refused(shape: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot have the shape .* give a tuple of integers") as caught:
        TensorSpec("F32", shape)
    assert (caught.value.where, caught.value.found) == ("shape", shape)


class _Size(tuple[int, ...]):
    """As PyTorch has it."""


@pytest.mark.parametrize("shape", [[2, 3], (np.int64(2), 3), [np.uint8(2), np.int32(3)], _Size((2, 3))])
def test_shapes_of_other_integers_are_taken(shape: Any) -> None:
    spec = TensorSpec("F32", shape)
    assert spec == TensorSpec("F32", (2, 3))
    assert hash(spec) == hash(TensorSpec("F32", (2, 3)))
    assert spec.json == '"dtype":"F32","shape":[2,3]'
    assert type(spec.shape) is tuple
    assert all(type(n) is int for n in spec.shape)


@pytest.mark.parametrize("order", [("dtype", "shape", "data_offsets"), ("shape", "data_offsets", "dtype")])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"data_offsets": [-1, 1]}, r"has the offsets \[-1, 1\]"),
        ({"data_offsets": [0, 2, 2]}, "has the offsets"),
        ({"data_offsets": [2]}, "has the offsets"),
        ({"data_offsets": {"0": 2}}, "has the offsets"),
        ({"data_offsets": [[0], 2]}, "has the offsets a nested list"),
        ({"data_offsets": [2, 0]}, "has -2 bytes by its offsets, 2 by its dtype"),
        ({"shape": [-2]}, r"has the shape \[-2\]"),
        ({"shape": [2.0]}, "has the shape"),
        ({"shape": "2"}, "has the shape 2"),
        ({"shape": [[2]]}, "has the shape a nested list"),
        ({"shape": {"2": []}}, "has the shape a nested dict"),
        ({"shape": [1 << 60]}, "is impossible: a U8 tensor cannot have the shape"),
        ({"shape": [3]}, "has 2 bytes by its offsets, 3 by its dtype"),
    ],
)
def test_entries_that_cannot_be_say_what_is_wrong(
    fields: dict[str, object], says: str, order: tuple[str, ...]
) -> None:
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} | fields
    with pytest.raises(Corrupt, match=says) as caught:
        _read(container({"x": {key: entry[key] for key in order}}, b"12"))
    assert caught.value.tensor == "x"


def test_tensors_that_are_not_beside_each_other_say_where() -> None:
    def entry(begin: int, end: int) -> dict[str, object]:
        return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}

    for second, found in (((1, 3), 1), ((3, 5), 3)):
        with pytest.raises(Corrupt, match=f"`b` starts at {found}, the one before it ends at 2") as caught:
            _read(container({"b": entry(*second), "a": entry(0, 2)}, bytes(second[1])))
        assert (caught.value.tensor, caught.value.found, caught.value.needed) == ("b", found, 2)
    for data, error in ((b"1", Truncated), (b"123", Corrupt)):
        with pytest.raises(error) as caught_size:
            _read(container({"a": entry(0, 2)}, data))
        assert (caught_size.value.found, caught_size.value.needed) == (len(data), 2)


@pytest.mark.parametrize(
    ("names", "metadata", "says"),
    [
        (["a", 7], {}, "the name 7 is a int; names are texts"),
        (["a", None], {}, "is a NoneType"),
        (["a", "__metadata__"], {}, "the place of metadata"),
        (["a", "\ud800"], {}, "the name '.ud800' is not Unicode"),
        (["\ud83d", "\ude00"], {}, "is not Unicode"),
        (["a"], [], "`__metadata__` is a list"),
        (["a"], None, "`__metadata__` is a NoneType"),
        (["a"], {"b": 7}, "maps str to int at 'b'"),
        (["a"], {7: "b"}, "maps int to str at 7"),
        (["a"], {"b": "\ud800"}, "at 'b' is not Unicode"),
        (["a"], {"\ud800": "b"}, "at '.ud800' is not Unicode"),
    ],
)
def test_texts_that_no_reader_takes_are_refused(names: list[object], metadata: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_texts(names, metadata)
    check_texts(["a", "\U0001f600", ""], {"": "", "a": "é"})


def test_a_sources_header_is_at_most_4_mib_and_32_times_the_containers() -> None:
    assert [max_source_header(size) for size in (0, 1, 1000)] == [4 << 20, (4 << 20) + 32, (4 << 20) + 32_000]


@pytest.mark.parametrize("header", [b"{}", b"{"])
@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_afterwards_as_before(header: bytes, enabled: bool) -> None:
    assert gc.isenabled()
    if not enabled:
        gc.disable()
    try:
        with contextlib.suppress(NotSafetensors):
            parse_header(header, "x")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
