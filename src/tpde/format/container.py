"""The safetensors container (docs/format.md 1): headers read, checked and written.

The stock library offers neither a tensor's offset nor the header's own bytes, and both are needed to
stream tensors and to restore files byte for byte; so the header's JSON is read here, with the checks
that the stock library makes.
"""

from __future__ import annotations

import json
import math
import operator
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from tpde.errors import Corrupt, InvalidArgument, NotSafetensors, Truncated, UnsupportedDtype
from tpde.format.constants import (
    DTYPES,
    MAX_BYTES,
    MAX_CONTAINER_HEADER,
    MAX_DIMS,
    SOURCE_HEADER_BYTES,
    SOURCE_HEADER_TIMES,
)
from tpde.io.sources import Source, read
from tpde.memory.garbage import collecting_later


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor.

    Parameters
    ----------
    dtype : str
        Its name in safetensors, such as `BF16`.
    shape : tuple of int
        Its dimensions; empty for a scalar.

    Raises
    ------
    UnsupportedDtype
        If the dtype is not one of docs/format.md 2.1.
    InvalidArgument
        If the shape cannot be: a `ValueError`, too.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedDtype(
                f"dtype `{self.dtype}` is not known to this version; known are {', '.join(DTYPES)}",
                hint="upgrade tpde",
                found=self.dtype,
                needed=tuple(DTYPES),
            )
        if len(self.shape) > MAX_DIMS or any(n < 0 for n in self.shape):
            raise InvalidArgument(
                f"a tensor cannot have the shape {str(self.shape)[:200]}",
                hint=f"give up to {MAX_DIMS} dimensions, none of them negative",
                where="shape",
                found=self.shape,
            )
        # Also of a tensor without elements: no library holds one whose other dimensions overflow.
        if math.prod(filter(None, self.shape)) * DTYPES[self.dtype].bits >= 8 * MAX_BYTES or self.bits % 8:
            raise InvalidArgument(
                f"a {self.dtype} tensor cannot have the shape {str(self.shape)[:200]}",
                hint="whole bytes below 2^60 are needed, with any dimension of 0 taken as 1",
                where="shape",
                found=self.shape,
            )

    @cached_property
    def bits(self) -> int:
        """Size in bits."""
        return math.prod(self.shape) * DTYPES[self.dtype].bits

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bits // 8

    @cached_property
    def json(self) -> str:
        """What an entry of a header says of it."""
        return f'"dtype":"{self.dtype}","shape":[{",".join(map(str, self.shape))}]'


@lru_cache(1 << 12)
def tensor_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A `TensorSpec`, the same one for the same arguments: models have few, and they are quickly compared."""
    return TensorSpec(dtype, shape)


class Entry(NamedTuple):
    """A tensor of a container: what it is, and where its bytes lie in the data section."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True)
class Container:
    """A parsed safetensors header.

    Attributes
    ----------
    header : bytes
        The header's JSON with its padding.
    entries : dict of str to Entry
        In ascending order of their bytes.
    metadata : dict of str to str
        The header's `__metadata__`.
    data_start : int
        Where the data section starts in the file, in bytes.
    """

    header: bytes
    entries: dict[str, Entry]
    metadata: dict[str, str]

    @cached_property
    def data_start(self) -> int:
        """Where the data section starts in the file, in bytes."""
        return 8 + len(self.header)

    @property
    def data_bytes(self) -> int:
        """Size of the data section."""
        return max((e.end for e in self.entries.values()), default=0)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What each tensor is."""
        return {name: entry.spec for name, entry in self.entries.items()}

    def places(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Where in the file some tensors begin, and their sizes."""
        start, found = self.data_start, [self.entries[name] for name in names]
        return [(start + begin, end - begin) for _, begin, end in found]


METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
# An entry as writers write it, with the comma behind it: its name, dtype and shape, begin and end.
_ENTRY = re.compile(
    r' ?"([^"\\\x00-\x1f]*)": ?\{("dtype": ?"[^"\\\x00-\x1f]*", ?"shape": ?\[[0-9, ]*\])'
    r', ?"data_offsets": ?\[(0|[1-9][0-9]{0,18}), ?(0|[1-9][0-9]{0,18})\]\},'
)
_METADATA_LEAD = re.compile(rf'\{{ ?"{METADATA}": ?')
_BLOCK = 1 << 20  # characters whose entries are found at once: what is made meanwhile stays small


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _are_names(names: Collection[Any]) -> bool:
    """Whether all names are what a tensor may be called, told by all of them at once."""
    try:
        return METADATA not in names and _is_unicode("".join(names))
    except TypeError:  # not texts
        return False


def check_texts(names: Collection[object], metadata: object) -> None:
    """Check names of tensors and `__metadata__`: what every reader demands, and so every writer asks for.

    Parameters
    ----------
    names : collection of str
        Of tensors.
    metadata : mapping of str to str
        Of the file.

    Raises
    ------
    ValueError
        Saying what is wrong, and where.
    """
    for name in () if _are_names(names) else names:
        if not isinstance(name, str):
            raise ValueError(f"the name {name!a:.200} is a {type(name).__name__}; names are texts")
        if name == METADATA:
            raise ValueError(f"a tensor cannot be called `{METADATA}`, which is the place of metadata")
        if not _is_unicode(name):
            raise ValueError(f"the name {name[:50]!a} is not Unicode")
    if not isinstance(metadata, Mapping):
        raise ValueError(f"`{METADATA}` is a {type(metadata).__name__}; it maps names to texts")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            kinds = f"{type(key).__name__} to {type(value).__name__}"
            raise ValueError(f"`{METADATA}` maps {kinds} at {key!a:.200}; it maps names to texts")
        if not _is_unicode(key) or not _is_unicode(value):
            raise ValueError(f"`{METADATA}` at {key[:50]!a} is not Unicode")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What an object of the JSON holds, none of whose names may occur twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique)


class _Entries:
    """Reads the entries of one header, and says what is wrong with them."""

    def __init__(self, where: str) -> None:
        self._where, self._sound = where, True

    def of_object(self, pairs: list[tuple[str, Any]]) -> Entry | dict[str, Any]:
        """What an object of the JSON is: an entry if it is a sound one, which spares many objects.

        Anything else is a dictionary, for `read` to say what is wrong with it, and by name.
        """
        result = _unique(pairs)
        if self._sound and "data_offsets" in result:
            try:
                return self.read("", result)
            except (Corrupt, UnsupportedDtype):
                self._sound = False  # all is in vain then: errors for a million entries would take seconds
        return result

    def read(self, name: str, info: Any) -> Entry:
        """An entry that `of_object` left. Unknown keys are passed over, as the stock library does."""
        if not isinstance(info, dict) or not info.keys() >= _KEYS:
            raise self._corrupt(name, "lacks one of dtype, shape, data_offsets")
        shape, offsets = info["shape"], info["data_offsets"]
        spec = self._spec(name, info["dtype"], shape)
        if not (isinstance(offsets, list) and len(offsets) == 2 and _are_sizes(offsets)):
            raise self._corrupt(name, f"has the offsets {_short(offsets)}")
        begin, end = offsets
        if end - begin != spec.nbytes:
            raise self._corrupt(
                name,
                f"has {end - begin} bytes by its offsets, {spec.nbytes} by its dtype {spec.dtype} and shape "
                f"{_short(shape)}",
                found=end - begin,
                needed=spec.nbytes,
            )
        return Entry(spec, begin, end)

    def _spec(self, name: str, dtype: Any, shape: Any) -> TensorSpec:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UnsupportedDtype(
                f"{self._where}: tensor `{name}` has dtype `{_short(dtype)}`, which this version does not "
                f"know; known are {', '.join(DTYPES)}",
                hint="upgrade tpde, or fetch the file again if it is damaged",
                where=name,
                found=_short(dtype),
                needed=tuple(DTYPES),
            )
        if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and _are_sizes(shape)):
            raise self._corrupt(name, f"has the shape {_short(shape)}")
        try:
            return tensor_spec(dtype, tuple(shape))
        except ValueError as error:
            raise self._corrupt(name, f"is impossible: {error}") from None

    def _corrupt(self, name: str, what: str, *, found: object = None, needed: object = None) -> Corrupt:
        return Corrupt(f"{self._where}: tensor `{name}` {what}", tensor=name, found=found, needed=needed)


