"""The header of a packed file: written last, in room that is left in front of the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from tpde.errors import InvalidArgument, InvalidInput, TpdeError
from tpde.format.blob_header import align
from tpde.format.constants import (
    ALIGN_BLOB,
    ALIGN_LARGE,
    KEY_PLAIN,
    KEY_VERSION,
    LARGE_BYTES,
    MAX_CONTAINER_HEADER,
    SUFFIX,
)
from tpde.format.container import TensorSpec, check_texts
from tpde.format.container_reader import max_source_header
from tpde.format.container_writer import entry_json, join_header, metadata_json, names_bytes


def given_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Metadata as a caller gave it.

    Raises
    ------
    InvalidArgument
        If it has a key of the format's own (format.md 1.3).
    """
    for key in metadata if isinstance(metadata, Mapping) else ():
        if isinstance(key, str) and is_own_key(key):
            raise InvalidArgument(
                f"the metadata has the key `{key}`, one of the format's own",
                hint=f"take a key that is not `{KEY_VERSION}`, nor begins with `{KEY_VERSION}.`",
                where=key,
            )
    return metadata


def is_own_key(key: str) -> bool:
    """Whether a key of metadata is one of the format's own (format.md 1.3)."""
    return key == KEY_VERSION or key.startswith(f"{KEY_VERSION}.")


def checked_metadata(names: Collection[str], metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The metadata, once names and metadata are such as readers take."""
    found = {} if metadata is None else metadata
    try:
        check_texts(names, found)
    except ValueError as error:
        raise InvalidInput(str(error), hint="change it, or no reader would open the file") from None
    return dict(found)


def data_start(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], source_header: bytes) -> int:
    """Where the data begins, behind room for any header that these tensors can get.

    Raises
    ------
    TpdeError
        If no reader would take such a header, or the source's.
    """
    total = sum(spec.nbytes for spec in specs.values())
    unit = ALIGN_LARGE if total >= LARGE_BYTES else ALIGN_BLOB if total >= 4 * ALIGN_BLOB else 8
    start = align(8 + _most_bytes(specs, metadata, total), unit)
    if start - 8 > MAX_CONTAINER_HEADER:
        raise TpdeError(
            f"{len(specs)} tensors need a header of {start - 8} bytes; a safetensors file "
            f"allows {MAX_CONTAINER_HEADER}",
            hint="write them to several files",
            found=start - 8,
            needed=MAX_CONTAINER_HEADER,
        )
    if len(source_header.rstrip(b" ")) > max_source_header(start - 8):
        raise TpdeError(
            f"the source's header has {len(source_header)} bytes, far more than its tensors and metadata "
            "need",
            hint="write it without the blanks between its values",
        )
    return start


def _most_bytes(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], total: int) -> int:
    """Most bytes that the header can take, whichever of the tensors are packed."""
    digits = len(str(total + total // 8 + (ALIGN_LARGE + 4096) * (len(specs) + 1)))
    largest = 10**digits - 1
    size = len(metadata_json({**metadata, KEY_PLAIN: "0" * (32 * len(specs))}).encode()) + 2
    packed = len(entry_json(SUFFIX, TensorSpec("U8", (largest,)), largest, largest))
    size += names_bytes(specs)
    for spec, count in Counter(specs.values()).items():  # few of many tensors differ in it
        size += count * (max(len(entry_json("", spec, largest, largest)), packed) + 1)
    return size


def packed_header(
    written: Mapping[str, tuple[TensorSpec, int, int]],
    metadata: Mapping[str, str],
    hashes: Mapping[str, str],
    start: int,
) -> bytes:
    """What lies in front of the data.

    Parameters
    ----------
    written : mapping of str to tuple
        What each tensor is as stored, and where it begins and ends.
    metadata : mapping of str to str
        All but the hashes.
    hashes : mapping of str to str
        Of the tensors that are stored plain.
    start : int
        Where the data begins.
    """
    if hashes:
        # Texts compare by code points, in the order of their UTF-8 bytes.
        metadata = {**metadata, KEY_PLAIN: "".join(hashes[name] for name in sorted(hashes))}
    entries = (entry_json(name, *where) for name, where in written.items())
    return (start - 8).to_bytes(8, "little") + join_header(metadata, entries).ljust(start - 8, b" ")
