"""States of training, trees of tensors and numbers, as tensors by name and a text (checkpoint-store.md 2)."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tpde.codec.native import Bytes
from tpde.errors import Corrupt, InvalidInput
from tpde.format.container import TensorSpec
from tpde.frameworks import (
    numpy_dtype_name,
    refuse_expanded,
    spec_of,
    to_numpy,
    to_torch,
    torch_bytes,
    torch_spec,
)

if TYPE_CHECKING:
    import torch

    Leaf = torch.Tensor | np.ndarray[Any, Any]

MAX_DEPTH = 64
MAX_INT_BITS = 4096
MAX_TREE_BYTES, MAX_TREE_VALUES = 64 << 20, 1 << 22


class Tree:
    """A state, taken apart.

    Parameters
    ----------
    state : object
        Dicts, lists, tuples, tensors, arrays, numbers, texts, bytes, None, and PyTorch's sizes, dtypes and
        devices, in each other.

    Attributes
    ----------
    text : str
        All but the tensors' bytes, as JSON.
    leaves : dict of str to torch.Tensor or ndarray
        The tensors, each once, by names made from where they are.
    specs : dict of str to TensorSpec
        Their dtypes and shapes.

    Raises
    ------
    InvalidInput
        If there is anything else in it, naming where.
    UnsupportedDtype
        If safetensors has no name for a dtype.
    """

    def __init__(self, state: object) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._known: dict[object, str] = {}
        self.text = json.dumps(self._node(state, ()), ensure_ascii=False, separators=(",", ":"))

    def _node(self, value: Any, path: tuple[object, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise InvalidInput(
                f"the state is more than {MAX_DEPTH} levels deep at `{_shown(path)}`",
                hint="a state may not hold itself",
                where=_shown(path),
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(value, path)
        if kind is int:
            if value.bit_length() > MAX_INT_BITS:
                raise InvalidInput(
                    f"`{_shown(path)}` is a number of {value.bit_length()} bits, {MAX_INT_BITS} at most are "
                    "stored",
                    where=_shown(path),
                )
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", struct.pack("<d", value).hex()]
        if kind is complex:
            return ["complex", struct.pack("<2d", value.real, value.imag).hex()]
        if kind in (bytes, bytearray):
            return ["bytes" if kind is bytes else "bytearray", base64.b64encode(value).decode()]
        if kind in (list, tuple):
            return [kind.__name__, *(self._node(it, (*path, i)) for i, it in enumerate(value))]
        if isinstance(value, Mapping) and kind in _KIND_OF:
            return self._mapping(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return ["array" if isinstance(value, np.ndarray) else "scalar", self._array(value, path)]
        return self._of_torch(value, path)

    def _text(self, value: str, path: tuple[object, ...]) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(
                f"a text in `{_shown(path)}` is no Unicode: it has half of a pair of surrogates",
                where=_shown(path),
            ) from None
        return value

    def _mapping(self, value: Mapping[Any, Any], path: tuple[object, ...]) -> Any:
        kind = _KIND_OF[type(value)]
        if kind == "dict" and all(type(key) is str for key in value):
            return {self._text(key, path): self._node(it, (*path, key)) for key, it in value.items()}
        return [kind, *([self._key(key, path), self._node(it, (*path, key))] for key, it in value.items())]

    def _key(self, key: Any, path: tuple[object, ...]) -> Any:
        if key is not None and type(key) not in (str, int, float, bool, bytes, tuple):
            raise InvalidInput(
                f"`{_shown(path)}` has a key that is a {type(key).__name__}",
                hint="take texts or numbers as keys",
                where=_shown(path),
            )
        return self._node(key, path)

    def _array(self, value: Any, path: tuple[object, ...]) -> str:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.fields is not None:
            raise InvalidInput(
                f"`{_shown(path)}` is an array of {array.dtype}", hint="take it apart", where=_shown(path)
            )
        spec = spec_of(_shown(path), numpy_dtype_name(array.dtype), array.shape)
        refuse_expanded(_shown(path), spec.nbytes, _reach(array))
        return self._leaf(array, spec, id(value) if isinstance(value, np.ndarray) else object(), path)

    def _of_torch(self, value: Any, path: tuple[object, ...]) -> Any:
        try:
            import torch
        except ImportError:
            raise _no_state(value, path) from None
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise InvalidInput(
                    f"`{_shown(path)}` is a {type(value).__name__}, which has no plain bytes in memory",
                    hint="call `tpde.unpack_module(model)` first if it is packed, `.full_tensor()` if it is "
                    "sharded",
                    where=_shown(path),
                )
            spec = torch_spec(_shown(path), value)
            refuse_expanded(_shown(path), spec.nbytes, value.untyped_storage().nbytes())
            same = (
                (value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj())
                if value.numel()
                else id(value)
            )
            return ["tensor", self._leaf(value.detach(), spec, same, path)]
        if type(value) is torch.Size:
            return ["size", *value]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        raise _no_state(value, path)

    def _leaf(self, leaf: Any, spec: TensorSpec, same: object, path: tuple[object, ...]) -> str:
        """The name of a tensor, which has one wherever it is again."""
        if same in self._known:
            return self._known[same]
        stem = self._text("/".join(map(str, path)), path) or "tensor"
        name = stem
        while name in self.leaves or name == "__metadata__":
            name = f"{stem}'{len(self.leaves)}"
        self.leaves[name], self.specs[name], self._known[same] = leaf, spec, name
        return name


_KIND_OF = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def _reach(array: Any) -> int:
    """Bytes from an array's first element in memory to its last."""
    if not array.size:
        return 0
    return int(sum((n - 1) * abs(step) for n, step in zip(array.shape, array.strides, strict=True))) + int(
        array.itemsize
    )


