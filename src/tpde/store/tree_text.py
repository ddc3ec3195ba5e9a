"""The text of a tree, read within bounds, and the tensors that it names (checkpoint-store.md 2)."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from tpde.errors import Corrupt
from tpde.format.json_values import values_in

MAX_DEPTH = 64
MAX_TREE_BYTES, MAX_TREE_VALUES = 64 << 20, 1 << 22

LEAVES = ("tensor", "array", "scalar")
MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}


def is_too_large(text: str) -> bool:
    """Whether the text of a tree is more than is read."""
    return len(text) > MAX_TREE_BYTES or values_in(text) >= MAX_TREE_VALUES


def parse_tree(text: str, where: str) -> Any:
    """The JSON of a tree, within bounds.

    Raises
    ------
    Corrupt
        If it is none.
    """
    try:
        if is_too_large(text):
            raise ValueError("it is too large")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(where, error) from None


def is_mapping(tree: Any) -> bool:
    """Whether a tree, as `parse_tree` gives it, is one of those with keys."""
    return isinstance(tree, dict) or (
        isinstance(tree, list) and tree[:1] != [] and isinstance(tree[0], str) and tree[0] in MAPPINGS
    )


def map_tensors(
    tree: Any, place: Callable[[tuple[str, ...], Any], Any], known: Callable[[Any], bool], where: str
) -> Any:
    """A tree with something else in the place of its tensors' names.

    Parameters
    ----------
    tree : object
        As `parse_tree` gives it.
    place : callable
        Called with a tensor's path below the tree and its name; gives what takes its place.
    known : callable
        Called with what should be a name: whether there is such a tensor.
    where : str
        What the tree is from, for messages.

    Raises
    ------
    Corrupt
        If a node is none, or names a tensor that is not there.
    """

    def node(value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > MAX_DEPTH + 1:
            raise damaged(where, ValueError(f"it is more than {MAX_DEPTH} levels deep"))
        if isinstance(value, dict):
            return {key: node(it, (*path, key)) for key, it in value.items()}
        if not isinstance(value, list):
            return value
        if not value or not isinstance(value[0], str):
            raise damaged(where, ValueError("a node has no kind"))
        kind, rest = value[0], value[1:]
        if kind in LEAVES:
            if len(rest) != 1 or not known(rest[0]):
                raise damaged(where, ValueError(f"there is no tensor {str(rest)[:200]!a}"))
            return [kind, place(path, rest[0])]
        if kind in MAPPINGS:
            return [kind, *([it[0], node(it[1], (*path, str(it[0])))] for it in _pairs_of(rest, where))]
        return [kind, *(node(it, (*path, str(i))) for i, it in enumerate(rest))]

    return node(tree, ())


def one_of(names: Collection[str]) -> Callable[[Any], bool]:
    """Whether something is one of these names, for `map_tensors`."""
    return lambda it: isinstance(it, str) and it in names


def _pairs_of(rest: list[Any], where: str) -> list[Any]:
    if not all(isinstance(it, list) and len(it) == 2 for it in rest):
        raise damaged(where, ValueError("a dict has no pairs"))
    return rest


def damaged(where: str, error: BaseException) -> Corrupt:
    """The error for a tree that is none."""
    return Corrupt(
        f"`{where}`: the tree of its state is damaged ({error})",
        hint="take another step",
        where=where,
    )
