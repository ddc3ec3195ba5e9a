"""JSON files of strangers, read within bounds."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath

from tpde.errors import InvalidInput, NotJson
from tpde.format.json_values import values_in
from tpde.io.sources import open_regular

MAX_JSON_BYTES = 64 << 20  # the index of a model of a trillion weights, in 384 experts a block, has 18 MB
MAX_JSON_VALUES = 1 << 22  # each takes up to some 100 bytes of memory, however few in the file
MAX_PATH, MAX_NAME = 4096, 255  # no file system has longer paths, or names in them (bytes)

_ELSEWHERE = "\\\0:"  # where `\\` and `:` lead out of a directory
_HERE = "\0" if os.name == "posix" else _ELSEWHERE

_SURROGATE = re.compile("[\ud800-\udfff]")


def is_text(value: object) -> bool:
    """Whether a value is Unicode text: JSON lets halves of surrogate pairs through."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def is_inside(name: object, *, everywhere: bool = False) -> bool:
    """Whether a name from a file is a plain relative path that cannot leave its directory.

    With `everywhere` on no system; otherwise on this one.
    """
    if not isinstance(name, str) or len(name) > MAX_PATH or not is_text(name):
        return False
    path, refused = PurePosixPath(name), _ELSEWHERE if everywhere else _HERE
    if any(len(part.encode()) > MAX_NAME for part in path.parts) or set(refused) & set(name):
        return False
    return path.as_posix() == name and name != "." and not path.is_absolute() and ".." not in path.parts


def read_document(path: Path) -> str:
    """The text of a regular file of at most `MAX_JSON_BYTES`.

    Raises
    ------
    InvalidInput
        If it cannot be opened, or is something else, such as a pipe, which would be waited for.
    NotJson
        If it is too large, or not UTF-8.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise NotJson(
                f"`{path}` has {os.fstat(file.fileno()).st_size} bytes, {MAX_JSON_BYTES} at most are read",
                hint="mend it, or fetch it again",
            )
    try:
        return data.decode("utf-8")
    except ValueError as error:
        raise NotJson(f"`{path}` is not JSON ({error})", hint="mend it, or fetch it again") from None


def refuse_unread(text: str, name: str, why: str = "") -> None:
    """Refuse to write a document that `read_document` or `parse_json` would refuse.

    Raises
    ------
    InvalidInput
        If it is one.
    """
    size, values, more = len(text.encode()), values_in(text), ""
    if size > MAX_JSON_BYTES:
        more = f"{size} bytes, {MAX_JSON_BYTES} at most"
    elif values >= MAX_JSON_VALUES:
        more = f"{values} values, less than {MAX_JSON_VALUES}"
    if more:
        raise InvalidInput(
            f"`{name}` would have {more} are read{why}", hint="leave files out with `--exclude`", where=name
        )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found


def parse_json(text: str, path: Path, *, unique: bool = False) -> object:
    """What a text of JSON says; `path` is where it is from, for messages.

    Raises
    ------
    NotJson
        If it is no JSON, or too deep, or holds more than `MAX_JSON_VALUES` values; with `unique` if a name
        occurs twice in an object: readers differ in which they take.
    """
    if values_in(text) >= MAX_JSON_VALUES:
        raise NotJson(
            f"`{path}` holds more than {MAX_JSON_VALUES} values, which is no description of a model",
            hint="mend it, or fetch it again",
        )
    try:
        found: object = json.loads(text, object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        raise NotJson(f"`{path}` is not JSON ({error})", hint="mend it, or fetch it again") from None
    return found


def parse_object(text: str, path: Path, *, unique: bool = False) -> dict[str, object]:
    """The object that a text of JSON is.

    Raises
    ------
    NotJson
        As `parse_json`, or if it is no object.
    """
    value = parse_json(text, path, unique=unique)
    if not isinstance(value, dict):
        raise NotJson(f"`{path}` holds no JSON object", hint="mend it, or fetch it again")
    return value


def json_object(path: Path) -> tuple[str, dict[str, object]]:
    """The text of a JSON file, and the object that it holds.

    Raises
    ------
    InvalidInput
        As `read_document` and `parse_object`.
    """
    text = read_document(path)
    return text, parse_object(text, path)


def read_modules(folder: Path) -> list[dict[str, object]]:
    """The modules of a sentence-transformers model, as its `modules.json` lists them; none without one.

    Raises
    ------
    InvalidInput
        As `read_document` and `parse_json`, or if it is no list of objects.
    """
    path = folder / "modules.json"
    if not path.exists():
        return []
    found = parse_json(read_document(path), path)
    if not isinstance(found, list) or not all(isinstance(it, dict) for it in found):
        raise NotJson(f"`{path}` is no list of modules", hint="mend it, or fetch it again")
    return found
