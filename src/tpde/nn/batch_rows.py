"""A batch whose rows are under several deltas: taken apart before a call, and joined after it.

A model is called once for each delta, with the rows that are under it. Only the arguments of that call are
split: of a tensor within the model nobody can say which of its dimensions holds the rows. What is not known
to hold a row for each request, and what cannot be joined, is refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput

ONCE = "call the model once for each delta, under `model.use(name)`"

# Arguments that hold a row for each request, with their dimensions: names that transformers gave a meaning.
ROWS = {"input_ids": 2, "inputs_embeds": 3, "attention_mask": 2, "token_type_ids": 2, "position_ids": 2}
ROWS |= {f"decoder_{name}": dims for name, dims in ROWS.items()}

# Of these, a single row may be that of all requests.
_SHARED = {"position_ids", "decoder_position_ids"}

# What models call a cache, to which all calls would write, and which may be empty yet: transformers 5.24 and
# later the first, earlier versions the others.
CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")

_DEPTH = 6  # in which tensors are looked for: a cache has layers that have tensors


def positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Names of arguments that are given by their places, of a function's signature."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, it in parameters.items() if it.kind in kinds]


def refuse(name: str, why: str, hint: str = ONCE) -> InvalidInput:
    """The error for what cannot be split or joined."""
    return InvalidInput(f"`{name}` {why}", hint=hint, where=name)


class BatchRows:
    """The rows of a batch by the deltas that they are under.

    Parameters
    ----------
    names : sequence of str or None
        For each row, the delta that it is under; None is the base.

    Attributes
    ----------
    places : dict of (str or None) to list of int
        The numbers of the rows under each delta, in the order in which they come first.

    Examples
    --------
    >>> BatchRows(["math", None, "math"]).places
    {'math': [0, 2], None: [1]}
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        self.size = len(names)
        self.places: dict[str | None, list[int]] = {}
        for row, name in enumerate(names):
            self.places.setdefault(name, []).append(row)
        joined = [row for rows in self.places.values() for row in rows]
        self._order = sorted(range(self.size), key=joined.__getitem__)

    # ---- arguments ----

    def split(
        self,
        parameters: Sequence[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        one: bool = False,
        known: Mapping[str, int] = ROWS,
        whole: Collection[str] = (),
    ) -> list[tuple[str | None, tuple[Any, ...], dict[str, Any]]]:
        """What to call a function with for each delta.

        Parameters
        ----------
        parameters : sequence of str
            Names of its positional arguments.
        args, kwargs : sequence, mapping
            What it was called with.
        one : bool
            If one of `args` is a tensor, its first dimension is that of the rows, whatever its name.
        known : mapping of str to int
            Names of what holds a row for each request, with the number of dimensions.
        whole : collection of str
            Names of what goes to each call as it is, and is not looked into.

        Raises
        ------
        InvalidInput
            Naming an argument that may hold rows and is not known to, or has another number of them; if no
            argument holds any.
        """
        tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        alone = tensors[0] if one and len(tensors) == 1 else None
        taken = set[int | str]()
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in given:
            name = key if isinstance(key, str) else _called(parameters, key)
            if name not in whole and self._holds_rows(name, value, known, key == alone):
                mask = one and key != alone and name.endswith("attention_mask")
                if mask and value.shape[1] == self.size > 1:
                    # Of transformers' models it is of rows; of others, maybe of positions by positions.
                    raise refuse(name, f"has shape {list(value.shape)}, whose rows may be positions")
                taken.add(key)
        if not taken:
            raise InvalidInput(
                f"no argument is known to hold a row for each of {self.size} requests",
                hint=f"pass one of {', '.join(known)}, or {ONCE}",
            )
        return [
            (
                name,
                tuple(self._part(it, rows) if i in taken else it for i, it in enumerate(args)),
                {key: self._part(it, rows) if key in taken else it for key, it in kwargs.items()},
            )
            for name, rows in self.places.items()
        ]

    def _holds_rows(self, name: str, value: Any, known: Mapping[str, int], alone: bool) -> bool:
        """Whether an argument is split.

        Raises
        ------
        InvalidInput
            If that is not known.
        """
        if value is None:
            return False
        if not (alone or name in known):
            if name in CACHES or _has_tensors(value):
                raise refuse(name, "is not known to hold one row for each request")
            return False
        if not isinstance(value, Tensor):
            raise refuse(name, f"is a {type(value).__name__}, and is split if it is a tensor")
        if _is_odd(value):
            raise refuse(name, "is a sparse or nested tensor, and cannot be split")
        dims = value.dim()
        if dims == 0 or not (alone or dims == known[name]):
            needed = "a dimension for its rows" if alone else f"{known[name]} dimensions"
            raise refuse(name, f"has shape {list(value.shape)}, and is split if it has {needed}")
        if not alone and name in _SHARED and value.shape[0] == 1 < self.size:
            return False  # so each call gets it
        if value.shape[0] != self.size:
            raise InvalidInput(
                f"`{name}` has {value.shape[0]} rows, and `use` was given deltas for {self.size}",
                hint="call `model.use` with a name for each row",
                where=name,
                found=value.shape[0],
                needed=self.size,
            )
        return True

    def _part(self, value: Tensor, rows: list[int]) -> Tensor:
        return value if len(self.places) == 1 else value[torch.tensor(rows, device=value.device)]

    # ---- results ----

    def join(self, found: Sequence[Any], name: str = "the output") -> Any:
        """One result of those of all calls, in the order of the rows.

        Parameters
        ----------
        found : sequence
            Tensors whose first dimension is that of a call's rows; or tuples, lists, mappings or dataclasses
            of them, such as transformers' outputs.
        name : str
            What errors call it.

        Raises
        ------
        InvalidInput
            Naming what is not of this kind.
        """
        first = found[0]
        if any(isinstance(it, Tensor) and _is_odd(it) for it in found):
            raise refuse(name, "is a sparse or nested tensor, and cannot be joined")
        if isinstance(first, Tensor) and all(isinstance(it, Tensor) for it in found):
            counts = [len(rows) for rows in self.places.values()]
            if any(it.dim() == 0 or it.shape[0] != n for it, n in zip(found, counts, strict=True)):
                raise refuse(name, f"has shape {list(first.shape)} of {counts[0]} rows, and cannot be joined")
            if any((it.shape[1:], it.dtype) != (first.shape[1:], first.dtype) for it in found):
                raise refuse(name, "has another shape or dtype for other rows, and cannot be joined")
            return self.rows_of(found)
        kind = type(first)
        if any(type(it) is not kind for it in found):
            raise refuse(name, "is of another kind for other rows, and cannot be joined")
        if first is None:
            return None
        parts = _parts_of(first, name)
        if parts is None:
            raise refuse(name, f"is a {kind.__name__}, and cannot be joined")
        each = [_parts_of(it, name) or {} for it in found]
        if any(it.keys() != parts.keys() for it in each):
            raise refuse(name, "has other parts for other rows, and cannot be joined")
        made = [self.join([it[key] for it in each], key) for key in parts]
        try:
            return _like(first, made)
        except (TypeError, ValueError) as error:
            raise refuse(
                name, f"is a {kind.__name__}, and cannot be made of joined parts ({error})"
            ) from None

    def rows_of(self, found: Sequence[Tensor], each: int = 1) -> Tensor:
        """Tensors of all calls, with `each` rows for each of a call's, as one in the order of the batch."""
        if len(found) == 1:
            return found[0]
        whole = torch.cat(list(found))
        if self._order == list(range(self.size)):
            return whole
        order = [each * place + i for place in self._order for i in range(each)]
        return whole[torch.tensor(order, device=whole.device)]


def _is_odd(tensor: Tensor) -> bool:
    """Whether a tensor has no rows that an index selects: it is sparse, or nested."""
    return tensor.is_nested or tensor.layout is not torch.strided


def _called(parameters: Sequence[str], place: int) -> str:
    return parameters[place] if place < len(parameters) else f"argument {place + 1}"


def _has_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Whether something holds tensors, or is there to: caches of transformers begin without any."""
    if isinstance(value, (Tensor, np.ndarray)) or any(it.__name__ == "Cache" for it in type(value).__mro__):
        return True
    if not depth or isinstance(value, (str, bytes, range, type, nn.Module)):
        return False
    return any(_has_tensors(it, depth - 1) for it in _inner(value))


def _inner(value: Any) -> Iterator[Any]:
    """What something consists of, as far as Python tells."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, Collection):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.args, value.keywords)
    else:
        yield from getattr(value, "__dict__", {}).values()
        names = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        for it in itertools.chain.from_iterable((one,) if isinstance(one, str) else one for one in names):
            yield getattr(value, it, None)
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield cell.cell_contents


def _parts_of(value: Any, name: str) -> dict[str, Any] | None:
    """What a result is made of, by what errors call it; None if it is no container."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        more = isinstance(value, Mapping) and not value.keys() <= {it.name for it in fields}
        if more or not all(it.init for it in fields):
            return None
        return {it.name: getattr(value, it.name) for it in fields}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"{name}[{key!r}]": it for key, it in value.items()}
    if isinstance(value, (tuple, list)):
        return {f"{name}[{i}]": it for i, it in enumerate(value)}
    return None


def _like(value: Any, parts: list[Any]) -> Any:
    """A container as another one is, of other parts."""
    kind: Any = type(value)
    if dataclasses.is_dataclass(value):
        return kind(**dict(zip((it.name for it in dataclasses.fields(value)), parts, strict=True)))
    if isinstance(value, Mapping):
        return kind(dict(zip(value, parts, strict=True)))
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
