"""The safetensors container (docs/format.md 1): headers read, checked and written.

The stock library offers neither a tensor's offset nor the header's own bytes, and both are needed to
stream tensors and to restore files byte for byte; so the header's JSON is read here, with the checks
that the stock library makes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpde.errors import Corrupt, NotSafetensors, Truncated, UnsupportedDtype
from tpde.format.constants import (
    DTYPES,
    MAX_BYTES,
    MAX_CONTAINER_HEADER,
    MAX_DIMS,
    SOURCE_HEADER_BYTES,
    SOURCE_HEADER_TIMES,
)
from tpde.format.source import Source, read


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
    ValueError
        If the shape cannot be.
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
            raise ValueError(f"a tensor cannot have the shape {self.shape}")
        if self.bits % 8 or self.bits // 8 >= MAX_BYTES:
            raise ValueError(
                f"a {self.dtype} tensor of shape {self.shape} has {self.bits} bits; whole bytes below "
                "2^60 are needed"
            )

    @property
    def bits(self) -> int:
        """Size in bits."""
        return math.prod(self.shape) * DTYPES[self.dtype].bits

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bits // 8


@dataclass(frozen=True)
class Entry:
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

    @property
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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _texts(parsed: dict[str, Any]) -> Iterator[str]:
    """Names of tensors, and names and texts of the metadata."""
    yield from parsed
    metadata = parsed.get("__metadata__")
    if isinstance(metadata, dict):
        for key, value in metadata.items():
            yield key
            yield value if isinstance(value, str) else ""


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _entry(name: str, info: Any, where: str) -> Entry:
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"{where}: tensor `{name}` lacks one of dtype, shape, data_offsets", tensor=name)
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedDtype(
            f"{where}: tensor `{name}` has dtype `{dtype}`, which this version does not know; known are "
            f"{', '.join(DTYPES)}",
            hint="upgrade tpde, or fetch the file again if it is damaged",
            where=name,
            found=dtype,
            needed=tuple(DTYPES),
        )
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and all(_is_size(n) for n in shape)):
        raise Corrupt(f"{where}: tensor `{name}` has the shape {str(shape)[:200]}", tensor=name)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(n) for n in offsets)):
        raise Corrupt(f"{where}: tensor `{name}` has the offsets {str(offsets)[:200]}", tensor=name)
    try:
        spec = TensorSpec(dtype, tuple(shape))
    except ValueError as error:
        raise Corrupt(f"{where}: tensor `{name}`: {error}", tensor=name) from None
    begin, end = offsets
    if end - begin != spec.nbytes:
        raise Corrupt(
            f"{where}: tensor `{name}` has {end - begin} bytes by its offsets, {spec.nbytes} by its "
            f"dtype {dtype} and shape {shape}",
            tensor=name,
            found=end - begin,
            needed=spec.nbytes,
        )
    return Entry(spec, begin, end)


def max_source_header(container_header: int) -> int:
    """Most bytes of a source's header, without its padding, beside a container's header (format.md 7).

    It names the same tensors and metadata. A bomb of 100 MB takes some kB in its frame, and gigabytes parsed.
    """
    return SOURCE_HEADER_BYTES + SOURCE_HEADER_TIMES * container_header


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
    try:
        parsed = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise NotSafetensors(
            f"{where}: the header is not JSON ({error}), so this is not a safetensors file, or it is damaged"
        ) from None
    if not isinstance(parsed, dict):
        raise NotSafetensors(f"{where}: the header is not a JSON object, so this is not a safetensors file")
    for text in _texts(parsed):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise NotSafetensors(
                f"{where}: the header has a text that is not Unicode: {text[:50]!a}"
            ) from None
    metadata = parsed.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Corrupt(f"{where}: `__metadata__` does not map names to texts")
    entries = {name: _entry(name, info, where) for name, info in parsed.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = 0
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


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def entry_json(name: str, spec: TensorSpec, begin: int, end: int) -> str:
    """One tensor's part of a header, without a comma."""
    info = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    return f"{_json(name)}:{_json(info)}"


def metadata_json(metadata: Mapping[str, str]) -> str:
    """The metadata's part of a header, without a comma; empty if there is none."""
    return f'"__metadata__":{_json(dict(metadata))}' if metadata else ""


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
    order = sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].code, name.encode()))
    at, entries = 0, []
    for name in order:
        entries.append(entry_json(name, specs[name], at, at + specs[name].nbytes))
        at += specs[name].nbytes
    header = join_header(metadata, entries)
    return header + b" " * (-len(header) % 8)
