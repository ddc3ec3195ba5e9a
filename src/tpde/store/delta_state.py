"""A delta file on its base: a state like any other, whose tensors are made when they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable

import xxhash

from tpde.codec.fingerprints import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, MissingBase
from tpde.format.container import TensorSpec
from tpde.format.delta_head import SAME, WITH_BASE, OtherEntry, TensorEntry, WeightsEntry
from tpde.format.delta_reader import check_header
from tpde.store.delta_file import DeltaFile
from tpde.store.states import BaseTensors, Key, State, right_base


class DeltaState:
    """The state that a delta makes of its base.

    Parameters
    ----------
    file : DeltaFile
        The delta. It is closed with the state, or if this fails.
    base : State
        Its base, likewise.

    Raises
    ------
    MissingBase
        If the base lacks a file or a tensor, or has it with another dtype or shape.
    """

    def __init__(self, file: DeltaFile, base: State) -> None:
        self.name, self.base, self.file = file.name, base, file
        self.headers: dict[str, bytes] = {}
        self.specs: dict[Key, TensorSpec] = {}
        self.others: dict[str, Callable[[], bytes]] = {}
        self.other_bytes: dict[str, int] = {}
        self._tensors: dict[Key, TensorEntry] = {}
        self._bases: dict[Key, Key] = {}
        try:
            finder = BaseTensors(base.specs, base.name)
            for entry in file.head.files:
                if isinstance(entry, OtherEntry):
                    self.others[entry.name] = functools.partial(self._other, entry)
                    if not entry.size and entry.name in base.other_bytes:
                        self.other_bytes[entry.name] = base.other_bytes[entry.name]
                else:
                    self._weights(entry, finder)
        except BaseException:
            self.close()
            raise

    def _weights(self, file: WeightsEntry, finder: BaseTensors) -> None:
        header = file.header
        if header is None:
            header = self.base.headers.get(file.name)
            if header is None:
                what = f"`{file.name}` is not in the base `{self.base.name}`"
                if not file.name:  # of a single file
                    what = f"`{self.name}` was made from a file, the base `{self.base.name}` is a directory"
                raise MissingBase(
                    what,
                    hint="name the base that the delta was made from",
                    where=file.name,
                )
        for it in file.tensors:
            key = file.name, it.name
            self._tensors[key], self.specs[key] = it, it.spec
            if it.codec in WITH_BASE:
                self._bases[key] = finder.need(key, it.spec)
        try:
            check_header(file, header, f"`{self.base.name}`")
        except Corrupt as error:
            raise MissingBase(error.message, hint="name the base that the delta was made from") from None
        self.headers[file.name] = header

    def _other(self, file: OtherEntry) -> bytes:
        if file.size:
            content = self.file.other(file)
        elif file.name in self.base.others:
            content = self.base.others[file.name]()
        else:
            content = b""
        found = xxhash.xxh3_128_hexdigest(content)
        if found != file.hash:
            kind = Corrupt if file.size else MissingBase
            raise kind(
                f"file `{file.name}` of `{self.name if file.size else self.base.name}` hashes to {found}, "
                f"{file.hash} is needed",
                hint="fetch it again" if file.size else "name the base that the delta was made from",
                where=file.name,
                found=found,
                needed=file.hash,
            )
        return content

    def read(self, key: Key, threads: int) -> Bytes:
        """Make a tensor.

        Raises
        ------
        MissingBase
            If the base's has another fingerprint.
        Corrupt
            If the delta is damaged.
        """
        it, old = self._tensors[key], None
        if key in self._bases:
            old = self.base.read(self._bases[key], threads)
            found = fingerprint(old)
            if found != it.base:
                raise other_base(it, self.base.name, self.name, found)
            if it.codec == SAME:
                return old
        return self.file.target_of(it, old, threads)

    def read_parts(self, key: Key, ranges: list[tuple[int, int]], threads: int) -> list[Bytes]:
        """Make some bytes of a tensor; no fingerprint is compared."""
        it, olds = self._tensors[key], list[Bytes | None]([None] * len(ranges))
        if key in self._bases:
            olds = list(self.base.read_parts(self._bases[key], ranges, threads))
        return [self.file.part_of(it, old, *part, threads) for old, part in zip(olds, ranges, strict=True)]

    def close(self) -> None:
        """Close the delta and its base."""
        try:
            self.file.close()
        finally:
            self.base.close()


def other_base(it: TensorEntry, base: str, delta: str, found: bytes) -> MissingBase:
    """The error for a base whose tensor has another fingerprint than the delta's had."""
    return MissingBase(
        f"tensor `{it.name}` of `{base}` is not what `{delta}` was made from: its fingerprint is "
        f"{found.hex()}, {it.base.hex()} is needed",
        hint=right_base(base),
        where=it.name,
        found=found.hex(),
        needed=it.base.hex(),
    )
