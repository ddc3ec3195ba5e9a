"""A state of training taken apart: tensors by name, and a text of all else (checkpoint-store.md 2)."""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput
from tpde.files.given_tensors import refuse_without_bytes
from tpde.format.container import TensorSpec
from tpde.format.json_values import values_in
from tpde.frameworks import (
    numpy_dtype_name,
    refuse_expanded,
    refuse_masked,
    spec_of,
    torch_bytes,
    torch_spec,
)
from tpde.store.tree_text import MAPPINGS, MAX_DEPTH, MAX_TREE_BYTES, MAX_TREE_VALUES, is_too_large

if TYPE_CHECKING:
    import torch

    Leaf = torch.Tensor | np.ndarray[Any, Any]

MAX_INT_BITS = 4096


class StateTree:
    """A state, taken apart.

    Parameters
    ----------
    state : object
        Dicts, lists, tuples, tensors, packed or not, arrays, numbers, texts, bytes, None, and PyTorch's
        sizes, dtypes and devices, in each other.

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
        If there is anything else in it, or more than is read back, naming where.
    UnsupportedDtype
        If safetensors has no name for a dtype.
    """

    def __init__(self, state: object) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._known: dict[object, str] = {}
        tree = self._node(state, ())
        self.text = _text_of(tree)
        if is_too_large(self.text):
            raise _too_large(tree, self.text)

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
        refuse_masked(_shown(path), value)
        if isinstance(value, np.matrix):
            raise InvalidInput(
                f"`{_shown(path)}` is a matrix, and would come back as an array, with other products",
                hint="store `np.asarray(...)` of it",
                where=_shown(path),
            )
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
        if _is_packed(value):
            return ["tensor", self._leaf(value, torch_spec(_shown(path), value), id(value.packed), path)]
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise InvalidInput(
                    f"`{_shown(path)}` is a {type(value).__name__}, which has no plain bytes in memory",
                    hint="call `.full_tensor()` if it is sharded",
                    where=_shown(path),
                )
            spec = torch_spec(_shown(path), value)
            refuse_without_bytes(_shown(path), value)
            refuse_expanded(_shown(path), spec.nbytes, value.untyped_storage().nbytes())
            read = value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()
            same = (value.device, value.data_ptr(), *read) if value.numel() else id(value)
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
        others = (f"{stem}'{number}" for number in itertools.count(len(self.leaves)))
        free = (it for it in itertools.chain([stem], others) if it not in self.leaves)
        name = next(it for it in free if it != "__metadata__")
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


def _text_of(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))


def _entries(tree: Any) -> list[tuple[object, Any]]:
    """What a node of a tree holds that may be large, with what names it."""
    if isinstance(tree, dict):
        found = list(tree.items())
    elif not isinstance(tree, list):
        return []
    elif tree[0] in MAPPINGS:
        found = list(tree[1:])
    else:
        found = list(enumerate(tree[1:])) if tree[0] in ("list", "tuple") else []
    return [(key, it) for key, it in found if isinstance(it, (dict, list, str))]


def _share(text: str) -> float:
    """How much a text has of what is read back."""
    return max(len(text) / MAX_TREE_BYTES, values_in(text) / MAX_TREE_VALUES)


def _place_of(share: float, tree: Any) -> tuple[object, ...]:
    """Where the smallest node is that has more than a share."""
    for key, it in _entries(tree):
        if _share(_text_of(it)) > share:
            return key, *_place_of(share, it)
    return ()


def _too_large(tree: Any, text: str) -> InvalidInput:
    """The error for a state that nobody could load, which names what has more than half of it."""
    where, values = _shown(_place_of(_share(text) / 2, tree)), values_in(text)
    return InvalidInput(
        f"`{where}` makes the state too large: but for its tensors it has {values} values in {len(text)} "
        f"characters, less than {MAX_TREE_VALUES} in at most {MAX_TREE_BYTES} are stored",
        hint="store it as a tensor or an array",
        where=where,
    )


def _is_packed(value: object) -> bool:
    """Whether a value is a packed weight: it is decoded when its bytes are read, one at a time."""
    defining = sys.modules.get("tpde.weights.parameter")  # which is above this
    return defining is not None and type(value) is defining.PackedParameter


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