def _short(value: object) -> str:
    """What JSON held, as messages show it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if any(isinstance(it, (list, dict)) for it in inside):
        return f"a nested {type(value).__name__}"  # which may be too deep to be written
    return str(value)[:200]


def _are_sizes(values: list[Any]) -> bool:
    return all([type(n) is int and n >= 0 for n in values])  # noqa: C419 - half the time, for short lists


def _are_in_order(entries: Mapping[str, Entry]) -> bool:
    at = 0
    for _, begin, end in entries.values():
        if begin != at:
            return False
        at = end
    return True


def max_source_header(container_header: int) -> int:
    """Most bytes of a source's header, without its padding, beside a container's header (format.md 7).

    It names the same tensors and metadata. A bomb of 100 MB takes some kB in its frame, and gigabytes parsed.
    """
    return SOURCE_HEADER_BYTES + SOURCE_HEADER_TIMES * container_header


_Parsed = tuple[dict[str, Entry], dict[str, str]]  # entries and metadata


def _parse_usual(header: bytes) -> _Parsed | None:
    """Parse a header that is written as usual; None for any other, and for one that is not sound.

    Usual are metadata in front, keys in the order of the stock library, and names without escapes. Blocks of
    such entries take half the time of entries one by one.
    """
    try:
        text = header.rstrip(b" ").decode()
        lead = _METADATA_LEAD.match(text)
        metadata, at = _UNIQUE.raw_decode(text, lead.end()) if lead else ({}, 0)
        last = len(text) - 1
        if text[at : at + 1] != ("," if lead else "{") or text[last:] != "}" or at + 1 >= last:
            return None
        at, count = at + 1, 0
        entries: dict[str, Entry] = {}
        specs: dict[str, TensorSpec] = {}
        while at < last:
            whole = at + _BLOCK >= last
            stop = last if whole else text.rfind("},", at, at + _BLOCK) + 2
            parts = _ENTRY.split(text[at:stop] + "," * whole)
            gaps, names, kinds, begins, ends = (parts[i::5] for i in range(5))
            if any(gaps) or not names:
                return None
            new = list(set(kinds).difference(specs))
            for kind, info in zip(new, json.loads(f"[{{{'},{'.join(new)}}}]") if new else (), strict=True):
                specs[kind] = tensor_spec(info["dtype"], tuple(info["shape"]))
            found = [specs[kind] for kind in kinds]
            first, behind = list(map(int, begins)), list(map(int, ends))
            if list(map(operator.sub, behind, first)) != [spec.nbytes for spec in found]:
                return None
            # In C: a call of `Entry` for each would take a quarter of the time.
            made = map(tuple.__new__, repeat(Entry), zip(found, first, behind, strict=True))
            entries.update(zip(names, made, strict=True))
            at, count = stop, count + len(names)
        metadata = {} if metadata is None else metadata
        check_texts(entries, metadata)
    except (ValueError, RecursionError, UnsupportedDtype):
        return None
    return (entries, metadata) if len(entries) == count else None  # else a name occurs twice


def _parse_any(header: bytes, where: str) -> _Parsed:
    """Parse any header, or say what is wrong with it."""
    reader = _Entries(where)
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=reader.of_object)
    except (ValueError, RecursionError) as error:
        raise NotSafetensors(
            f"{where}: the header is not JSON ({error}), so this is not a safetensors file, or it is damaged"
        ) from None
    if not isinstance(parsed, dict):
        raise NotSafetensors(f"{where}: the header is not a JSON object, so this is not a safetensors file")
    metadata = parsed.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    try:
        check_texts(parsed, metadata)
    except ValueError as error:
        raise Corrupt(f"{where}: {error}") from None
    entries = {
        name: info if type(info) is Entry else reader.read(name, info) for name, info in parsed.items()
    }
    return entries, metadata


def parse_header(header: bytes, where: str) -> Container:
    """Parse and check a header's JSON.

    Parameters
    ----------
    header : bytes
        The JSON with its padding.
    where : str
        What messages call the file.

    Raises
    ------
    NotSafetensors, Corrupt, UnsupportedDtype
        Naming the tensor where one is at fault.
    """
    with collecting_later():  # which would take a third of the time, and find nothing in what was parsed
        entries, metadata = _parse_usual(header) or _parse_any(header, where)
    if _are_in_order(entries):
        return Container(header, entries, metadata)
    entries, at = dict(sorted(entries.items(), key=lambda item: item[1][1:])), 0
    for name, entry in entries.items():
        if entry.begin != at:
            raise Corrupt(
                f"{where}: tensor `{name}` starts at {entry.begin}, the one before it ends at {at}; a "
                "safetensors file has neither gaps nor overlaps",
                hint="fetch the file again",
                tensor=name,
                found=entry.begin,
                needed=at,
            )
        at = entry.end
    return Container(header, entries, metadata)


def read_container(source: Source) -> Container:
    """Read and check the header of a safetensors file.

    Raises
    ------
    Truncated
        If the file ends before the header, or before the data that it describes.
    NotSafetensors, Corrupt, UnsupportedDtype
        If it is not a safetensors file, or not a valid one.
    """
    if source.size < 8:
        raise Truncated(
            f"`{source.name}` has {source.size} bytes; a safetensors file starts with 8 bytes for the size "
            "of its header",
            hint="the file is incomplete, fetch the rest",
            where=source.name,
            found=source.size,
            needed=8,
        )
    (size,) = struct.unpack("<Q", read(source, 0, 8))
    if size > MAX_CONTAINER_HEADER:
        raise NotSafetensors(
            f"`{source.name}` is not a safetensors file: its first 8 bytes give a header of {size} bytes, "
            f"at most {MAX_CONTAINER_HEADER} are allowed",
            where=source.name,
            found=size,
            needed=MAX_CONTAINER_HEADER,
        )
    container = parse_header(read(source, 8, size), f"`{source.name}`")
    found, needed = source.size - container.data_start, container.data_bytes
    if found < needed:
        raise Truncated(
            f"`{source.name}` has {found} bytes of data, its header describes {needed}",
            hint="the file is incomplete, fetch the rest",
            where=source.name,
            found=found,
            needed=needed,
        )
    if found > needed:
        raise Corrupt(
            f"`{source.name}` has {found} bytes of data, its header describes only {needed}",
            hint="the file is damaged, fetch it again",
            where=source.name,
            found=found,
            needed=needed,
        )
    return container


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_text = json.encoder.encode_basestring  # what it does to texts, in C


def names_bytes(names: Iterable[str]) -> int:
    """Bytes that names take in a header, without their quotes."""
    return len(_encode("".join(names)).encode()) - 2


def entry_json(name: str, spec: TensorSpec, begin: int, end: int) -> str:
    """One tensor's part of a header, without a comma."""
    return f'{_encode_text(name)}:{{{spec.json},"data_offsets":[{begin},{end}]}}'


