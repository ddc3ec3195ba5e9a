"""Headers that are written as usual are parsed many entries at a time, and say what JSON says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpde.errors import Corrupt, NotSafetensors, UnsupportedDtype
from tpde.format.container_reader import parse_header
from tpde.format.header_json import parse_any, parse_usual


def _slow(header: bytes) -> object:
    """What comes of a header where entries are parsed one by one: the entries and metadata, or None."""
    try:
        return parse_any(header, "x")
    except (Corrupt, NotSafetensors, UnsupportedDtype):
        return None


def _usual_header(tensors: int, separators: tuple[str, str], metadata: object = None) -> bytes:
    made: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for i in range(tensors):
        made[f"layers.{i}.é"] = {
            "dtype": "BF16",
            "shape": [i % 3, 2],
            "data_offsets": [at, at := at + i % 3 * 4],
        }
    return json.dumps(made, ensure_ascii=False, separators=separators).encode()


@pytest.mark.parametrize("block", [100, 150, 1 << 20])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",", ": ")])
@pytest.mark.parametrize("metadata", [None, {}, {"a": '},"b\\'}])
def test_usual_headers_are_parsed_alike_in_blocks(
    metadata: object, separators: tuple[str, str], block: int
) -> None:
    for tensors in (1, 2, 50):
        header = _usual_header(tensors, separators, metadata)
        for padding in (b"", b"   "):
            found = parse_usual(header + padding, block)
            assert found is not None
            assert found == _slow(header + padding)
            assert list(found[0]) == list(_slow(header + padding)[0])  # type: ignore[index]
            assert found[0] == parse_header(header + padding, "x").entries


def test_entries_longer_than_a_block_are_parsed_one_by_one() -> None:
    header = _usual_header(3, (",", ":"))
    assert parse_usual(header, 20) is None
    assert len(parse_header(header, "x").entries) == 3


_SPOILT = [  # what is replaced in a usual header, and by what
    ('"a"', '"b"'),  # a name that occurs twice
    ('"a"', '"__metadata__"'),
    ('"a"', '"\\u0061"'),
    ('"a"', '"a\\"'),
    ('"a"', '"a\n"'),
    ('"a"', '"a\x7f"'),
    ('"a"', '"},"'),
    ('"a"', "a"),
    ('"a":', '"a"'),
    ('"a":', '"a"::'),
    ('"a":', '"a" :'),
    ('"a":', '"a":  '),
    ('"a":', '"a":\t'),
    ("},", "}"),
    ("},", "},,"),
    ("},", "}{"),
    ("},", "} ,"),
    ("},", "},\n"),
    ("},", "]},"),
    ("},", '},"c":1,'),
    ("},", '},"c":{},'),
    ("}}", "},}"),
    ("}}", "}"),
    ("}}", "}}}"),
    ("}}", "}}x"),
    ("}}", "}}\n"),
    ("}}", "}} \x00"),
    ('{"', '["'),
    ('{"', '{,"'),
    ('{"', '\ufeff{"'),
    ('{"', ' {"'),
    ('"dtype":"U8"', '"dtype":"U9"'),
    ('"dtype":"U8"', '"dtype":"u8"'),
    ('"dtype":"U8"', '"dtype":"U16"'),
    ('"dtype":"U8"', '"dtype":8'),
    ('"dtype":"U8"', '"dtype":"U\\u0038"'),
    ('"dtype":"U8"', '"dtype":"U8","dtype":"U8"'),
    ('"dtype":"U8"', '"dtype":"U8","more":1'),
    ('"dtype":"U8",', ""),
    ('"shape":[2]', '"shape":[3]'),
    ('"shape":[2]', '"shape":[1,2]'),
    ('"shape":[2]', '"shape":[1, 2 ]'),
    ('"shape":[2]', '"shape":[02]'),
    ('"shape":[2]', '"shape":[2,]'),
    ('"shape":[2]', '"shape":[,2]'),
    ('"shape":[2]', '"shape":[1 2]'),
    ('"shape":[2]', '"shape":[2.0]'),
    ('"shape":[2]', '"shape":[-2]'),
    ('"shape":[2]', '"shape":[true,2]'),
    ('"shape":[2]', '"shape":[\u0662]'),  # a digit, and none of JSON
    ('"shape":[2]', f'"shape":[{"1," * 64}2]'),
    ('"shape":[2]', f'"shape":[0,{1 << 60}]'),
    ('"shape":[2]', f'"shape":[{"9" * 5000}]'),
    ("[0,2]", "[0,02]"),
    ("[0,2]", "[00,2]"),
    ("[0,2]", "[-0,2]"),
    ("[0,2]", "[0,2.0]"),
    ("[0,2]", "[0,2e0]"),
    ("[0,2]", "[0,\u0662]"),
    ("[0,2]", "[0,3]"),
    ("[0,2]", "[1,3]"),
    ("[0,2]", "[2,0]"),
    ("[0,2]", "[0,2,2]"),
    ("[0,2]", "[ 0,2]"),
    ("[0,2]", "[0 ,2]"),
    ("[0,2]", f"[{'9' * 5000},{'9' * 5000}]"),
    ("[0,2]", f"[{10**19},{10**19 + 2}]"),
    ("[0,2]}", "[0,2]]"),
    ("[0,2]}", '[0,2],"more":[]}'),
    ('"k":"v"', '"k":"v","k":"v"'),
    ('"k":"v"', '"k":1'),
    ('"k":"v"', '"k":{}'),
    ('"k":"v"', '"k":"\\ud800"'),
    ('{"k":"v"}', "null"),
    ('{"k":"v"}', "[]"),
    ('{"k":"v"}', "0"),
    ('{"k":"v"}', '""'),
    ('{"k":"v"}', "false"),
    ('{"k":"v"}', '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'),
    ('{"k":"v"}', '{"k":' + "[" * 3000 + "]" * 3000 + "}"),
    ('{"k":"v"},', '{"k":"v"},"__metadata__":{"k":"v"},'),
    ('{"k":"v"},', '{"k":"v"}'),
    ('{"k":"v"},', '{"k":"v"'),
]
_BOTH = (
    '{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    '"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}'
)


@pytest.mark.parametrize("block", [1, 70, 90, 1 << 20])
@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize(("old", "new"), _SPOILT)
def test_what_is_parsed_in_blocks_is_what_json_says(old: str, new: str, metadata: bool, block: int) -> None:
    text = _BOTH if metadata else _BOTH.replace('"__metadata__":{"k":"v"},', "")
    header = text.replace(old, new, 1).encode()
    found = parse_usual(header, block)
    assert found is None or found == _slow(header)
    if found is not None:
        assert [list(part) for part in found] == [list(part) for part in _slow(header)]  # type: ignore[attr-defined]


_TOKENS = sorted({part for pair in _SPOILT for part in pair if len(part) < 100}, key=repr)


@given(
    st.lists(
        st.tuples(st.integers(0, len(_BOTH)), st.integers(0, 4), st.sampled_from(["", *_BOTH, *_TOKENS])),
        min_size=1,
        max_size=3,
    )
)
def test_no_change_of_a_header_deceives_its_blocks(changes: list[tuple[int, int, str]]) -> None:
    text = _BOTH
    for at, size, new in changes:
        text = text[:at] + new + text[at + size :]
    found = parse_usual(text.encode())
    assert found is None or found == _slow(text.encode())


@pytest.mark.parametrize("raw", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80"])
def test_names_that_are_no_utf_8_are_refused(raw: bytes) -> None:
    header = _BOTH.encode().replace(b'"a"', b'"' + raw + b'"')
    assert parse_usual(header) is None
    with pytest.raises(NotSafetensors, match="not JSON"):
        parse_header(header, "x")


def test_tensors_out_of_order_are_sorted_and_overlaps_refused_in_blocks_too() -> None:
    entry = '"{}":{{"dtype":"U8","shape":[2],"data_offsets":[{},{}]}}'
    swapped = "{" + ",".join([entry.format("b", 2, 4), entry.format("a", 0, 2)]) + "}"
    assert parse_usual(swapped.encode()) is not None
    assert list(parse_header(swapped.encode(), "x").entries) == ["a", "b"]
    for begin in (0, 1, 3):
        header = "{" + ",".join([entry.format("a", 0, 2), entry.format("b", begin, begin + 2)]) + "}"
        assert parse_usual(header.encode()) is not None
        with pytest.raises(Corrupt, match=f"`b` starts at {begin}, the one before it ends at 2"):
            parse_header(header.encode(), "x")


def test_specs_of_one_kind_are_one_object() -> None:
    for order in (("dtype", "shape", "data_offsets"), ("shape", "data_offsets", "dtype")):
        info = {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]}
        header = json.dumps({"x": {key: info[key] for key in order}}).encode()
        assert parse_header(header, "x").specs["x"] is parse_header(_SEVEN, "x").specs["y"]


_SEVEN = b'{"y":{"dtype":"U8","shape":[7],"data_offsets":[0,7]}}'


@pytest.mark.parametrize("order", [("dtype", "shape", "data_offsets"), ("shape", "data_offsets", "dtype")])
def test_metadata_may_look_like_an_entry(order: tuple[str, ...]) -> None:
    info = {"dtype": "U8", "shape": [7], "data_offsets": [0, 7]}
    for metadata in ({"data_offsets": "x"}, {"dtype": "U8", "shape": "[7]", "data_offsets": "[0,7]"}):
        header = json.dumps({"__metadata__": metadata, "x": {key: info[key] for key in order}}).encode()
        found = parse_header(header, "x")
        assert (found.metadata, list(found.entries)) == (metadata, ["x"])
        assert found.entries["x"] == parse_header(_SEVEN, "x").entries["y"]


def test_the_entry_that_is_wrong_is_named_behind_and_before_sound_ones() -> None:
    entry = '"{}":{{"shape":[2],"dtype":"U8","data_offsets":[{},{}]}}'
    parts = [entry.format(i, 2 * i, 2 * i + 2) for i in range(3)]
    for i in range(3):
        spoilt = [*parts[:i], entry.format(i, 2 * i, 2 * i + 1), *parts[i + 1 :]]
        with pytest.raises(Corrupt, match="1 bytes by its offsets, 2 by its dtype") as caught:
            parse_header(("{" + ",".join(spoilt) + "}").encode(), "x")
        assert caught.value.tensor == f"{i}"
