"""Indexes of checkpoints in shards: which file holds which tensor.

>>> index = read_index(Path("model/model.safetensors.index.json"))  # doctest: +SKIP
>>> index.files()  # doctest: +SKIP
[PosixPath('model/model-00001-of-00002.safetensors'), PosixPath('model/model-00002-of-00002.safetensors')]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tpde.errors import InvalidInput, printable
from tpde.files.documents import is_inside, is_text, parse_object, read_document

# diffusers writes the variant behind `index`, or before `.safetensors` with all else.
_INDEX = re.compile(r".+\.safetensors\.index(\.[^.]+)?\.json")
_WHOLE = re.compile(r"(.+)(\.safetensors|\.bin)\.index(\.[^.]+)?\.json")


def is_index(name: str) -> bool:
    """Whether a file is an index of safetensors shards, by its name."""
    return _INDEX.fullmatch(name) is not None


def whole_file(name: str) -> str:
    """The name that a model's only weight file has, by that of the index which it has in shards.

    Examples
    --------
    >>> whole_file("model.safetensors.index.fp16.json")
    'model.fp16.safetensors'
    """
    return _WHOLE.sub(r"\1\3\2", name)


@dataclass(frozen=True)
class ShardIndex:
    """What an index says. Its names are strings of Unicode, and those of files lie below its folder.

    Attributes
    ----------
    path : Path
        Where it is.
    text : str
        Its text.
    weight_map : dict of str to str
        The relative path of the file that holds a tensor, by the tensor's name. Not empty.
    rest : dict of str to object
        What else it has, such as `metadata`.
    """

    path: Path
    text: str
    weight_map: dict[str, str]
    rest: dict[str, object]

    def names(self) -> list[str]:
        """Relative paths of the files, each once, in order."""
        return sorted(set(self.weight_map.values()))

    def files(self) -> list[Path]:
        """The files, each once, in order; they may be missing."""
        return [self.path.parent / name for name in self.names()]

    def renamed(self, rename: Callable[[str, str], str]) -> str:
        """The text of an index with other names of tensors; `rename` gets a name and its file's."""
        weights = {rename(name, file): file for name, file in self.weight_map.items()}
        # In the place that it had: `rest` has it, too.
        return _text(self.rest | {"weight_map": weights})

    def with_files(self, names: Mapping[str, str]) -> ShardIndex:
        """An index whose files have other names; `names` maps all of them."""
        weights = {name: names[file] for name, file in self.weight_map.items()}
        rest = self.rest | {"weight_map": weights}
        return ShardIndex(self.path, _text(rest), weights, rest)


def _text(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def read_index(path: Path) -> ShardIndex:
    """Read an index.

    Raises
    ------
    InvalidInput
        If it is no regular file, too large, no JSON, or no index: without a `weight_map` of names to files
        below its folder. Says what was found.
    """
    return parse_index(read_document(path), path)


def parse_index(text: str, path: Path) -> ShardIndex:
    """The index that a text is; `path` is where it is from."""
    value = parse_object(text, path, unique=True)
    weights = value.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        _refuse(path, "it has no `weight_map` of names to files")
    for name, file in weights.items():
        if not is_text(name):
            _refuse(path, f"the name {name[:200]!a} is no Unicode")
        if not is_inside(file, everywhere=True):
            _refuse(path, f"`{printable(name[:200])}` is in {ascii(file)[:200]}, which is no file below it")
    if not isinstance(value.get("metadata", {}), dict):
        _refuse(path, "its `metadata` is no object")
    return ShardIndex(path, text, weights, value)


def _refuse(path: Path, why: str) -> NoReturn:
    raise InvalidInput(f"`{path}` is not an index of shards: {why}", hint="mend it, or fetch it again")