def _shown(path: tuple[object, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def _no_state(value: object, path: tuple[object, ...]) -> InvalidInput:
    return InvalidInput(
        f"`{_shown(path)}` is a {type(value).__module__}.{type(value).__qualname__}, which is not stored",
        hint="a state is made of dicts, lists, tuples, tensors, arrays, numbers, texts, bytes and None; take "
        "its `state_dict()` if it has one",
        where=_shown(path),
    )


def leaf_bytes(leaf: Any) -> Bytes:
    """The bytes of a tensor or an array; what lies contiguous in the processor's memory is not copied."""
    if not isinstance(leaf, np.ndarray):
        return torch_bytes(leaf)
    array = np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("<"))
    data: Bytes = array.reshape(-1).view(np.uint8)
    return data


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
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](self._pairs(rest, depth))
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
        if kind in _LEAVES:
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


_LEAVES = ("tensor", "array", "scalar")
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}


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
        raise _damaged(where, error) from None


def parse_tree(text: str, where: str) -> Any:
    """The JSON of a tree, within bounds.

    Raises
    ------
    Corrupt
        If it is none.
    """
    try:
        if len(text) > MAX_TREE_BYTES or sum(map(text.count, ",:[{")) >= MAX_TREE_VALUES:
            raise ValueError("it is too large")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, error) from None


def _damaged(where: str, error: BaseException) -> Corrupt:
    return Corrupt(
        f"`{where}`: the tree of its state is damaged ({error})",
        hint="take another step",
        where=where,
    )


def is_mapping(tree: Any) -> bool:
    """Whether a tree, as `parse_tree` gives it, is one of those with keys."""
    return isinstance(tree, dict) or (
        isinstance(tree, list) and tree[:1] != [] and isinstance(tree[0], str) and tree[0] in _MAPPINGS
    )


def map_tensors(
    tree: Any, place: Callable[[tuple[str, ...], str], Any], known: Collection[str], where: str
) -> Any:
    """A tree with something else in the place of its tensors' names.

    Parameters
    ----------
    tree : object
        As `parse_tree` gives it.
    place : callable
        Called with a tensor's path below the tree and its name; gives what takes its place.
    known : collection of str
        The tensors that there are.
    where : str
        What the tree is from, for messages.

    Raises
    ------
    Corrupt
        If a node is none, or names a tensor that is not there.
    """

    def node(value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > MAX_DEPTH + 1:
            raise _damaged(where, ValueError(f"it is more than {MAX_DEPTH} levels deep"))
        if isinstance(value, dict):
            return {key: node(it, (*path, key)) for key, it in value.items()}
        if not isinstance(value, list):
            return value
        if not value or not isinstance(value[0], str):
            raise _damaged(where, ValueError("a node has no kind"))
        kind, rest = value[0], value[1:]
        if kind in _LEAVES:
            if len(rest) != 1 or rest[0] not in known:
                raise _damaged(where, ValueError(f"there is no tensor {str(rest)[:200]!a}"))
            return [kind, place(path, rest[0])]
        if kind in _MAPPINGS:
            return [kind, *([it[0], node(it[1], (*path, str(it[0])))] for it in _pairs_of(rest, where))]
        return [kind, *(node(it, (*path, str(i))) for i, it in enumerate(rest))]

    return node(tree, ())


def _pairs_of(rest: list[Any], where: str) -> list[Any]:
    if not all(isinstance(it, list) and len(it) == 2 for it in rest):
        raise _damaged(where, ValueError("a dict has no pairs"))
    return rest
