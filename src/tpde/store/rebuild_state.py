"""A state of training made again from its tree and its tensors (checkpoint-store.md 2)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tpde.codec.native import Bytes
from tpde.format.container import TensorSpec
from tpde.frameworks import to_numpy, to_torch
from tpde.store.tree_text import LEAVES, MAPPINGS, MAX_DEPTH, damaged


class _Builder:
    """Makes a state again, checking every node: the text is a stranger's."""

    def __init__(self, read: Callable[[str], tuple[Bytes, TensorSpec]], map_location: Any) -> None:
        self._read, self._map = read, map_location
        self._made: dict[tuple[str, str], Any] = {}

    def node(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH + 1:
            raise ValueError(f"it is more than {MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            return {key: self.node(it, depth + 1) for key, it in value.items()}
        if not isinstance(value, list):
            return value
        if not value or not isinstance(value[0], str):
            raise ValueError("a node has no kind")
        kind, rest = value[0], value[1:]
        if kind in ("list", "tuple"):
            items = [self.node(it, depth + 1) for it in rest]
            return items if kind == "list" else tuple(items)
        if kind in MAPPINGS:
            return MAPPINGS[kind](self._pairs(rest, depth))
        if kind == "size":
            return self._size(rest)
        if len(rest) != 1 or not isinstance(rest[0], str):
            raise ValueError(f"a node of kind {kind[:40]!a} is none")
        return self._leaf(kind, rest[0])

    def _pairs(self, rest: list[Any], depth: int) -> Iterator[tuple[Any, Any]]:
        for it in rest:
            if not isinstance(it, list) or len(it) != 2:
                raise ValueError("a dict has no pairs")
            key = self.node(it[0], depth + 1)
            hash(key)
            yield key, self.node(it[1], depth + 1)

    def _size(self, rest: list[Any]) -> Any:
        import torch

        if not all(type(n) is int and 0 <= n < 1 << 62 for n in rest):
            raise ValueError("a size has other than numbers")
        return torch.Size(rest)

    def _leaf(self, kind: str, text: str) -> Any:
        if kind in LEAVES:
            if (kind, text) not in self._made:
                self._made[kind, text] = self._tensor(kind, text)
            return self._made[kind, text]
        if kind == "float":
            return struct.unpack("<d", bytes.fromhex(text))[0]
        if kind == "complex":
            return complex(*struct.unpack("<2d", bytes.fromhex(text)))
        if kind in ("bytes", "bytearray"):
            data = base64.b64decode(text, validate=True)
            return data if kind == "bytes" else bytearray(data)
        if kind in ("dtype", "device"):
            return self._of_torch(kind, text)
        raise ValueError(f"there is no kind of node {kind[:40]!a}")

    def _tensor(self, kind: str, name: str) -> Any:
        try:
            data, spec = self._read(name)
        except KeyError:
            raise ValueError(f"there is no tensor {name[:200]!a}") from None
        if kind == "tensor":
            tensor = to_torch(data, spec)
            return tensor if self._map is None else tensor.to(self._map)
        array = to_numpy(data, spec)
        return array if kind == "array" else array[()]

    def _of_torch(self, kind: str, text: str) -> Any:
        import torch

        if kind == "device":
            try:
                return torch.device(text)
            except RuntimeError:
                raise ValueError(f"there is no device {text[:40]!a}") from None
        found = getattr(torch, text, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"PyTorch has no dtype {text[:40]!a}")
        return found


def rebuild(
    tree: Any, where: str, read: Callable[[str], tuple[Bytes, TensorSpec]], map_location: Any = None
) -> Any:
    """Make a state again.

    Parameters
    ----------
    tree : object
        As `parse_tree` gives it.
    where : str
        What it is from, for messages.
    read : callable
        Gives a tensor's bytes, which become the state's, and what it is; raises KeyError if there is none.
    map_location : torch.device or str, optional
        Where tensors go; by default they stay in the processor's memory.

    Raises
    ------
    Corrupt
        If it is no tree, or names a tensor that is not there.
    UnsupportedDtype, MissingDependency
        If PyTorch or NumPy cannot hold a tensor.
    """
    try:
        return _Builder(read, map_location).node(tree)
    except (ValueError, TypeError, struct.error) as error:
        raise damaged(where, error) from None