def metadata_json(metadata: Mapping[str, str]) -> str:
    """The metadata's part of a header, without a comma; empty if there is none."""
    return f'"{METADATA}":{_encode(dict(metadata))}' if metadata else ""


def join_header(metadata: Mapping[str, str], entries: Iterable[str]) -> bytes:
    """Put a header's parts together, without padding."""
    parts = [part for part in (metadata_json(metadata), *entries) if part]
    return ("{" + ",".join(parts) + "}").encode()


def canonical_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Write the header that the stock library would write for these tensors.

    Tensors are sorted by dtype, descending in the order of docs/format.md 2.1, then by name; the header is
    padded with spaces to a multiple of 8 bytes. The metadata's order is the mapping's own.

    Parameters
    ----------
    specs : mapping of str to TensorSpec
        The tensors.
    metadata : mapping of str to str
        May be empty.

    Returns
    -------
    bytes
        The JSON with its padding, without the 8 bytes of its length.
    """
    # Texts compare by code points, in the order of their UTF-8 bytes.
    order = sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].code, name))
    at, entries = 0, []
    for name in order:
        entries.append(entry_json(name, specs[name], at, at + specs[name].nbytes))
        at += specs[name].nbytes
    header = join_header(metadata, entries)
    return header + b" " * (-len(header) % 8)
