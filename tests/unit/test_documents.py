"""JSON of strangers: what is read of it, and where the bounds are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tpde.errors import InvalidInput, NotJson
from tpde.files.documents import (
    is_inside,
    is_text,
    json_object,
    parse_json,
    parse_object,
    read_document,
    read_modules,
)

PATH = Path("folder/config.json")


@pytest.mark.parametrize("size", [0, 9, 64 << 20, (64 << 20) + 1, 1 << 40])
def test_a_document_is_read_up_to_its_bound(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.touch()
    os.truncate(path, size)
    if size <= 64 << 20:
        assert read_document(path) == "\0" * size
        return
    with pytest.raises(NotJson, match=rf"x\.json` has {size} bytes, {64 << 20} at most are read"):
        read_document(path)


@pytest.mark.parametrize("data", [b"\xff", b"\xed\xa0\x80", b"{\xc3", "é".encode("latin-1")])
def test_a_document_that_is_not_utf8_is_no_json(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(NotJson, match=r"x\.json` is not JSON"):
        read_document(tmp_path / "x.json")


# Texts with as many marks of one kind, and how many there are of others.
MARKS = {
    "commas": lambda n: "[" + ",".join("1" * n) + "]",  # n - 1, and a bracket
    "colons": lambda n: '"' + ":" * n + '"',
    "lists in lists": lambda n: "[" * n + "]" * n,
    "empty objects": lambda n: "[" * (n % 2) + "[" + ",".join(["{}"] * (n // 2)) + "]" + "]" * (n % 2),
}


@pytest.mark.parametrize("kind", MARKS)
def test_values_are_counted_before_any_is_made(kind: str) -> None:
    """Each takes memory, whatever it is: nested lists, members of objects, numbers."""
    few = MARKS[kind](19)
    assert parse_json(few, PATH) == json.loads(few)
    largest = 1 << 22
    for count, says in ((largest - 1, "is not JSON"), (largest, f"holds more than {largest} values")):
        with pytest.raises(NotJson, match=rf"config\.json` {says}"):
            parse_json(MARKS[kind](count) + "}", PATH)  # as parsing would find


def test_an_object_counts_its_members_and_itself() -> None:
    more = (1 << 22) - 11
    text = '{"a": {"b": 1}, "c": [{}], "d": "%s"}'  # three objects, four colons, two commas and a list
    assert parse_json(text % ("," * more), PATH) == {"a": {"b": 1}, "c": [{}], "d": "," * more}
    with pytest.raises(NotJson, match="more than 4194304 values"):
        parse_json(text % ("," * (more + 1)), PATH)


@pytest.mark.parametrize("text", ["", "{", "{]", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, "nul"])
def test_what_is_no_json(text: str) -> None:
    for parse in (parse_json, parse_object):
        with pytest.raises(NotJson, match=r"config\.json` is not JSON"):
            parse(text, PATH)


def test_names_that_occur_twice_are_refused_where_that_is_asked_for() -> None:
    for text in ('{"a": 1, "a": 1}', '{"x": [{"a": 1, "b": 2, "\\u0061": 3}]}'):
        assert parse_json(text, PATH)
        with pytest.raises(NotJson, match="occurs twice"):
            parse_json(text, PATH, unique=True)
        with pytest.raises(NotJson, match="occurs twice"):
            parse_object(text, PATH, unique=True)
    assert parse_object('{"a": {"a": 1}}', PATH, unique=True) == {"a": {"a": 1}}


@pytest.mark.parametrize("text", ["[]", "null", "1", '"a"', "true"])
def test_only_an_object_is_one(text: str, tmp_path: Path) -> None:
    assert parse_json(text, PATH) == json.loads(text)
    with pytest.raises(NotJson, match=r"config\.json` holds no JSON object"):
        parse_object(text, PATH)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(NotJson, match=r"x\.json` holds no JSON object"):
        json_object(tmp_path / "x.json")


def test_the_text_of_an_object_comes_with_it(tmp_path: Path) -> None:
    text = '{ "é":\r\n[1] }\n'
    (tmp_path / "x.json").write_bytes(text.encode())
    assert json_object(tmp_path / "x.json") == (text, {"é": [1]})


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", True), ("é\0", True), ("😀", True), (chr(0xD7FF) + chr(0xE000), True), (None, False), (5, False),
     (b"a", False), (["a"], False), *(("a" + chr(it), False) for it in (0xD800, 0xDBFF, 0xDC00, 0xDFFF))],
)  # fmt: skip
def test_text_is_unicode(value: Any, expected: bool) -> None:
    assert is_text(value) is expected


LONGEST = "/".join(["x" * 15] * 256)  # 4095 characters
INSIDE = ["a", "a/b", "..a", "a..", ".a", "x" * 255, "é" * 127 + "x", LONGEST + "x", "a/" * 2047 + "bc"]
OUTSIDE = ["", ".", "..", "/", "/a", "../a", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "a\0b", "\ud800"]
OUTSIDE += ["x" * 256, "é" * 128, "a/" + "x" * 256 + "/b", LONGEST + "/x", LONGEST + "xx"]
OUTSIDE += [None, 5, ["a"], b"a"]  # type: ignore[list-item]


@pytest.mark.parametrize("everywhere", [False, True])
def test_names_that_cannot_leave_their_directory(everywhere: bool) -> None:
    assert [it for it in INSIDE if not is_inside(it, everywhere=everywhere)] == []
    assert [it for it in OUTSIDE if is_inside(it, everywhere=everywhere)] == []


@pytest.mark.skipif(os.name != "posix", reason="elsewhere they lead out")
def test_names_that_lead_out_on_other_systems() -> None:
    names = ["a\\b", "..\\a", "C:a", "a:b"]
    assert [it for it in names if is_inside(it)] == names
    assert [it for it in names if is_inside(it, everywhere=True)] == []


def test_modules_are_a_list_of_objects_or_none_at_all(tmp_path: Path) -> None:
    assert read_modules(tmp_path) == []
    (tmp_path / "modules.json").write_text('[{"path": "1"}, {}]')
    assert read_modules(tmp_path) == [{"path": "1"}, {}]
    for text in ("{}", "[1]", "[{}, null]", '"a"', "["):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(NotJson, match=r"modules\.json` is (no list of modules|not JSON)"):
            read_modules(tmp_path)
    (tmp_path / "modules.json").unlink()
    (tmp_path / "modules.json").mkdir()
    with pytest.raises(InvalidInput, match="not a regular file"):
        read_modules(tmp_path)
