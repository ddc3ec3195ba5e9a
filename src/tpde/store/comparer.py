"""What compares the tensors of two states, and how it does so on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tpde.codec import fingerprints
from tpde.codec.delta import ChangeModel
from tpde.codec.native import Bytes
from tpde.errors import TpdeError
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.format.delta_head import SAME, TensorEntry
from tpde.store.payloads import TensorPayload, are_equal, store_change, store_whole
from tpde.store.states import Key, State

Kind = tuple[int, int]
"""Bytes of a word, and whether it is signed in magnitude."""


def kind_of(spec: TensorSpec) -> Kind:
    """Of a tensor's words."""
    return DTYPES[spec.dtype].word_bytes, DTYPES[spec.dtype].rotate


class Wanted(NamedTuple):
    """Chunks of a tensor: ranges of its bytes, one after the other."""

    base: Key
    key: Key
    ranges: list[tuple[int, int]]


class Comparer(Protocol):
    """Compares the tensors of two states."""

    def chunks(self, wanted: Sequence[Wanted]) -> list[tuple[Bytes, Bytes]]:
        """Some chunks' bytes of tensors in both states, in their order."""

    def compare(
        self, key: Key, base: Key | None, models: Mapping[Kind, ChangeModel]
    ) -> tuple[TensorEntry, TensorPayload]:
        """How a tensor is stored. Tensors are asked for one after the other, all under the same models."""


class HostComparer:
    """Compares what states read, on the CPU.

    Parameters
    ----------
    base, target : State
        The states.
    threads : int
        How many threads encode.
    """

    def __init__(self, base: State, target: State, threads: int) -> None:
        self._base, self._target, self._threads = base, target, threads

    def chunks(self, wanted: Sequence[Wanted]) -> list[tuple[Bytes, Bytes]]:
        """Some chunks' bytes of tensors in both states, in their order."""
        return [pair for it in wanted for pair in self._chunks(it)]

    def _chunks(self, it: Wanted) -> Iterator[tuple[Bytes, Bytes]]:
        try:
            old = self._base.read_parts(it.base, it.ranges, self._threads)
            new = self._target.read_parts(it.key, it.ranges, self._threads)
        except TpdeError:
            self._base.read(it.base, self._threads)  # which compares hashes: they say what is wrong
            self._target.read(it.key, self._threads)
            raise
        return zip(old, new, strict=True)

    def compare(
        self, key: Key, base: Key | None, models: Mapping[Kind, ChangeModel]
    ) -> tuple[TensorEntry, TensorPayload]:
        """How a tensor is stored; its states are gone when this returns."""
        spec, new = self._target.specs[key], self._target.read(key, self._threads)
        entry = TensorEntry(key[1], spec, SAME, target=fingerprints.fingerprint(new))
        if base is None:
            return entry, store_whole(spec, new, self._threads)
        old = self._base.read(base, self._threads)
        entry.base = fingerprints.fingerprint(old)
        if entry.base == entry.target and are_equal(old, new):
            return entry, TensorPayload(SAME, new[:0])
        return entry, store_change(spec, models[kind_of(spec)], old, new, self._threads)
