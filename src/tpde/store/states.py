"""A state of a model: tensors and files whose bytes are known, wherever they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Protocol

from tpde.codec.native import Bytes
from tpde.errors import MissingBase
from tpde.format.container import TensorSpec
from tpde.format.container_reader import parse_header
from tpde.format.container_writer import canonical_header

MEMORY = "<memory>"  # what messages call a state that lies there

Key = tuple[str, str]
"""A tensor: the name of its file and its own."""


class State(Protocol):
    """A model as it was at one time.

    Attributes
    ----------
    name : str
        What messages call it.
    """

    name: str

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The headers of its weight files, by their relative paths; one file alone has an empty one."""

    @property
    def specs(self) -> Mapping[Key, TensorSpec]:
        """All tensors, in the order of their bytes."""

    @property
    def others(self) -> Mapping[str, Callable[[], bytes]]:
        """What reads each other file."""

    @property
    def other_bytes(self) -> Mapping[str, int]:
        """Sizes of other files that lie there as files; what a delta holds is no larger than it may be."""

    def read(self, key: Key, threads: int) -> Bytes:
        """Read a tensor. The bytes are the caller's, but for a `MemoryState`'s."""

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Read a tensor's bytes, each from one chunk's start to one's end (delta.md 3.1).

        For what does not depend on them, such as the choice of a model: no hash of the tensor is compared.
        The bytes are the caller's.
        """

    def close(self) -> None:
        """Close all files."""


class MemoryState:
    """Tensors in memory as the one nameless file of a state.

    Parameters
    ----------
    specs : mapping of str to TensorSpec
        The tensors; none for a state of nothing, on which all is new.
    read : callable
        Gives a tensor's bytes by its name. They may be the tensor's own memory.
    metadata : mapping of str to str
        Of the file.
    name : str
        What messages call it.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        read: Callable[[str], Bytes],
        metadata: Mapping[str, str] | None = None,
        name: str = MEMORY,
    ) -> None:
        self.name, self._read = name, read
        header = canonical_header(specs, metadata or {})
        self.headers: Mapping[str, bytes] = {"": header}
        self.specs: Mapping[Key, TensorSpec] = {
            ("", name): spec for name, spec in parse_header(header, self.name).specs.items()
        }
        self.others: Mapping[str, Callable[[], bytes]] = {}
        self.other_bytes: Mapping[str, int] = {}

    def is_of(self, specs: Mapping[str, TensorSpec]) -> bool:
        """Whether it has these tensors."""
        return {key[1]: spec for key, spec in self.specs.items()} == specs

    def of(self, read: Callable[[str], Bytes]) -> MemoryState:
        """Another state of the same tensors, which `read` gives."""
        state = copy.copy(self)
        state._read = read
        return state

    def read(self, key: Key, threads: int) -> Bytes:
        """The bytes of a tensor."""
        return self._read(key[1])

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Copies of some bytes of a tensor."""
        whole = self._read(key[1])
        return [whole[begin:end].copy() for begin, end in ranges]

    def close(self) -> None:
        """None: it is the caller's."""


def nothing() -> State:
    """A state without tensors: on it, all is new."""

    def read(name: str) -> Bytes:
        raise KeyError(name)

    return MemoryState({}, read, name="<nothing>")


def right_base(name: str) -> str:
    """What to do where a base of this name is not the one that a delta was made from."""
    if name == MEMORY:
        return (
            "load the weights that the delta was made from, and apply the deltas since then in their order; "
            "or make the delta anew from these"
        )
    return "name the base that the delta was made from"


class BaseTensors:
    """Where the tensors of a target have their base (delta.md 5.3)."""

    def __init__(self, specs: Mapping[Key, TensorSpec], name: str) -> None:
        self._specs, self._name = specs, name
        self._by_name: dict[str, list[Key]] = {}
        for key in specs:
            self._by_name.setdefault(key[1], []).append(key)

    def find(self, key: Key) -> Key | None:
        """The base's tensor for one of the target, or None."""
        if key in self._specs:
            return key
        found = self._by_name.get(key[1], [])
        return found[0] if len(found) == 1 else None

    def need(self, key: Key, spec: TensorSpec) -> Key:
        """The base's tensor, which must be there.

        Raises
        ------
        MissingBase
            If it is not, or has another dtype or shape.
        """
        found = self.find(key)
        if found is None:
            raise MissingBase(
                f"tensor `{key[1]}` is not in the base `{self._name}`",
                hint=right_base(self._name),
                where=key[1],
            )
        has = self._specs[found]
        if has != spec:
            raise MissingBase(
                f"tensor `{key[1]}` is {has.dtype} {list(has.shape)} in the base `{self._name}`, the "
                f"delta needs {spec.dtype} {list(spec.shape)}",
                hint=right_base(self._name),
                where=key[1],
                found=has,
                needed=spec,
            )
        return found
