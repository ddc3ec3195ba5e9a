"""Reading the header of a safetensors container (docs/format.md 1), and checking it against its file."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from tpde.errors import Corrupt, NotSafetensors, Truncated
from tpde.format.constants import (
    DELTA_MAGIC,
    MAX_CONTAINER_HEADER,
    SOURCE_HEADER_BYTES,
    SOURCE_HEADER_TIMES,
)
from tpde.format.container import Container, Entry
from tpde.format.header_json import parse_any, parse_usual
from tpde.io.sources import ByteSource, read
from tpde.memory.garbage import collecting_later


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
        entries, metadata = parse_usual(header) or parse_any(header, where)
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


def read_container(source: ByteSource) -> Container:
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
    first = bytes(read(source, 0, 8))
    (size,) = struct.unpack("<Q", first)
    if size > MAX_CONTAINER_HEADER:
        if first == DELTA_MAGIC:
            raise NotSafetensors(
                f"`{source.name}` is a delta, not a safetensors file",
                hint=f"restore its target with `tpde patch BASE {source.name} TARGET`",
                where=source.name,
            )
        raise NotSafetensors(
            f"`{source.name}` is not a safetensors file: its first 8 bytes, {first!r}, would be the size of "
            f"a header, and at most {MAX_CONTAINER_HEADER} is allowed",
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
